"""The store as a tier: published checkpoints of the run folder go there beside training, and come back from there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest
from windlass.checkpoint.folder import Damage, expired_steps
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.checkpoint.stored import StoredCheckpoints
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec.checkpoint import CheckpointSection
from windlass.trainer.checkpointing.folder_tier import load_state, written_by
from windlass.trainer.checkpointing.piece_tiers import Nodes
from windlass.trainer.checkpointing.tiers import Offer
from windlass.trainer.distributed.agreement import Agreement, SaveFailedError
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)


class Uploads:
    """Brings the store up to the run folder, again after every save: a thread of its own, a process group of its own.

    Each round looks at what is there and at what is missing, so that whatever a killed or failed round left undone is
    done by the next. Every rank sends its share of the files; rank 0 writes the manifest when all are there.
    """

    def __init__(
        self,
        spec: CheckpointSection,
        folder: RunFolder,
        stored: StoredCheckpoints,
        ranks: Ranks,
        faults: Faults,
        protected: set[int],
        nodes: Nodes,
    ) -> None:
        self.spec, self.folder, self.stored, self.ranks, self.faults = spec, folder, stored, ranks, faults
        self.nodes = nodes
        self.protected = protected
        self.local = CheckpointFolder(folder.checkpoints)
        self.lock = threading.Lock()
        self.reserved: set[int] = set()  # steps to be read by the round under way: whoever deletes asks, under the lock
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=6))
        assert isinstance(group, dist.ProcessGroup)
        self.agreement = Agreement(ranks, group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._rounds: list[Future[None]] = []
        self._requested = 0
        self._missing: list[int] = []  # rank 0: steps of the run folder that the store does not have
        self._cleared = False
        self._ever_protected: set[int] = set()

    def request(self) -> None:
        """Ask for a round. All ranks do, as often as each other."""
        with self.lock:
            self._requested += 1
            number = self._requested
        self._rounds = [upload for upload in self._rounds if not upload.done() or upload.exception()]
        self._rounds.append(self._thread.submit(self._round, number))

    def finish(self, deadline: float | None) -> list[int]:
        """Wait for the rounds asked for, at most until `deadline` (by the monotonic clock, of whichever rank has the
        least time); the steps that are in the run folder alone, the same on all ranks.

        Without a deadline the wait still ends: every request of a round is given up after a while.
        """
        seconds = None
        if deadline is not None:
            seconds = max(0.0, min(self.ranks.gather(deadline - time.monotonic(), patient=True)))
        done, waiting = wait(self._rounds, timeout=seconds)
        for upload in done:
            upload.result()
        unfinished = any(self.ranks.gather(bool(waiting), patient=True))
        newest = [checkpoint.step for checkpoint in self.local.complete()][-1:] if unfinished else []
        here_alone = sorted({*self._missing, *(newest if not self._missing else ())})
        missing: list[int] = self.ranks.broadcast(here_alone, patient=True)
        return missing

    def _round(self, number: int) -> None:
        (plan, problem), *_ = self.agreement.gather(self._plan(number) if self.ranks.is_first else None)
        if problem:
            with self.lock:
                self.reserved = set()
            self._report(plan[0] if plan else None, problem)
            return
        try:
            for step in plan:
                self._upload(self.local.at(step))
                self._missing = [waiting for waiting in self._missing if waiting != step]
        except SaveFailedError as error:
            self._report(step, str(error))
            return
        finally:
            with self.lock:
                self.reserved = set()
        if self.ranks.is_first and plan:
            self._tidy()

    def _plan(self, number: int) -> tuple[list[int], str | None]:
        """What to send, the newest first; nothing if a later round is asked for already: it will send that too."""
        with self.lock:
            if number < self._requested:
                return [], None
            here = [checkpoint.step for checkpoint in self.local.complete()]
            newest = here[-1] if here else 0
            gone = expired_steps(
                here, newest, keep=self._keep, keep_every=self.spec.keep_every, protected=self.protected
            )
            self._missing = [step for step in here if step not in gone]
            self.reserved = set(self._missing)
        try:
            stored = {checkpoint.step for checkpoint in self.stored.complete()}
        except (UserError, OSError) as error:
            return self._missing[::-1], _in_short(error)
        self._missing = [step for step in self._missing if step not in stored]
        return self._missing[::-1], None

    def _upload(self, checkpoint: Checkpoint) -> None:
        started, together, step = time.perf_counter(), self.agreement.together, checkpoint.step
        self.faults.reach("upload.begin", step)
        manifest: Manifest = together(checkpoint.manifest)[0]
        mine = self.nodes.share(manifest.files, self.ranks.rank)
        if self.nodes.count > 1:  # a node has its own ranks' files alone
            mine = written_by(self.ranks.rank, manifest.files)
        together(lambda: self._send(checkpoint, mine, manifest))
        self.faults.reach("upload.manifest", step)
        together(lambda: self.stored.publish(checkpoint), first_rank_only=True)
        self.faults.reach("upload.published", step)
        if self.ranks.is_first:
            seconds = time.perf_counter() - started
            log.info(
                "%s is in %s: %.1f MiB in %.2f s",
                checkpoint.name,
                self.stored.store.url,
                manifest.size / 2**20,
                seconds,
            )
            self.folder.record(
                "uploaded", step=step, to=self.stored.store.url, seconds=round(seconds, 3), bytes=manifest.size
            )

    def _send(self, checkpoint: Checkpoint, names: list[str], manifest: Manifest) -> None:
        for name in names:
            record = manifest.files[name]
            if not self.stored.holds(checkpoint.step, name, record):
                self.stored.put(checkpoint, name, record)
            self.faults.reach("upload.file", checkpoint.step)

    def _report(self, step: int | None, problem: str) -> None:
        if not self.ranks.is_first:
            return
        log.error("step %s could not be copied to %s: %s; training goes on", step, self.stored.store.url, problem)
        self.folder.record("upload-failed", step=step, to=self.stored.store.url, error=problem)

    def _tidy(self) -> None:
        """Retention, and once the leftovers of other days. What fails here is tried again after the next upload."""
        newest = max((checkpoint.step for checkpoint in self.local.complete()), default=0)
        try:
            expired_ones = self.stored.expired(
                newest, keep=self._keep, keep_every=self.spec.keep_every, protected=self._best_there()
            )
            for expired in expired_ones:
                self.faults.reach("upload.retention", newest)
                self.stored.delete(expired)
            if not self._cleared:
                self.stored.clear_leftovers()
                self._cleared = True
        except (UserError, OSError) as error:
            log.warning("%s could not be tidied: %s", self.stored.store.url, _in_short(error))

    def _best_there(self) -> set[int]:
        """The best step, and until the store has it the best one that it has: of two bests the later is better."""
        self._ever_protected |= set(self.protected)
        stored = {checkpoint.step for checkpoint in self.stored.complete()} & self._ever_protected
        return set(self.protected) | ({max(stored)} if stored else set())

    @property
    def _keep(self) -> int:
        return self.spec.store_keep or self.spec.keep


class StoreOffer:
    """A step in the store. Its proof brings it into the run folder, where it is a checkpoint like any other.

    What an attempt before this one brought whole is kept: a restore that is cut off goes on where it was.
    """

    tier = "store"

    def __init__(
        self, stored: StoredCheckpoints, step: int, folder: CheckpointFolder, ranks: Ranks, faults: Faults, nodes: Nodes
    ) -> None:
        self.stored, self.step, self.folder, self.ranks, self.faults = stored, step, folder, ranks, faults
        self.nodes, self.leads = nodes, nodes.is_first_of_node(ranks.rank)
        self.checkpoint, self.incoming = folder.at(step), folder.incoming(step)
        self.where = f"{stored.store.url}/{self.checkpoint.name}"
        self._manifest: Manifest | None = None

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = self.stored.manifest(self.step)
        return self._manifest

    def prove(self) -> list[tuple[str, str]]:
        problems = self._stage(lambda: self.incoming.prepare(self.manifest), once_per_node=True)
        problems = problems or self._stage(self._fetch_own_share)
        if self.leads and any(file not in (MANIFEST_NAME, "a file") for file, _ in problems):
            self.incoming.delete()  # damaged in the store: to bring the rest again is no use
        return problems or self._stage(self._take, once_per_node=True)

    def load(self, state: dict[str, Tensor]) -> None:
        load_state(self.checkpoint, state, self.ranks)

    def _fetch_own_share(self) -> list[Damage]:
        problems = []
        for name in self.nodes.share(self.manifest.files, self.ranks.rank):
            record = self.manifest.files[name]
            if not self.incoming.holds(name, record, former=self.checkpoint):
                damage = self.stored.fetch(self.step, name, record, self.incoming.path)
                problems += [damage] if damage else []
                self.faults.reach("restore.file", self.step)
        return problems

    def _take(self) -> None:
        self.incoming.publish(self.manifest)
        self.folder.take(self.incoming)

    def _stage(self, action: Callable[[], Any], *, once_per_node: bool = False) -> list[tuple[str, str]]:
        problems: list[tuple[str, str]] = []
        if self.leads or not once_per_node:
            try:
                problems = [(damage.file, damage.reason) for damage in action() or ()]
            except (UserError, OSError, ValueError, TypeError, KeyError) as error:
                problems = [(MANIFEST_NAME if once_per_node else "a file", _in_short(error))]
        return sorted({problem for part in self.ranks.gather(problems, patient=True) for problem in part})


def store_offers(
    stored: StoredCheckpoints, folder: CheckpointFolder, ranks: Ranks, faults: Faults, nodes: Nodes
) -> tuple[list[Offer], str | None]:
    """The steps of the store, or why it cannot be asked."""
    steps: list[int] = []
    problem: str | None = None
    if ranks.is_first:
        try:
            steps = [checkpoint.step for checkpoint in stored.complete()]
        except (UserError, OSError) as error:
            problem = str(error)
    steps, problem = ranks.broadcast((steps, problem), patient=True)
    return [StoreOffer(stored, step, folder, ranks, faults, nodes) for step in steps], problem


def _in_short(error: BaseException) -> str:
    if isinstance(error, UserError):
        return f"{error.what} ({error.evidence})" if error.evidence else error.what
    return f"{type(error).__name__}: {error}"
