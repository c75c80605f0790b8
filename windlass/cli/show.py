"""`windlass show`: where a run stands."""

from __future__ import annotations

import click

from windlass.cli.jobs import find, run_names


@click.command(short_help="Show where a run stands.")
@click.argument("name", shell_complete=run_names)
@click.option("--curve", is_flag=True, help="Draw the loss curve.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def show(name: str, curve: bool, as_json: bool) -> None:
    """Show where a run stands."""
    from windlass.cli.follow import describe_event
    from windlass.cli.output import duration, print_json, print_pairs
    from windlass.cli.summary import draw_loss, loss_points, summarize
    from windlass.runfolder import read_json_lines

    target, job = find(name)
    status, summary = target.status(job), summarize(job.folder)
    history = list(read_json_lines(job.folder.history))
    if as_json:
        result = {"name": job.name, "folder": str(job.folder.path), **status.as_dict(), "summary": summary.as_dict()}
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
    news = [text for record in history if (text := describe_event(record))]
    if news:
        click.echo("\n" + "\n".join(f"  {text}" for text in news[-10:]))
    if curve:
        click.echo(f"\n{draw_loss(job.folder)}")
