"""`windlass show`: where a run stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from windlass.cli.jobs import find, on_option, run_names

if TYPE_CHECKING:
    from windlass.targets.protocol import PodRow

MOST_PODS = 32  # in the table; --json has them all


@click.command(short_help="Show where a run stands.")
@click.argument("name", shell_complete=run_names)
@click.option("--curve", is_flag=True, help="Draw the loss curve.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(name: str, curve: bool, place: str | None, as_json: bool) -> None:
    """Show where a run stands."""
    from dataclasses import asdict

    from windlass.cli.follow import describe_event
    from windlass.cli.output import duration, print_json, print_pairs
    from windlass.cli.summary import draw_loss, loss_points, summarize
    from windlass.runfolder import read_json_lines
    from windlass.targets.protocol import HasPods

    target, job = find(name, place)
    status, summary = target.status(job), summarize(job.folder)
    pods = list(target.pods(job)) if isinstance(target, HasPods) else None
    history = list(read_json_lines(job.folder.history))
    if as_json:
        result = {"name": job.name, "folder": str(job.folder.path), **status.as_dict(), "summary": summary.as_dict()}
        if pods is not None:
            result["pods"] = [asdict(pod) for pod in pods]
        print_json({**result, "history": history, **({"curve": loss_points(job.folder)} if curve else {})})
        return
    rows = [("run", job.name), ("state", status.state)]
    if status.reason:
        rows.append(("reason", status.reason))
    if status.steps:
        rows.append(
            ("progress", f"{status.step}/{status.steps}" + (f", {duration(status.eta)} left" if status.eta else ""))
        )
    print_pairs([*rows, ("attempt", str(status.attempt or "–")), *summary.rows(), ("folder", str(job.folder.path))])
    if pods:
        _print_pods(pods)
    news = [text for record in history if (text := describe_event(record))]
    if news:
        click.echo("\n" + "\n".join(f"  {text}" for text in news[-10:]))
    if curve:
        click.echo(f"\n{draw_loss(job.folder)}")


def _print_pods(pods: Sequence[PodRow]) -> None:
    """Those that do not run first: they are what somebody looks for."""
    from rich.markup import escape

    from windlass.cli.output import duration, print_table

    click.echo()
    order = sorted(pods, key=lambda pod: (pod.phase == "Running", pod.ranks))
    rows = [
        [pod.name, _span(pod.ranks), pod.phase, escape(pod.reason), duration(pod.age), pod.node, str(pod.restarts)]
        for pod in order[:MOST_PODS]
    ]
    print_table(["POD", "RANKS", "PHASE", "REASON", "AGE", "NODE", "RESTARTS"], rows)
    if len(pods) > MOST_PODS:
        click.echo(f"and {len(pods) - MOST_PODS} more")


def _span(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "–"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
