"""Save training state to the tiers of a run: copied to host memory at once, written by a thread, nearest tier first."""

from __future__ import annotations

import contextlib
import logging
import platform
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

import windlass
from windlass.checkpoint import NODE_TIERS, CheckpointFolder, FileRecord, Manifest
from windlass.checkpoint.managed import ManagedService
from windlass.checkpoint.ownership import begin_anew, hold, known_to, node_folder, read_id, write_id
from windlass.checkpoint.pieces import clear_earlier_runs, make_private, tier_path
from windlass.checkpoint.stored import StoredCheckpoints, current_id, write_current_id
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.store import Store, StoreOptions, open_store
from windlass.trainer.checkpointing.folder_tier import SharedTier
from windlass.trainer.checkpointing.piece_tiers import ManagedTier, NodeTier
from windlass.trainer.checkpointing.pieces import local_parts
from windlass.trainer.checkpointing.store_tier import StoreTier, Uploads
from windlass.trainer.checkpointing.tiers import NearTier, Offer, Progress, Tier
from windlass.trainer.distributed.agreement import SaveFailedError, on_every_rank, on_first_rank
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)
GRACE_MARGIN_S = 5.0  # of the time between SIGTERM and SIGKILL: for the ranks to leave
UPLOAD_SHARE = 0.5  # of it: for an upload that is under way, before a newer step goes to the nearer tiers


class Checkpointer:
    """Saves one run's training state. All ranks call every method together."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        ranks: Ranks,
        faults: Faults,
        *,
        model: dict[str, Any],
        order: dict[str, Any],
        sharding: str,
    ) -> None:
        self.spec, self.folder, self.ranks, self.faults = run.checkpoint, folder, ranks, faults
        self.model, self.order = model, order
        self.layout = {
            "world_size": ranks.world_size,
            "sharding": sharding,
            "precision": run.train.precision,
            "bf16_weights": run.train.bf16_weights,
            **run.parallel.model_dump(mode="json", exclude={"sharding", "timeout_minutes"}),
        }
        self.checkpoints = CheckpointFolder(folder.checkpoints)
        self.protected: set[int] = set()  # steps that retention never lets go
        self.describe_validations: Callable[[], dict[str, Any] | None] = lambda: None  # for manifests
        self.damaged: set[tuple[str, int]] = set()  # tier and step of what a resume passed over
        self.shared = SharedTier(self.spec, self.checkpoints, ranks, faults, is_shared=not saves_directly(run))
        opened = open_tiers(run, folder, ranks, faults, self.protected)
        self.quick = opened.quick
        self.stored, self.direct, self.uploads = opened.stored, opened.direct, opened.uploads
        self.lasting: SharedTier | StoreTier = self.direct or self.shared
        self.saved_step: int | None = None  # of the newest checkpoint that is published in the lasting tier
        self._staging: dict[str, Any] | None = None  # host copies, made once and filled at every save
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step: int = 0
        self._pending_lasting = False
        self._newest: dict[str, int] = {}  # step that this attempt wrote to a tier, by the tier's name
        self._lock: int | None = None  # of the checkpoints' folder, on rank 0

    def clear_unfinished(self) -> None:
        """Give back the room that killed saves and deletions took, before any save begins."""
        if not self.ranks.is_first:
            return
        if self.direct:
            self.direct.clear_unfinished()
        if self._lock is None:
            self._lock = hold(self.checkpoints.path)
        for leftover in self.checkpoints.unfinished():
            log.info("removing %s: its save was cut off", leftover.name)
            leftover.delete()
        for path in self.checkpoints.scratch():
            log.info("removing %s: the command that made it was cut off", path.name)
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, checkpoint: Offer | None, state: dict[str, Tensor]) -> None:
        """Before the first step: what was found is what is saved so far, and every tier must have room for more."""
        if checkpoint is not None:
            self._newest[checkpoint.tier] = checkpoint.step
            if checkpoint.tier in ("store", self.lasting.name) or self._lasts(checkpoint.step):
                self.saved_step = checkpoint.step
        for tier in self.quick:
            if isinstance(tier, NodeTier):
                tier.check_room(state)
        if self.uploads:
            self.uploads.request()  # what an attempt before this one left undone

    def published(self, step: int) -> bool:
        """Whether the lasting tier has a step that this run saved."""
        return step in self.direct.published if self.direct else self.checkpoints.at(step).complete

    def due(self, step: int) -> bool:
        return any(step % tier.every == 0 for tier in (*self.quick, self.lasting))

    def save(
        self,
        progress: Progress,
        state: dict[str, Tensor],
        *,
        wait: bool,
        shared: bool = False,
        sigterm_at: float | None = None,
    ) -> float:
        """Save `state` to the tiers that are due, and to the lasting one if it is waited for or `shared`; the seconds
        for which training stood still. Only a save that is waited for raises.

        `sigterm_at`: the ranks may be killed before it is in the lasting tier, so nearer tiers get it first.
        """
        started, hurried = time.perf_counter(), sigterm_at is not None
        to_lasting = wait or shared or progress.step % self.lasting.every == 0
        tiers: list[Tier] = [tier for tier in self.quick if hurried or (not wait and progress.step % tier.every == 0)]
        tiers += [self.lasting] if to_lasting else []
        if not wait and self._pending is not None and self._pending_step == progress.step and self._pending_lasting:
            return time.perf_counter() - started  # it is being written this moment
        # Copies in memory are many: one that would have to wait for a slower tier is worth less than the time. And a
        # store that is slow or down must not hold training up.
        in_memory_alone = all(tier.name == "memory" for tier in tiers)
        to_store = self.direct is not None and self._pending_lasting and not (wait or shared)
        if (in_memory_alone or to_store) and self._still_writing():
            log.info("step %d is not saved: the save before is still being written", progress.step)
            return time.perf_counter() - started
        give_up_at = None
        if sigterm_at is not None and self.quick:  # else there is nothing to hurry for
            give_up_at = sigterm_at + UPLOAD_SHARE * self.spec.grace_seconds
        self.finish(must_succeed=False, give_up_at=give_up_at)
        if hurried:  # a kill while a step is written again would leave a tier without it
            tiers = [tier for tier in tiers if self._newest.get(tier.name) != progress.step]
        validations = self.describe_validations()  # now that the save before is over: it may have been the best
        if self.saved_step == progress.step:
            return time.perf_counter() - started
        progress = replace(self._with_all_lanes(progress), validation=validations)
        # Always from a copy, also where training waits: DCP copies tensors of a GPU without blocking, and a file that
        # was written before the copy arrived would be hashed as whole.
        in_background = self.spec.background and not wait
        staged = self._stage(state)
        stall_s = time.perf_counter() - started
        self._pending_step, self._pending_lasting = progress.step, to_lasting
        self._pending = self._writer.submit(self._write, progress, staged, tiers, started, stall_s)
        if not in_background:
            self.finish(must_succeed=wait)
        return time.perf_counter() - started

    def finish(self, *, must_succeed: bool = True, give_up_at: float | None = None) -> None:
        """Wait for the save under way, if any; where it goes straight into a store, only until `give_up_at`."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            if give_up_at is not None and self.direct and self._pending_lasting:
                self.direct.give_up_unless_done(pending, give_up_at)
            pending.result()
            if self._pending_lasting:
                self.saved_step = self._pending_step
        except SaveFailedError as error:
            if must_succeed:
                raise UserError(
                    f"the checkpoint of step {self._pending_step} could not be written",
                    evidence=str(error),
                    cause="the run stops here because nothing after the last complete checkpoint is safe",
                    fix=(
                        f"see that {self.spec.store} can be written to"
                        if self.direct
                        else f"make room under {self.folder.checkpoints}"
                    )
                    + " and start the run again: it goes on from its last complete checkpoint",
                    exit_code=ExitCode.FAILED,
                ) from None

    def close(self, step: int, *, sigterm_at: float | None) -> list[int]:
        """The end: wait for the last upload, or as long as a SIGTERM at `sigterm_at` leaves time; what is only here.

        A run that is finished but whose last step the store lacks is an error: its machine may be gone tomorrow.
        """
        self.finish()
        only_here: list[int] = []
        if self.uploads and self.stored:
            deadline = None if sigterm_at is None else sigterm_at + self.spec.grace_seconds - GRACE_MARGIN_S
            only_here = self.uploads.finish(deadline)
        if self.saved_step == step:  # further than the quick tiers can be: they have done their work
            for tier in self.quick:
                tier.clear()
        if only_here and self.ranks.is_first:
            steps = ", ".join(map(str, only_here))
            log.warning("not in %s: steps %s, only in %s", self.spec.store, steps, self.checkpoints.path)
            self.folder.record("only-local", steps=only_here, store=self.spec.store)
        if only_here and sigterm_at is None and step in only_here:
            raise UserError(
                f"the run is trained to its end, but step {step} is not in {self.spec.store}",
                evidence=f"`windlass show {self.folder.name}` has the events: upload-failed",
                cause=f"it is whole in {self.checkpoints.at(step).path}",
                fix="start the run again: it trains nothing and uploads what is missing",
                exit_code=ExitCode.FAILED,
            )
        return only_here

    def _lasts(self, step: int) -> bool:
        """Whether the lasting tier has a step that was resumed from a nearer one: to write it again would first take it
        away.
        """
        has = False
        if self.ranks.is_first and (self.lasting.name, step) not in self.damaged:
            with contextlib.suppress(UserError, OSError):  # a store out of reach: the next save finds out
                has = self.direct.has(step) if self.direct else self.checkpoints.at(step).complete
        return bool(self.ranks.broadcast(has, patient=True))

    def _still_writing(self) -> bool:
        """Whether the save under way still needs the host copies, on any rank."""
        return self._pending is not None and self.ranks.sum([not self._pending.done()])[0] > 0

    def _stage(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the state to host memory (pinned where there is a GPU), so that training may change it again."""
        on_gpu = self.ranks.device.type == "cuda"
        if self._staging is None or self._staging.keys() != state.keys():  # an optimizer may keep more as it goes on
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
        return replace(progress, data_state=merged)

    def _write(
        self, progress: Progress, state: dict[str, Tensor], tiers: list[Tier], started: float, stall_s: float
    ) -> None:
        """Runs in the writer thread of every rank. Uses the saving group alone, so it never meets the loop's calls."""
        failure: SaveFailedError | None = None
        self._take_device(state)
        for tier in tiers:
            try:
                size = tier.save(progress.step, state, self._describe(progress, tier))
            except SaveFailedError as error:
                self._report_failure(tier, progress.step, str(error))
                failure = error if tier is self.lasting else failure
            else:
                self._newest[tier.name] = progress.step
                self._report(tier, progress.step, size, time.perf_counter() - started, stall_s)
        if failure:
            raise failure
        if self.direct and self.direct in tiers:
            self.direct.let_go(progress.step)
        elif self.shared in tiers:
            self._let_go(progress.step)
            if self.uploads:
                self.uploads.request()

    def _take_device(self, staged: dict[str, Tensor]) -> None:
        """A new thread sits on cuda:0 whatever its rank: what it synchronises there says nothing of the rank's GPU."""
        if self.ranks.device.type == "cuda":
            torch.cuda.set_device(self.ranks.device)
            assert torch.cuda.current_device() == self.ranks.device.index
        elsewhere = [name for name, tensor in local_parts(staged).items() if tensor.device.type != "cpu"]
        assert not elsewhere, f"not in host memory: {elsewhere[:4]}"

    def _describe(self, progress: Progress, tier: Tier) -> Any:
        def describe(files: dict[str, FileRecord]) -> Manifest:
            return Manifest(
                step=progress.step,
                tokens=progress.tokens,
                files=files,
                model=self.model,
                order=self.order,
                data_state=progress.data_state,
                sequences=progress.sequences,
                world_size=self.ranks.world_size,
                created=created,
                versions={
                    "windlass": windlass.__version__,
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                layout=None if tier is self.lasting else self.layout,
                validation=progress.validation,
            )

        created = round(time.time(), 3)
        return describe

    def _report(self, tier: Tier, step: int, size: int, seconds: float, stall_s: float) -> None:
        if not self.ranks.is_first:
            return
        log.info("step %d is saved (%s): %.1f MiB in %.2f s", step, tier.name, size / 2**20, seconds)
        self.folder.record(
            "checkpoint", step=step, seconds=round(seconds, 3), stall_s=round(stall_s, 3), bytes=size, tier=tier.name
        )

    def _report_failure(self, tier: Tier, step: int, problem: str) -> None:
        if not self.ranks.is_first:
            return
        log.error("step %d could not be saved (%s): %s; older checkpoints are untouched", step, tier.name, problem)
        self.folder.record("checkpoint-failed", step=step, error=problem, tier=tier.name)

    def _let_go(self, step: int) -> None:
        """Of the run folder. Only rank 0 knows which steps are being sent to a store."""
        if not self.ranks.is_first:
            return
        keep, keep_every = self.spec.keep, self.spec.keep_every
        for expired in self.checkpoints.expired(step, keep=keep, keep_every=keep_every, protected=self.protected):
            self.faults.reach("save.retention", step)
            with self.uploads.lock if self.uploads else contextlib.nullcontext():
                if not self.uploads or expired.step not in self.uploads.reserved:
                    expired.delete()


@dataclass(frozen=True)
class OpenTiers:
    quick: list[NearTier]  # beside the run folder, in the order they are written
    stored: StoredCheckpoints | None = None
    direct: StoreTier | None = None  # checkpoints go straight into the store, or ...
    uploads: Uploads | None = None  # ... copies of the run folder's do


def open_tiers(run: Run, folder: RunFolder, ranks: Ranks, faults: Faults, protected: set[int]) -> OpenTiers:
    """The tiers that a run asks for; what is wrong with one is said here, before anything is trained."""
    spec = run.checkpoint
    quick: list[NearTier] = []
    if not any((spec.memory_every, spec.local_every, spec.managed_every, spec.store)):
        return OpenTiers(quick)
    give_up = threading.Event()
    options = StoreOptions(patience_s=float(spec.upload_seconds), give_up=give_up)
    store = open_store(spec.store, options) if spec.store else None
    run_id = str(on_first_rank(ranks, lambda: _find_id(folder, store)))
    for name in NODE_TIERS:
        root, every = tier_path(spec, name), getattr(spec, f"{name}_every")
        if root and every:
            place = node_folder(root, folder, run_id)
            on_every_rank(ranks, partial(make_private, root, place, tier=name))
            tier = NodeTier(name, every, CheckpointFolder(place), ranks, faults)
            for gone in clear_earlier_runs(root, folder, run_id) if tier.leads else ():
                log.info("removing %s of the %s tier: it is of an earlier run of this folder", gone, name)
            if name == "memory" and tier.nodes.count == 1 and ranks.is_first:
                log.info("one node: the memory tier has no peer and survives the death of processes alone")
            quick.append(tier)
    if spec.managed_every:
        service = ManagedService.connect(
            run.name, run_id, rank=ranks.rank, world_size=ranks.world_size, endpoint=spec.managed_endpoint
        )
        quick.append(ManagedTier(spec.managed_every, service, ranks, faults))
    if store is None:
        return OpenTiers(quick)
    stored = StoredCheckpoints.of_run(store, run.name, run_id)
    if saves_directly(run):
        return OpenTiers(quick, stored, direct=StoreTier(spec, stored, ranks, faults, protected, give_up))
    return OpenTiers(quick, stored, uploads=Uploads(spec, folder, stored, ranks, faults, protected))


def saves_directly(run: Run) -> bool:
    """Whether checkpoints go straight into the store: as the run says, or because its pods share no folder."""
    if run.checkpoint.direct is not None:
        return run.checkpoint.direct
    apart = run.target.kind == "kubernetes" and run.target.kubernetes.storage == "none"
    return apart and run.checkpoint.store is not None and (run.resources.nodes or 1) > 1


def _find_id(folder: RunFolder, store: Store | None) -> str:
    """The id in the run folder; on a new machine the one that the store knows; else a new one."""
    run_id = read_id(folder)
    if store is None:
        return run_id or begin_anew(folder)
    if run_id and known_to(folder, store.url):
        return run_id  # nothing is asked of the store: it may be down, and training must go on
    registered = current_id(store, folder.name)
    if run_id is None:
        run_id = registered or begin_anew(folder)
    if run_id != registered:
        write_current_id(store, folder.name, run_id)  # also the proof that this machine may write there
    write_id(folder, run_id, known_to=store.url)
    return run_id
