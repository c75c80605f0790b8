"""From a run file to a request: everything that can be known before anything is created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import UserError
from windlass.plan.hardware import Hardware
from windlass.runfolder import RunFolder
from windlass.spec import Run, load_run
from windlass.targets import target
from windlass.targets.compatibility import adopt, must_match
from windlass.targets.protocol import JobRef, JobStatus, KnowsGpu, Target


@dataclass(frozen=True)
class Prepared:
    run: Run
    folder: RunFolder
    target: Target[Any]
    request: Any
    rows: list[tuple[str, str]]
    warnings: list[str] = field(default_factory=list)
    earlier: JobStatus | None = None  # of the run that is in the folder, where it may go on

    @property
    def job(self) -> JobRef:
        return JobRef(self.run.target.kind, self.run.name, self.folder)

    @property
    def is_running(self) -> bool:
        return self.earlier is not None and is_under_way(self.earlier)

    @property
    def is_finished(self) -> bool:
        earlier = self.earlier
        return earlier is not None and earlier.state == "finished" and (earlier.step or 0) >= self.run.train.steps


def prepare(path: str, overrides: Sequence[str], *, fresh: bool = False, faults: str | None = None) -> Prepared:
    """Load, settle, resolve and check a run. Raises UserError; creates nothing."""
    from windlass.data.access import check_hub
    from windlass.data.checks import check_data
    from windlass.plan import check, describe, resolve
    from windlass.plan.forecast import forecast

    asked = load_run(path, overrides)
    if faults:
        from windlass.trainer.faults import parse_faults

        parse_faults(faults)
    where = target(asked.target)
    folder = RunFolder.of(asked)
    before = folder.load_run() if folder.run_file.is_file() and not fresh else None
    run = where.settle(asked)
    run = resolve(adopt(run, before) if before else run)
    world_size = where.world_size(run)
    earlier = None
    if before is not None:
        must_match(before, run, folder=str(folder.path))
        earlier = _status_where_it_was(before, run, where, folder)
    warnings = []
    hardware = hardware_of(run, where)
    if earlier is None or not is_under_way(earlier):
        warnings = where.check(run, bytes_needed=bytes_needed(run))
        check(run, world_size)
        warnings += check_data(run, thorough=True)
        warnings += check_hub(run)
        expected = forecast(run, hardware) if hardware else None  # refuses what will not fit
        warnings += expected.warnings if expected else ()
    return Prepared(
        run=run,
        folder=folder,
        target=where,
        request=where.render(run, faults=faults),
        rows=[*describe(run, world_size, hardware.gpu if hardware else None), ("folder", str(folder.path))],
        warnings=warnings,
        earlier=earlier,
    )


def hardware_of(run: Run, where: Target[Any]) -> Hardware | None:
    """The GPUs that a settled run will get, where the target can say; None on CPUs."""
    gpu = where.gpu(run) if isinstance(where, KnowsGpu) else None
    return Hardware(gpu, run.resources.gpus_per_node or 0, run.resources.nodes) if gpu else None


def _status_where_it_was(before: Run, run: Run, where: Target[Any], folder: RunFolder) -> JobStatus:
    """The status of the run in the folder; while it is under way on one target it cannot go on on another."""
    kind = before.target.kind
    if kind == run.target.kind:
        return where.status(JobRef(kind, run.name, folder))
    status = target(before.target).status(JobRef(kind, run.name, folder))
    if is_under_way(status):
        raise UserError(
            f"the run {run.name} is under way on the target {kind}",
            evidence=f"{folder.path}: {status.state}" + (f", {status.reason}" if status.reason else ""),
            fix=f"windlass stop {run.name}    and then this again",
        )
    return status


def is_under_way(status: JobStatus) -> bool:
    return not status.ended and status.attempt is not None  # a folder where nothing was ever launched only waits


def bytes_needed(run: Run) -> int | None:
    """Disk for the checkpoints a run keeps, and for the one being written while they are all still there."""
    from windlass.plan import checkpoint_bytes

    one = checkpoint_bytes(run)
    if one is None:
        return None
    num_saves = -(-run.train.steps // run.checkpoint.every)
    permanent = run.train.steps // run.checkpoint.keep_every if run.checkpoint.keep_every else 0
    return one * min(num_saves, run.checkpoint.keep + permanent + 1)


def move_aside(folder: RunFolder) -> RunFolder:
    """Give an old run folder another name; nothing is deleted."""
    from windlass.targets.local.client import already_running
    from windlass.targets.local.state import is_running

    if is_running(folder):
        error = already_running(folder)
        raise UserError(
            error.what, evidence=error.evidence, fix=f"windlass stop {folder.name}    and then --fresh again"
        )
    section = folder.load_run().target
    status = target(section).status(JobRef(section.kind, folder.name, folder)) if section.kind != "local" else None
    if status is not None and is_under_way(status):
        raise UserError(
            f"the run {folder.name} is already running",
            evidence=f"on the target {section.kind}: {status.state}",
            fix=f"windlass stop {folder.name}    and then --fresh again",
        )
    number = 1
    while (aside := folder.path.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.path.rename(aside)
    return RunFolder(aside)
