"""`windlass stop`: end a run, with a checkpoint unless told otherwise."""

from __future__ import annotations

import click

from windlass.cli.jobs import json_option, on_option, quiet_option, run_names
from windlass.cli.output import print_json


@click.command(short_help="Save a checkpoint and stop a run.")
@click.argument("name", shell_complete=run_names)
@click.option("--now", is_flag=True, help="Kill it; what is newer than the last checkpoint is lost.")
@on_option
@quiet_option
@json_option
def stop(name: str, now: bool, place: str | None, quiet: bool, as_json: bool) -> None:
    """Save a checkpoint and stop a run.

    Waits until it has stopped, at most checkpoint.grace_seconds. Stopping a run that has ended is no error.
    """
    from windlass.api.jobs import Job
    from windlass.targets.protocol import ENDED

    job = Job.find(name, place)
    if not as_json and not quiet and job.status().state not in ENDED:
        click.echo(f"stopping {job.name}" + ("" if now else ": the ranks save first"), err=True)
    after = job.stop(save_first=not now)
    if as_json:
        print_json(after)
    elif quiet:
        return
    elif after.was in ENDED:
        click.echo(f"{job.name} has ended already: {after.state}")
    elif after.state == "finished":
        click.echo(f"{job.name} is finished: it came to its end first")
    else:
        where = f" at step {after.step}" if after.step else ""
        click.echo(f"{job.name} is {after.state}{where}; `windlass run` goes on from its last checkpoint")
