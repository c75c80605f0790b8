"""`windlass ls`: the runs there are."""

from __future__ import annotations

import time
from typing import Any

import click

from windlass.api import lookup
from windlass.cli.jobs import list_on_option
from windlass.cli.output import count, duration, number, plain, print_json, print_table, styled
from windlass.runfolder import runs_root

Row = dict[str, Any]
SORTS = ("time", "name", "state", "step", "loss")
COLOURS = {"running": "green", "waiting": "cyan", "failed": "red", "stopped": "yellow", "preempted": "yellow"}


@click.command(short_help="List the runs.")
@list_on_option
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
    rows = lookup.rows(place)
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
