"""Write checkpoints with torch DCP: copied to host memory at once, written by a thread, published by one rename."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import windlass
from windlass.checkpoint import Checkpoint, CheckpointFolder, FileRecord, Manifest, hash_file
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec.checkpoint import CheckpointSection
from windlass.trainer.faults import Faults
from windlass.trainer.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far training is: what a manifest says about a step."""

    step: int
    tokens: int
    data_state: dict[str, Any] | None


class SaveFailedError(Exception):
    """A checkpoint could not be written; the same on every rank."""


class Checkpointer:
    """Saves one run's training state. All ranks call every method together."""

    def __init__(
        self,
        spec: CheckpointSection,
        folder: RunFolder,
        ranks: Ranks,
        faults: Faults,
        *,
        model: dict[str, Any],
        order: dict[str, Any],
    ) -> None:
        self.spec, self.folder, self.ranks, self.faults = spec, folder, ranks, faults
        self.model, self.order = model, order
        self.checkpoints = CheckpointFolder(folder.checkpoints)
        self.saved_step: int | None = None  # of the newest checkpoint that is published
        self._staging: dict[str, Any] | None = None  # host copies, made once and filled at every save
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = 0

    def clear_unfinished(self) -> None:
        """Give back the room that killed saves and deletions took. Rank 0 calls it, before any save begins."""
        for leftover in self.checkpoints.unfinished():
            log.info("removing %s: its save was cut off", leftover.name)
            leftover.delete()

    def due(self, step: int) -> bool:
        return step % self.spec.every == 0

    def save(self, progress: Progress, state: dict[str, Tensor], *, wait: bool) -> float:
        """Save `state`; the seconds for which training stood still. Only a save that is waited for raises."""
        started = time.perf_counter()
        self.finish(must_succeed=False)
        if self.saved_step == progress.step:
            return time.perf_counter() - started
        progress = self._with_all_lanes(progress)
        # Without a thread the writer reads the live tensors: nothing changes them before it is done.
        in_background = self.spec.background and not wait
        staged = self._stage(state) if in_background else state
        stall_s = time.perf_counter() - started
        self._pending_step = progress.step
        self._pending = self._writer.submit(self._write, progress, staged, started, stall_s)
        if not in_background:
            self.finish(must_succeed=wait)
        return time.perf_counter() - started

    def finish(self, *, must_succeed: bool = True) -> None:
        """Wait for the save under way, if any."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
            self.saved_step = self._pending_step
        except SaveFailedError as error:
            if must_succeed:
                raise UserError(
                    f"the checkpoint of step {self._pending_step} could not be written",
                    evidence=str(error),
                    cause="the run stops here because nothing after the last complete checkpoint is safe",
                    fix=f"make room under {self.folder.checkpoints} and start the run again: it goes on from "
                    "its last complete checkpoint",
                    exit_code=ExitCode.FAILED,
                ) from None

    def _stage(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the state to host memory (pinned where there is a GPU), so that training may change it again."""
        on_gpu = self.ranks.device.type == "cuda"
        if self._staging is None:
            self._staging = _create_cpu_state_dict(state, pin_memory=on_gpu)
        staged = _copy_state_dict(state, self._staging, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return staged

    def _with_all_lanes(self, progress: Progress) -> Progress:
        """Streams: every rank knows where its own lanes stand; the manifest needs them all."""
        if progress.data_state is None:
            return progress
        merged: dict[str, Any] = {}
        for state in self.ranks.gather(progress.data_state):
            for key, lanes in state.items():
                merged.setdefault(key, {}).update(lanes)
        return Progress(progress.step, progress.tokens, merged)

    def _write(self, progress: Progress, state: dict[str, Tensor], started: float, stall_s: float) -> None:
        """Runs in the writer thread of every rank. Uses the saving group alone, so it never meets the loop's calls."""
        checkpoint = self.checkpoints.at(progress.step)
        self._reach("save.staged", progress.step)
        self._together(lambda: self._make_room(checkpoint), first_rank_only=True)
        self._together(lambda: self._write_tensors(checkpoint, state))
        self._reach("save.written", progress.step)
        records = self._together(lambda: self._hash_own_files(checkpoint))
        self._reach("save.hashed", progress.step)
        files = {name: record for part in records for name, record in part.items()}
        self._together(lambda: self._publish(checkpoint, progress, files), first_rank_only=True)
        self._reach("save.published", progress.step)
        if self.ranks.is_first:
            seconds = time.perf_counter() - started
            size = sum(record.size for record in files.values())
            log.info("checkpoint %s: %.1f MiB in %.2f s", checkpoint.name, size / 2**20, seconds)
            self.folder.record(
                "checkpoint", step=progress.step, seconds=round(seconds, 3), stall_s=round(stall_s, 3), bytes=size
            )
            keep, keep_every = self.spec.keep, self.spec.keep_every
            for expired in self.checkpoints.expired(progress.step, keep=keep, keep_every=keep_every):
                self._reach("save.retention", progress.step)
                expired.delete()

    def _together(self, action: Callable[[], Any], *, first_rank_only: bool = False) -> list[Any]:
        """Do one stage on the ranks and learn how it went on all of them; a failure anywhere fails it everywhere."""
        value, problem = None, None
        if self.ranks.is_first or not first_rank_only:
            try:
                value = action()
            except (Exception, CheckpointException) as error:  # DCP's own is not an Exception
                problem = f"rank {self.ranks.rank}: {_root_cause(error)}"
        outcomes: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(outcomes, (value, problem), group=self.ranks.saving)
        problems = [problem for _, problem in outcomes if problem]
        if problems:
            self._give_up(problems[0])
        return [value for value, _ in outcomes]

    def _give_up(self, problem: str) -> None:
        step = self._pending_step
        if self.ranks.is_first:
            self.checkpoints.at(step).delete()  # first of all: the records below may need the room
            log.error("the checkpoint of step %d failed: %s; older checkpoints are untouched", step, problem)
            self.folder.record("checkpoint-failed", step=step, error=problem)
        raise SaveFailedError(problem)

    def _make_room(self, checkpoint: Checkpoint) -> None:
        checkpoint.delete()  # what an earlier, killed save of the same step left
        checkpoint.path.mkdir(parents=True)

    def _write_tensors(self, checkpoint: Checkpoint, state: dict[str, Tensor]) -> None:
        writer = _Writer(checkpoint.path, sync_files=True, overwrite=True)
        dcp.save(state, storage_writer=writer, process_group=self.ranks.saving)

    def _hash_own_files(self, checkpoint: Checkpoint) -> dict[str, FileRecord]:
        mine = list(checkpoint.path.glob(f"__{self.ranks.rank}_*"))
        if self.ranks.is_first:
            mine.append(checkpoint.path / ".metadata")
        return {path.name: hash_file(path) for path in mine}

    def _publish(self, checkpoint: Checkpoint, progress: Progress, files: dict[str, FileRecord]) -> None:
        self._reach("save.manifest", progress.step)
        checkpoint.publish(
            Manifest(
                step=progress.step,
                tokens=progress.tokens,
                files=files,
                model=self.model,
                order=self.order,
                data_state=progress.data_state,
                world_size=self.ranks.world_size,
                created=round(time.time(), 3),
                versions={
                    "windlass": windlass.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            )
        )

    def _reach(self, point: str, step: int) -> None:
        self.faults.reach(point, step)


class _Writer(dcp.FileSystemWriter):
    """A writer whose failures name the file system's error: torch.save covers it with one about its own offsets."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            below: BaseException | None = error
            while below is not None and not isinstance(below, OSError):
                below = below.__context__
            raise below or error from None


def _root_cause(error: BaseException) -> str:
    """The error below DCP's wrapping that a person can act on."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = next(iter(failures.items()))
        inner = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    return f"{type(error).__name__}: {error}"
