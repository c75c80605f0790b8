"""`windlass ls`: the runs there are."""

from __future__ import annotations

import click


@click.command(short_help="List the runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def ls(as_json: bool) -> None:
    """List the runs."""
    from windlass.cli.output import count, duration, number, print_json, print_table
    from windlass.runfolder import runs_root
    from windlass.targets import target_of_kind

    where = target_of_kind("local")
    found = [(job, where.status(job)) for job in where.list()]
    if as_json:
        print_json([{"name": job.name, "target": job.target, **status.as_dict()} for job, status in found])
    elif not found:
        click.echo(f"no runs in {runs_root()}/\n  windlass init my.yaml    writes a run file")
    else:
        print_table(
            ["NAME", "STATE", "STEP", "LOSS", "TOK/S", "LEFT"],
            [
                [
                    job.name,
                    status.state,
                    f"{status.step}/{status.steps}" if status.step is not None else "–",
                    number(status.loss),
                    count(status.tokens_per_s),
                    duration(status.eta),
                ]
                for job, status in found
            ],
        )
