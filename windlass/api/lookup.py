"""Runs that exist, found by name: their target and their job."""

from __future__ import annotations

from typing import Any

from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.spec import Run
from windlass.targets import target, target_of_kind
from windlass.targets.protocol import JobRef, KnowsItsJobs, Target


def find(name: str, place: str | None = None) -> tuple[Target[Any], JobRef]:
    """The target and the job of an existing run; with `place`, of one that only its cluster may know."""
    if place and not (runs_root() / name / "run.yaml").is_file():
        where, cluster = place_of(place)
        return where, where.adopt(name, cluster)
    folder = RunFolder.find(name)
    section = load_run(folder).target
    return target(section), JobRef(section.kind, folder.name, folder)


def load_run(folder: RunFolder) -> Run:
    """The run of a folder, which may hold anything under the name of run.yaml."""
    try:
        return folder.load_run()
    except (UserError, OSError):
        raise
    except Exception as error:
        raise UserError(
            f"{folder.run_file} is no run file", evidence=f"{type(error).__name__}: {error}"[:200]
        ) from None


def place_of(text: str) -> tuple[Any, str | None]:
    """The target that `--on kubernetes:CONTEXT` names, which must know its jobs itself, and the context."""
    kind, _, cluster = text.partition(":")
    where = target_of_kind(kind)
    if not isinstance(where, KnowsItsJobs):
        raise UserError(
            f"runs on the target {kind} are known by their run folders alone",
            fix="leave --on out",
        )
    return where, cluster or None
