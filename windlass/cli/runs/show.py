"""`windlass show`: where a run stands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.jobs import json_option, on_option, run_names
from windlass.cli.output import duration, moment, plain, plural, print_json, print_pairs, print_table, styled, wrapped
from windlass.cli.runs.ls import COLOURS
from windlass.common.files import read_json_lines, real, whole

if TYPE_CHECKING:
    from windlass.api.schemas.runs import Pod, ShownRun, Status
    from windlass.api.summary import History
    from windlass.runfolder import RunFolder

MOST_PODS = 32  # in the table; --json has them all
MOST_NEWS = 12
MOST_EVALUATIONS = 32


@click.command(short_help="Show where a run stands.")
@click.argument("name", shell_complete=run_names)
@click.option("--curve", is_flag=True, help="Draw the loss curve.")
@click.option("--ranks", "by_rank", is_flag=True, help="Compare the ranks: which is slow, by how much, since when.")
@click.option("--history", "tells_story", is_flag=True, help="Everything that happened, with every decision and why.")
@on_option
@json_option
def show(name: str, curve: bool, by_rank: bool, tells_story: bool, place: str | None, as_json: bool) -> None:
    """Show where a run stands."""
    from windlass.api.jobs import shown_run
    from windlass.api.lookup import find
    from windlass.cli.runs.summary import draw_loss, goodput_rows, print_evaluations, print_ranks, summary_rows
    from windlass.targets.launch.ending import unrecorded_end

    target, job = find(name, place)
    if tells_story and not as_json:
        status = target.status(job)  # brings what its pods have said since
        _print_history(job.folder, unrecorded_end(job.folder, status))
        return
    shown, history = shown_run(target, job, curve=curve and as_json, ranks=by_rank)
    if as_json:
        print_json(shown)
        return
    rows = [("run", job.name), *_state_rows(shown), *_rows(shown, history)]
    print_pairs([*rows, *summary_rows(shown.summary), *goodput_rows(shown.goodput), ("folder", shown.folder)])
    if shown.pods:
        _print_pods(shown.pods)
    if shown.evaluations:
        click.echo()
        print_evaluations(shown.evaluations[-MOST_EVALUATIONS:])
        if len(shown.evaluations) > MOST_EVALUATIONS:
            click.echo(f"and {len(shown.evaluations) - MOST_EVALUATIONS} older")
    _print_news(history)
    if by_rank:
        print_ranks(shown.ranks)
    if curve:
        click.echo(f"\n{draw_loss(job.folder)}")


def _print_history(folder: RunFolder, end: Mapping[str, Any] | None) -> None:
    """The history in the order in which it happened; copies of checkpoints in memory and on disks are left out."""
    day = ""
    records = [*read_json_lines(folder.history), *([end] if end else [])]
    timed = [(real(record.get("time")), record) for record in records]
    for when, record in sorted(timed, key=lambda pair: math.inf if pair[0] is None else pair[0]):
        text = _sentence(record)
        if text is None:
            continue
        date, _, clock = moment(when).rpartition(" ") if when is not None else (day, "", "–")
        if date != day:
            click.echo(date)
            day = date
        lines = plain(text).replace("\n", f"\n{' ' * 10}")
        click.echo(wrapped(f"  {clock:<8}  {lines}", " " * 12))


def _sentence(record: Mapping[str, Any]) -> str | None:
    from windlass.cli.runs.follow import describe_event

    match record.get("event"):
        case "launched":
            pods = record.get("pods")
            on = f" in {', '.join(map(str, pods))}" if isinstance(pods, list) else ""
            return f"attempt {record.get('attempt')}: the ranks are started{on}"
        case "restart":
            left = whole(record.get("left"))
            more = f"; {left} more without a new checkpoint" if left is not None else ""
            return f"{describe_event(record)}: {record.get('class') or 'decided'}: {record.get('why')}{more}"
        case "exit":
            reason = f": {record.get('reason')}" if record.get("reason") else ""
            return f"{record.get('state')}{reason}"
    return describe_event(record)


def _state_rows(status: Status) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [("state", styled(status.state, COLOURS.get(status.state, "")))]
    if status.reason:
        rows.append(("reason", status.reason))
    if status.steps:
        left = f", {duration(status.eta)} left" if status.eta else ""
        rows.append(("progress", f"{status.step}/{status.steps}{left}"))
    return [*rows, ("attempt", str(status.attempt or "–"))]


def _rows(shown: ShownRun, history: History) -> list[tuple[str, str]]:
    rows = [("model", str(shown.model))]
    if shown.started is not None:
        rows.append(("started", moment(shown.started)))
        if shown.seconds is not None:
            rows.append(("took" if history.ended is not None else "running for", duration(shown.seconds)))
    return rows


def _print_news(history: History) -> None:
    """What happened, in the order in which it did; saves are counted, since they are most of what happens."""
    from windlass.cli.runs.follow import describe_event

    records = (record for record in history.records if record.get("event") != "checkpoint")
    described = [(real(record.get("time")), text) for record in records if (text := describe_event(record))]
    news = described[-MOST_NEWS:]
    if news or history.saves:
        click.echo()
    for when, text in news:
        stamp = moment(when)[-8:] if when is not None else "–"
        click.echo(wrapped(f"  {stamp:<8}  {plain(text)}", " " * 12))
    if history.saves:
        click.echo(f"  {plural(history.saves, 'checkpoint')} saved, the newest of step {history.newest_save}")


def _print_pods(pods: Sequence[Pod]) -> None:
    """Those that do not run first: they are what somebody looks for."""
    click.echo()
    order = sorted(pods, key=lambda pod: (pod.phase == "Running", pod.ranks))
    rows = [
        [pod.name, _span(pod.ranks), pod.phase, pod.reason, duration(pod.age), pod.node, str(pod.restarts)]
        for pod in order[:MOST_PODS]
    ]
    print_table(["POD", "RANKS", "PHASE", "REASON", "AGE", "NODE", "RESTARTS"], rows)
    if len(pods) > MOST_PODS:
        click.echo(f"and {len(pods) - MOST_PODS} more")


def _span(ranks: Sequence[int]) -> str:
    if not ranks:
        return "–"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
