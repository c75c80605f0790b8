"""From a run file to a request: everything that can be known before anything is created."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from windlass.errors import NoAnswerError, UserError
from windlass.plan import check, checkpoint_bytes, resolve
from windlass.plan.description import describe
from windlass.plan.fitting import check_host_memory
from windlass.plan.forecast import check_on, forecast
from windlass.plan.resolution import learning_rate
from windlass.plan.speed import Hardware
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.spec.compatibility import adopt, change_lines, differences, must_match, shown, steering
from windlass.targets import target
from windlass.targets.launch.supervision import is_running
from windlass.targets.local.client import already_running
from windlass.targets.protocol import JobRef, JobStatus, KnowsHardware, RendersOffline, Target, world_size

Made = TypeVar("Made")
LARGE_RATE = 0.1
SMALL_JUMP = 0.02  # of the learning rate, relative: what a schedule does from one step to the next anyway


@dataclass(frozen=True)
class Prepared:
    run: Run
    folder: RunFolder
    target: Target[Any]
    gathered: Any  # what the request was rendered from
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


def prepare(
    requested: Run,
    *,
    fresh: bool = False,
    faults: str | None = None,
    offline: bool = False,
    is_checked: bool = False,
) -> Prepared:
    """Settle, resolve and check a run. Raises UserError; creates nothing. `offline`: asks no cluster.

    `is_checked`: whoever submitted it first has looked at its data and its hub, which may not be reached from here.
    """
    from windlass.data.checks import check_data, check_hub

    if os.environ.get("WINDLASS_SHARE_GPUS"):
        raise UserError(
            "WINDLASS_SHARE_GPUS is set: it lets ranks share a GPU in tests of the trainer, and a run would be slow",
            fix="unset WINDLASS_SHARE_GPUS",
        )
    if faults:
        from windlass.trainer.distributed.faults import parse_faults

        parse_faults(faults)
    where = target(requested.target)
    if offline and isinstance(where, RendersOffline):
        where = where.offline()
    else:
        offline = False
    folder = RunFolder.of(requested)
    before = folder.load_run() if folder.run_file.is_file() and not fresh else None
    earlier = _status_where_it_was(before, requested, where, folder) if before and not offline else None
    settled = where.settle(requested)
    run = resolve(adopt(settled, before) if before else settled)
    if before and earlier and not is_under_way(earlier) and not folder.has_checkpoints():
        changed = differences(before, run) | steering(before, run)
        if earlier.state != "finished" or changed:  # nothing was saved that its settings would belong to
            before = earlier = None
            run = resolve(settled)
    num_ranks = world_size(run)
    warnings: list[str] = []
    if run.train.learning_rate > LARGE_RATE:
        warnings.append(f"train.learning_rate is {run.train.learning_rate:g}: above {LARGE_RATE:g} most models diverge")
    if before and earlier:
        check(run, num_ranks)  # before it is compared with what is there: a mistake is no other setting
        warnings += _not_branched_again(before, requested)
        run = _with_origin(run, before)
        must_match(before, run, folder=str(folder.path))
        warnings += _what_changes(before, run, earlier)
    if run.checkpoint.branch_from and before is None:
        _check_branch(run)
    hardware = hardware_of(run, where)
    is_new = earlier is None or not is_under_way(earlier)
    if is_new:
        where.check_run(run)
        check_on(run, num_ranks, hardware)
        memory_on_cpus(run, where, num_ranks)
        if not is_checked:
            warnings += check_data(run, thorough=True)
            warnings += [] if offline else check_hub(run)
        expected = forecast(run, hardware) if hardware else None  # refuses what will not fit
        warnings += expected.warnings if expected else ()
    gathered = where.gather(run)
    request = where.render(run, gathered, faults=faults)  # once: what is checked now is what is sent
    if is_new:
        warnings += where.check(run, request, bytes_needed=bytes_needed(run))
        if run.target.kind == "kubernetes" and not offline and not is_checked:
            from windlass.clusters.preflight import preflight  # it needs httpx

            warnings += preflight(run, request)
    return Prepared(
        run=run,
        folder=folder,
        target=where,
        gathered=gathered,
        request=request,
        rows=[*describe(run, num_ranks, hardware.gpu if hardware else None), ("folder", str(folder.path))],
        warnings=warnings,
        earlier=earlier,
    )


def answered_or_alone(make: Callable[[bool], Made]) -> tuple[Made, str | None]:
    """`make(offline=False)`; where no cluster or scheduler answers, `make(offline=True)` and a note that says so."""
    try:
        return make(False), None
    except NoAnswerError as error:
        try:
            return make(True), f"{error.what}: this is rendered from the run file alone, as --offline does"
        except UserError as refusal:
            raise UserError(
                error.what,
                evidence=error.evidence,
                cause=f"and the run file alone cannot be rendered: {refusal.what}",
                fix="\n".join(fix for fix in (error.fix, refusal.fix) if fix),
                error_code=error.error_code,
            ) from None


def _what_changes(before: Run, run: Run, earlier: JobStatus) -> list[str]:
    """What other settings do to a run that goes on, one warning each; a run under way keeps those it has."""
    changes = steering(before, run)
    if not changes:
        return []
    if is_under_way(earlier):
        raise UserError(
            f"the run {run.name} is under way with other settings",
            error_code="under-way",
            evidence="\n".join(change_lines(changes)),
            fix=f"windlass stop {run.name}    and then this again: it goes on with the new ones",
        )
    step = earlier.step or 0
    if step > run.train.steps and earlier.state != "finished":
        raise UserError(
            f"the run {run.name} has trained {step} steps already, and {run.train.steps} are asked for",
            fix=f"train.steps={step + run.train.steps}    goes on; name=OTHER begins a shorter run",
        )
    warnings = [f"{key} is {shown(now)} from here on; it was {shown(was)}" for key, (was, now) in changes.items()]
    rate, rate_before = learning_rate(step, run.train), learning_rate(min(step, before.train.steps - 1), before.train)
    if step and step < run.train.steps and abs(rate / rate_before - 1) > SMALL_JUMP:
        warnings.append(f"the learning rate of step {step + 1} is {rate:.3g}; as it was set before, {rate_before:.3g}")
    if "train.global_batch" in changes:
        sources = [source.source for source in run.data.sources] or [run.data.source]
        if any(source.startswith("hf:") for source in sources):
            raise UserError(
                "train.global_batch cannot change in a run that reads a stream",
                evidence=f"it was {before.train.global_batch}; the source is {', '.join(sources)}",
                cause="each place of a batch reads files of its own, and goes on in them",
                fix=f"train.global_batch={before.train.global_batch}    or name=OTHER",
            )
        warnings.append(
            "another train.global_batch: the order of the data goes on where it is, nothing is read twice or left out; "
            "every step now counts for another number of tokens, and the learning rate is not scaled"
        )
    return warnings


def _not_branched_again(before: Run, requested: Run) -> list[str]:
    """A run that has checkpoints goes on from them: --from another run would be passed over without a word."""
    wanted, origin = requested.checkpoint.branch_from, before.checkpoint.branch_from
    itself = wanted is not None and wanted.rpartition("@")[0] == requested.name
    if wanted is None or (wanted == origin and not itself):
        return []
    if origin and not itself and wanted.rpartition("@")[0] == origin.rpartition("@")[0]:
        return [
            f"{requested.name} began as a branch of {origin} and goes on from its own checkpoint, not from {wanted}"
        ]
    raise UserError(
        f"the run {requested.name} exists and has checkpoints of its own: it cannot begin from {wanted}",
        evidence=f"it began {'as a branch of ' + origin if origin else 'without a branch'}",
        fix=f"name=OTHER --from {wanted}    begins a new run; without --from {requested.name} goes on",
    )


def _with_origin(run: Run, before: Run) -> Run:
    """Where a run began is part of its record, also when it goes on without --from."""
    kept = run.checkpoint.model_copy(update={"branch_from": before.checkpoint.branch_from})
    return run.model_copy(update={"checkpoint": kept})


def _check_branch(run: Run) -> None:
    """What can be known of a branch before it starts; whether the models are the same, the trainer says."""
    name, _, step = (run.checkpoint.branch_from or "").rpartition("@")
    if name == run.name:
        raise UserError(
            f"the run {run.name} cannot branch from itself", fix="name=OTHER    or, to go on, the same without --from"
        )
    if run.train.steps <= int(step):
        raise UserError(
            f"train.steps is {run.train.steps}, and the branch begins after step {step}",
            cause="steps count from the beginning of the run that is branched from",
            fix=f"train.steps={int(step) + run.train.steps}",
        )


def memory_on_cpus(run: Run, where: Target[Any], num_ranks: int) -> str | None:
    """What a run on this machine's CPUs needs at least, in words; refuses what cannot fit. None elsewhere."""
    if not isinstance(where, KnowsHardware) or run.resources.gpus_per_node:
        return None
    memory = where.host_memory(run)
    if memory is None:
        return None
    needed = check_host_memory(run, num_ranks, memory)
    if needed is None:
        return None
    return f"at least {needed.bytes / 2**30:.1f} of this machine's {memory / 2**30:.1f} GiB, and activations"


def hardware_of(run: Run, where: Target[Any]) -> Hardware | None:
    """The GPUs that a settled run will get, where the target can say; None on CPUs."""
    gpu = where.gpu(run) if isinstance(where, KnowsHardware) else None
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
            error_code="under-way",
            evidence=f"{folder.path}: {status.state}" + (f", {status.reason}" if status.reason else ""),
            fix=f"windlass stop {run.name}    and then this again",
        )
    return status


def is_under_way(status: JobStatus) -> bool:
    return not status.ended and status.attempt is not None  # a folder where nothing was ever launched only waits


def bytes_needed(run: Run) -> int | None:
    """Disk for the checkpoints a run keeps, and for the one being written while they are all still there."""
    size = checkpoint_bytes(run)
    if size is None:
        return None
    if run.checkpoint.direct:
        return 0
    num_saves = -(-run.train.steps // run.checkpoint.every)
    permanent = run.train.steps // run.checkpoint.keep_every if run.checkpoint.keep_every else 0
    return size * min(num_saves, run.checkpoint.keep + permanent + 1)


def move_aside(folder: RunFolder) -> RunFolder:
    """Give an old run folder another name; nothing is deleted."""
    if is_running(folder):
        error = already_running(folder)
        error.fix = f"windlass stop {folder.name}    and then --fresh again"
        raise error
    section = folder.load_run().target
    status = target(section).status(JobRef(section.kind, folder.name, folder)) if section.kind != "local" else None
    if status is not None and is_under_way(status):
        raise UserError(
            f"the run {folder.name} is already running",
            error_code="under-way",
            evidence=f"on the target {section.kind}: {status.state}",
            fix=f"windlass stop {folder.name}    and then --fresh again",
        )
    number = 1
    while (aside := folder.path.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.path.rename(aside)
    return RunFolder(aside)
