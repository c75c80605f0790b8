"""Runs that exist: finding them by name, and naming them for the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from windlass.targets.protocol import JobRef, Target


def find(name: str, place: str | None = None) -> tuple[Target[Any], JobRef]:
    """The target and the job of an existing run; with `place`, of one that only its cluster may know."""
    from windlass.runfolder import RunFolder, runs_root
    from windlass.targets import target
    from windlass.targets.protocol import JobRef

    if place and not (runs_root() / name / "run.yaml").is_file():
        where, cluster = place_of(place)
        return where, where.adopt(name, cluster)
    folder = RunFolder.find(name)
    section = folder.load_run().target
    return target(section), JobRef(section.kind, folder.name, folder)


def place_of(text: str) -> tuple[Any, str | None]:
    """The target that `--on kubernetes:CONTEXT` names, which must know its jobs itself, and the context."""
    from windlass.errors import UserError
    from windlass.targets import target_of_kind
    from windlass.targets.protocol import KnowsItsJobs

    kind, _, cluster = text.partition(":")
    where = target_of_kind(kind)
    if not isinstance(where, KnowsItsJobs):
        raise UserError(
            f"runs on the target {kind} are known by their run folders alone",
            fix="leave --on out",
        )
    return where, cluster or None


on_option = click.option(
    "--on", "place", metavar="TARGET", help="Ask the cluster, kubernetes[:CONTEXT], where no run folder is here."
)


def run_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of existing runs, for the shell to complete."""
    from windlass.runfolder import runs_root

    names = sorted(path.parent.name for path in runs_root().glob("*/run.yaml"))
    return [one for one in names if one.startswith(incomplete)]
