"""`windlass logs`: what the ranks of a run said."""

from __future__ import annotations

import json

import click

from windlass.cli.jobs import find, on_option, run_names


@click.command(short_help="Print what the ranks of a run said.")
@click.argument("name", shell_complete=run_names)
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@on_option
@click.option("--json", "as_json", is_flag=True, help="JSON: an array of lines; with --follow, one object per line.")
def logs(name: str, rank: int | None, follow: bool, place: str | None, as_json: bool) -> int | None:
    """Print what the ranks of a run said."""
    from windlass.cli.output import print_json
    from windlass.errors import ExitCode, UserError

    target, job = find(name, place)
    lines = target.logs(job, rank=rank, follow=follow)
    if rank is not None and not follow:
        lines = iter(list(lines))  # a cluster's log may only come to be here by asking for it
        if not job.folder.rank_log(rank).exists():
            raise UserError(f"rank {rank} of {job.name} has said nothing", evidence=f"no {job.folder.rank_log(rank)}")
    if as_json and not follow:
        print_json([{"rank": line.rank, "text": line.text} for line in lines])
        return None
    try:
        for line in lines:
            if as_json:
                click.echo(json.dumps({"rank": line.rank, "text": line.text}))
            elif rank is not None:
                click.echo(line.text)
            else:
                click.echo(f"[{'launcher' if line.rank is None else line.rank}] {line.text}")
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return None
