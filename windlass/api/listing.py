"""The runs there are: in this folder, and those that a cluster knows itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.api.lookup import place_of
from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.targets import target_of_kind
from windlass.targets.protocol import JobRef, Target

Row = dict[str, Any]  # what windlass.api.schemas.runs.ListedRun holds; thousands of them are made


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
        except UserError as error:
            return _row(JobRef(kind, folder.name, folder), {"state": "unknown", "reason": error.what})
        except Exception as error:  # whatever is in a folder, the others are listed
            reason = f"{type(error).__name__}: {error}"[:200]
            return _row(JobRef(kind, folder.name, folder), {"state": "unknown", "reason": reason})


def elsewhere(place: str, here: set[str]) -> Iterator[Row]:
    """The runs of a cluster that have no folder on this machine."""
    where, cluster = place_of(place)
    for name, status in where.elsewhere(cluster):
        if name not in here:
            yield _row(JobRef(place, name, RunFolder(runs_root() / name)), status.as_dict())


def _row(job: JobRef, status: dict[str, Any]) -> Row:
    return {"name": job.name, "target": job.target, **status, "started": job.folder.began()}
