"""`windlass ls`: the runs there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from windlass.targets.protocol import JobRef, Target


@click.command(short_help="List the runs.")
@click.option("--on", "place", metavar="TARGET", help="Also those that a cluster, kubernetes[:CONTEXT], knows itself.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def ls(place: str | None, as_json: bool) -> None:
    """List the runs."""
    from rich.markup import escape

    from windlass.cli.output import count, duration, number, print_json, print_table
    from windlass.runfolder import runs_root

    found = list(_runs())
    if place:
        found += _elsewhere(place, {job.name for job, _ in found})
    if as_json:
        print_json([{"name": job.name, "target": job.target, **status} for job, status in found])
    elif not found:
        click.echo(f"no runs in {runs_root()}/\n  windlass init my.yaml    writes a run file")
    else:
        print_table(
            ["NAME", "TARGET", "STATE", "STEP", "LOSS", "TOK/S", "LEFT", "WHY"],
            [
                [
                    job.name,
                    job.target,
                    status["state"],
                    f"{status['step']}/{status['steps']}" if status.get("step") is not None else "–",
                    number(status.get("loss")),
                    count(status.get("tokens_per_s")),
                    duration(status.get("eta")),
                    escape(status.get("reason") or ""),
                ]
                for job, status in found
            ],
        )


def _runs() -> Iterator[tuple[JobRef, dict[str, Any]]]:
    """Every run with its status; a target that does not answer makes its own runs unknown, and no others."""
    from windlass.errors import UserError
    from windlass.runfolder import RunFolder, runs_root
    from windlass.targets import target_of_kind
    from windlass.targets.protocol import JobRef

    targets: dict[str, Target[Any]] = {}
    for path in sorted(runs_root().glob("*/run.yaml")):
        folder = RunFolder(path.parent)
        try:
            kind = folder.load_run().target.kind
            where = targets.setdefault(kind, target_of_kind(kind))
            job = JobRef(kind, folder.name, folder)
            yield job, where.status(job).as_dict()
        except UserError as error:
            yield JobRef("–", folder.name, folder), {"state": "unknown", "reason": error.what}


def _elsewhere(place: str, here: set[str]) -> Iterator[tuple[JobRef, dict[str, Any]]]:
    """The runs of a cluster that have no folder on this machine."""
    from windlass.cli.jobs import place_of
    from windlass.runfolder import RunFolder, runs_root
    from windlass.targets.protocol import JobRef

    where, cluster = place_of(place)
    for name, status in where.elsewhere(cluster):
        if name not in here:
            yield JobRef(place, name, RunFolder(runs_root() / name)), status.as_dict()
