"""Runs that exist: one found by name, with its target and its job; and all of them, here and in a cluster, as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.targets import parse_place, target, target_of_kind
from windlass.targets.protocol import JobRef, KnowsItsJobs, Target

if TYPE_CHECKING:
    from windlass.spec import Run

Row = dict[str, Any]  # what windlass.api.schemas.runs.ListedRun holds; thousands of them are made


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
            f"{folder.run_file} is no run file",
            evidence=f"{type(error).__name__}: {error}"[:200],
            fix=f"mv {folder.path} {folder.path}.old",
        ) from None


def place_of(text: str) -> tuple[Any, str | None]:
    """The target that `--on kubernetes:CONTEXT` names, which must know its jobs itself, and the context."""
    kind, cluster = parse_place(text)
    where = target_of_kind(kind)
    if not isinstance(where, KnowsItsJobs):
        raise UserError(f"runs on the target {kind} are known by their run folders alone", fix="leave --on out")
    return where, cluster


def rows(place: str | None = None) -> list[Row]:
    """The runs of this folder; with `place`, kubernetes[:CONTEXT], also those that a cluster knows itself."""
    reader = RowReader()
    here = [reader.row(RunFolder(path.parent)) for path in sorted(runs_root().glob("*/run.yaml"))]
    return [*here, *elsewhere(place, {row["name"] for row in here})] if place else here


class RowReader:
    """Rows of runs; a folder or a target that says nothing makes its own runs unknown, and no others."""

    def __init__(self) -> None:
        self.targets: dict[str, Target[Any]] = {}

    def row(self, folder: RunFolder) -> Row:
        kind = "–"
        try:
            kind = folder.target_kind()
            if kind not in self.targets:
                self.targets[kind] = target_of_kind(kind)
            job = JobRef(kind, folder.name, folder)
            return _row(job, self.targets[kind].status(job).as_dict())
        except Exception as error:  # whatever is in a folder, the others are listed
            reason = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"[:200]
            return _row(JobRef(kind, folder.name, folder), {"state": "unknown", "reason": reason})


def elsewhere(place: str, here: set[str]) -> Iterator[Row]:
    """The runs of a cluster that have no folder on this machine."""
    where, cluster = place_of(place)
    for name, status in where.elsewhere(cluster):
        if name not in here:
            yield _row(JobRef(place, name, RunFolder(runs_root() / name)), status.as_dict())


def _row(job: JobRef, status: dict[str, Any]) -> Row:
    return {"name": job.name, "target": job.target, **status, "started": job.folder.began()}
