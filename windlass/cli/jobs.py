"""Runs that exist: finding them by name, and naming them for the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from windlass.targets.protocol import JobRef, Target


def find(name: str) -> tuple[Target[Any], JobRef]:
    """The target and the job of an existing run."""
    from windlass.runfolder import RunFolder
    from windlass.targets import target
    from windlass.targets.protocol import JobRef

    folder = RunFolder.find(name)
    section = folder.load_run().target
    return target(section), JobRef(section.kind, folder.name, folder)


def run_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of existing runs, for the shell to complete."""
    from windlass.runfolder import runs_root

    names = sorted(path.parent.name for path in runs_root().glob("*/run.yaml"))
    return [one for one in names if one.startswith(incomplete)]
