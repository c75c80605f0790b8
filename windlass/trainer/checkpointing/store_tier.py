"""The store as a tier: what the ranks stream straight into it, or copies of the run folder's checkpoints, sent beside
training; and the steps that it offers to a resume.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

from torch import Tensor

from windlass.checkpoint import Checkpoint, CheckpointFolder, Manifest
from windlass.checkpoint.folder import expired_steps
from windlass.checkpoint.manifest import MANIFEST_NAME
from windlass.checkpoint.stored import StoredCheckpoints
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec.checkpoint import CheckpointSection
from windlass.trainer.checkpointing.tensor_files import save_tensors
from windlass.trainer.checkpointing.tiers import Describe, Offer
from windlass.trainer.checkpointing.whole_offer import WholeOffer
from windlass.trainer.distributed.agreement import Agreement, SaveFailedError, root_cause
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks, gloo_group

log = logging.getLogger(__name__)


class StoreTier:
    """`checkpoint.direct`: every rank streams its part straight into the store; rank 0 writes the manifest last."""

    name = "store"

    def __init__(
        self,
        spec: CheckpointSection,
        stored: StoredCheckpoints,
        ranks: Ranks,
        faults: Faults,
        protected: set[int],
        give_up: threading.Event,
    ) -> None:
        self.every, self.stored, self.ranks, self.faults = spec.every, stored, ranks, faults
        self._give_up = give_up  # of the store's options
        self.agreement = Agreement(ranks, ranks.saving)
        self.retention = Retention(spec, stored, faults, protected)
        self.published: set[int] = set()  # by this attempt
        self._claim: str | None = None  # rank 0's right to save in the store

    def save(self, step: int, state: dict[str, Tensor], describe: Describe) -> int:
        together, place = self.agreement.together, self.stored.at(step)
        self.faults.reach("save.staged", step)
        try:
            together(lambda: self._remove(step), first_rank_only=True)  # one that a resume passed over
            records = together(lambda: save_tensors(state, place, self.ranks.saving))
            self.faults.reach("save.written", step)
            manifest = describe({name: record for part in records for name, record in part.items()})
            self.faults.reach("save.manifest", step)
            together(lambda: self._publish(manifest), first_rank_only=True)
        except SaveFailedError:
            if self.ranks.is_first:
                with contextlib.suppress(UserError, OSError):  # it may be out of reach: the next start clears it
                    self._remove(step)
            raise
        self.published.add(step)
        self.faults.reach("save.published", step)
        return manifest.size

    def give_up_unless_done(self, save: Future[None], deadline: float) -> None:
        """Let a save that is under way fail at `deadline`, by the monotonic clock; what it has sent stays behind.

        It fails on all ranks as soon as it does on one. A request that was sent is still waited for.
        """
        if wait([save], timeout=max(0.0, deadline - time.monotonic())).not_done:
            self._give_up.set()
            wait([save])
            self._give_up.clear()

    def has(self, step: int) -> bool:
        """As far as is known: a store that was out of reach when this attempt began is not waited for again."""
        return self._claim is not None and self.stored.at(step).stat(MANIFEST_NAME) is not None

    def clear_unfinished(self) -> None:
        """What killed saves left. Nobody else writes below this run's id, and an earlier attempt that still does must
        not finish.
        """
        try:
            self._claim = self.stored.claim()
            steps, uploads = self.stored.clear_leftovers(older_than_s=0)
        except (UserError, OSError) as error:
            log.warning("what a killed save may have left in %s is still there: %s", self.stored.store.url, error)
            return
        if steps or uploads:
            log.info("%s: %d steps and %d uploads that were cut off are removed", self.stored.store.url, steps, uploads)

    def let_go(self, step: int) -> None:
        if self.ranks.is_first:
            self.retention.apply(step)

    def _remove(self, step: int) -> None:
        self._check_claim()
        self.stored.remove(step)

    def _publish(self, manifest: Manifest) -> None:
        self._check_claim()
        self.stored.publish(manifest)

    def _check_claim(self) -> None:
        """A job that was replaced but still runs must neither publish nor delete what its successor saves."""
        if self._claim is None:  # the store was out of reach when this attempt began
            self._claim = self.stored.claim()
        elif not self.stored.claimed_by(self._claim):
            raise UserError(
                f"a later attempt of this run saves in {self.stored.store.url} now",
                cause="the run was started again, here or on another machine, while this job still ran",
                fix="stop one of the two",
            )


class Retention:
    """What a store keeps. What fails here is tried again after the next save."""

    def __init__(self, spec: CheckpointSection, stored: StoredCheckpoints, faults: Faults, protected: set[int]) -> None:
        self.spec, self.stored, self.faults, self.protected = spec, stored, faults, protected
        self._cleared = False
        self._ever_protected: set[int] = set()

    @property
    def keep(self) -> int:
        return self.spec.store_keep or self.spec.keep

    def apply(self, newest: int) -> None:
        try:
            keep_every, protected = self.spec.keep_every, self._best_there()
            for expired in self.stored.expired(newest, keep=self.keep, keep_every=keep_every, protected=protected):
                self.faults.reach("upload.retention", newest)
                self.stored.delete(expired)
            if not self._cleared:
                self.stored.clear_leftovers()  # of other days
                self._cleared = True
        except (UserError, OSError) as error:
            log.warning("%s could not be tidied: %s", self.stored.store.url, root_cause(error))

    def _best_there(self) -> set[int]:
        """The best step, and until the store has it the best one that it has: of two bests the later is better."""
        self._ever_protected |= set(self.protected)
        stored = {checkpoint.step for checkpoint in self.stored.complete()} & self._ever_protected
        return set(self.protected) | ({max(stored)} if stored else set())


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
    ) -> None:
        self.spec, self.folder, self.stored, self.ranks, self.faults = spec, folder, stored, ranks, faults
        self.protected = protected
        self.retention = Retention(spec, stored, faults, protected)
        self.local = CheckpointFolder(folder.checkpoints)
        self.lock = threading.Lock()
        self.reserved: set[int] = set()  # steps to be read by the round under way: whoever deletes asks, under the lock
        self.agreement = Agreement(ranks, gloo_group(timedelta(hours=6)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._rounds: list[Future[None]] = []
        self._requested = 0
        self._missing: list[int] = []  # rank 0: steps of the run folder that the store does not have

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
            self.retention.apply(max((checkpoint.step for checkpoint in self.local.complete()), default=0))

    def _plan(self, number: int) -> tuple[list[int], str | None]:
        """What to send, the newest first; nothing if a later round is asked for already: it will send that too."""
        with self.lock:
            if number < self._requested:
                return [], None
            here = [checkpoint.step for checkpoint in self.local.complete()]
            newest = here[-1] if here else 0
            gone = expired_steps(
                here, newest, keep=self.retention.keep, keep_every=self.spec.keep_every, protected=self.protected
            )
            self._missing = [step for step in here if step not in gone]
            self.reserved = set(self._missing)
        try:
            stored = {checkpoint.step for checkpoint in self.stored.complete()}
        except (UserError, OSError) as error:
            return self._missing[::-1], root_cause(error)
        self._missing = [step for step in self._missing if step not in stored]
        return self._missing[::-1], None

    def _upload(self, checkpoint: Checkpoint) -> None:
        started, together, step = time.perf_counter(), self.agreement.together, checkpoint.step
        self.faults.reach("upload.begin", step)
        manifest: Manifest = together(checkpoint.manifest)[0]
        mine = sorted(manifest.files)[self.ranks.rank :: self.ranks.world_size]
        together(lambda: self._send(checkpoint, mine, manifest))
        self.faults.reach("upload.manifest", step)
        together(lambda: self.stored.publish(manifest), first_rank_only=True)
        self.faults.reach("upload.published", step)
        if self.ranks.is_first:
            url, size, seconds = self.stored.store.url, manifest.size, time.perf_counter() - started
            log.info("%s is in %s: %.1f MiB in %.2f s", checkpoint.name, url, size / 2**20, seconds)
            self.folder.record("uploaded", step=step, to=url, seconds=round(seconds, 3), bytes=size)

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


def store_offers(stored: StoredCheckpoints, ranks: Ranks, faults: Faults) -> tuple[list[Offer], str | None]:
    """The steps of the store, or why it cannot be asked."""
    steps: list[int] = []
    problem: str | None = None
    if ranks.is_first:
        try:
            steps = [checkpoint.step for checkpoint in stored.complete()]
        except (UserError, OSError) as error:
            problem = str(error)
    steps, problem = ranks.broadcast((steps, problem), patient=True)
    return [WholeOffer("store", step, stored.at(step), ranks, faults) for step in steps], problem
