"""`windlass ls`: the runs there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.jobs import complete_target

if TYPE_CHECKING:
    from windlass.runfolder import RunFolder
    from windlass.targets.protocol import JobRef, Target

Row = dict[str, Any]
SORTS = ("time", "name", "state", "step", "loss")
COLOURS = {"running": "green", "waiting": "cyan", "failed": "red", "stopped": "yellow", "preempted": "yellow"}


@click.command(short_help="List the runs.")
@click.option(
    "--on",
    "place",
    metavar="TARGET",
    shell_complete=complete_target,
    help="Also those that a cluster, kubernetes[:CONTEXT], knows itself.",
)
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="time",
    help="By what they are sorted; by time: what is under way, then the newest first.",
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--quiet", "-q", is_flag=True, help="Names only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout.")
def ls(place: str | None, sort: str, reverse: bool, quiet: bool, as_json: bool) -> None:
    """List the runs."""
    from windlass.cli.output import plain, print_json
    from windlass.runfolder import runs_root

    rows = list(_runs())
    if place:
        rows += elsewhere(place, {row["name"] for row in rows})
    rows.sort(key=lambda row: _sort_key(row, sort), reverse=reverse)
    if as_json:
        print_json(rows)
    elif quiet:
        click.echo("".join(f"{plain(row['name'])}\n" for row in rows), nl=False)
    elif not rows:
        click.echo(f"no runs in {runs_root()}/\n  windlass init my.yaml    writes a run file")
    else:
        _print(rows)


def _print(rows: list[Row]) -> None:
    import time

    from windlass.cli.output import count, duration, number, print_table, styled

    now = time.time()
    print_table(
        ["NAME", "TARGET", "STATE", "STEP", "LOSS", "TOK/S", "LEFT", "STARTED"],
        [
            [
                row["name"],
                row["target"],
                styled(row["state"], COLOURS.get(row["state"], "")),
                f"{row['step']}/{row.get('steps') or '–'}" if row.get("step") is not None else "–",
                number(row.get("loss")),
                count(row.get("tokens_per_s")),
                duration(row.get("eta")),
                f"{duration(max(0.0, now - row['started']))} ago" if row.get("started") else "–",
            ]
            for row in rows
        ],
        notes=[row.get("reason") for row in rows],
    )


def _sort_key(row: Row, sort: str) -> tuple[Any, ...]:
    """Largest first for numbers; runs that have none come last."""
    name = row["name"]
    if sort == "name":
        return (name,)
    if sort == "state":
        return (row["state"], name)
    if sort == "loss":  # the lowest is the one that somebody looks for
        return (row.get("loss") is None, row.get("loss") or 0.0, name)
    if sort == "step":
        return (row.get("step") is None, -(row.get("step") or 0), name)
    return (row["state"] not in ("running", "waiting"), -(row.get("started") or 0.0), name)


def _runs() -> Iterator[Row]:
    from windlass.runfolder import RunFolder, runs_root

    reader = RowReader()
    for path in sorted(runs_root().glob("*/run.yaml")):
        yield reader.row(RunFolder(path.parent))


class RowReader:
    """Rows of runs; a folder or a target that says nothing makes its own runs unknown, and no others."""

    def __init__(self) -> None:
        self.targets: dict[str, Target[Any]] = {}

    def row(self, folder: RunFolder) -> Row:
        from windlass.errors import UserError
        from windlass.targets import target_of_kind
        from windlass.targets.protocol import JobRef

        kind = "–"
        try:
            kind = folder.target_kind()
            if kind not in self.targets:
                self.targets[kind] = target_of_kind(kind)
            job = JobRef(kind, folder.name, folder)
            return _row(job, self.targets[kind].status(job).as_dict())
        except UserError as error:
            return _row(JobRef(kind, folder.name, folder), {"state": "unknown", "reason": error.what})
        except Exception as error:  # whatever is in a folder, the others are listed
            reason = f"{type(error).__name__}: {error}"[:200]
            return _row(JobRef(kind, folder.name, folder), {"state": "unknown", "reason": reason})


def _row(job: JobRef, status: dict[str, Any]) -> Row:
    return {"name": job.name, "target": job.target, **status, "started": job.folder.began()}


def elsewhere(place: str, here: set[str]) -> Iterator[Row]:
    """The runs of a cluster that have no folder on this machine."""
    from windlass.cli.jobs import place_of
    from windlass.runfolder import RunFolder, runs_root
    from windlass.targets.protocol import JobRef

    where, cluster = place_of(place)
    for name, status in where.elsewhere(cluster):
        if name not in here:
            yield _row(JobRef(place, name, RunFolder(runs_root() / name)), status.as_dict())
