"""Turn sequences into the micro-batches of one rank, one step ahead of the loop.

Shapes: R rows of a rank per step, M rows of a micro-batch, T tokens of a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.data.sequences.sequences import Batch, Sequences
from windlass.plan.layout import Layout
from windlass.spec import Run
from windlass.trainer.checkpointing.tiers import Progress
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.model.context_parallel import own_places
from windlass.trainer.model.structure import IGNORED


@dataclass(frozen=True)
class MicroBatch:
    tokens_mt: Tensor
    labels_mt: Tensor
    positions_mt: Tensor | None  # restarting at document starts, or of a part of the sequences; None: 0, 1, 2, …
    ids: tuple[str, ...]  # which sequences these are
    documents: Tensor | None = None  # where each begins in the M·T tokens, and M·T; int32


@dataclass(frozen=True)
class StepBatch:
    micro_batches: list[MicroBatch]
    num_labels: int  # that count, of this rank
    state: dict[str, Any] | None  # where a stream stands after this step
    epoch: float
    wait_s: float = 0.0


class Batches:
    """This rank's share of every global batch. Which rows those are follows from the step alone."""

    def __init__(
        self,
        sequences: Sequences,
        run: Run,
        ranks: Ranks,
        *,
        global_batch: int,
        micro: int,
        num_micro: int,
        offset: int = 0,
    ) -> None:
        self.sequences = sequences
        self.global_batch = global_batch
        self.micro, self.num_micro = micro, num_micro
        self.length = run.data.sequence_length or 0
        self.document_mask = run.data.document_mask
        self.device = ranks.device
        self.places = own_places(self.length, ranks.context, ranks.context_rank) if ranks.context > 1 else None
        self.offset = offset  # sequences by which steps of another global batch moved the order
        self.positions = [offset + place for place in range(ranks.data_rank, global_batch, ranks.data_ranks)]

    @classmethod
    def for_training(cls, sequences: Sequences, run: Run, ranks: Ranks, layout: Layout, position: Progress) -> Batches:
        """Batches that go on in the order of the data where `position` stands."""
        batch, micro, num_micro = run.train.global_batch, layout.micro, layout.num_micro
        offset = position.sequences - position.step * batch
        return cls(sequences, run, ranks, global_batch=batch, micro=micro, num_micro=num_micro, offset=offset)

    def read(self, step: int) -> StepBatch:
        batch = self.sequences.batch(step, self.global_batch, self.positions)
        if self.offset and self.sequences.num_sequences:
            batch = replace(batch, epoch=batch.epoch + self.offset / self.sequences.num_sequences)
        return self._assemble(batch)

    def from_step(self, first: int, end: int) -> Iterator[StepBatch]:
        """The batches of steps first..end-1, each read while the one before it is trained on."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as reader:
            ahead: Future[StepBatch] | None = reader.submit(self.read, first) if first < end else None
            for step in range(first, end):
                assert ahead is not None
                started = time.perf_counter()
                batch = ahead.result()
                wait_s = time.perf_counter() - started
                ahead = reader.submit(self.read, step + 1) if step + 1 < end else None
                yield StepBatch(batch.micro_batches, batch.num_labels, batch.state, batch.epoch, wait_s)

    def _assemble(self, batch: Batch) -> StepBatch:
        """Rows beyond this rank's share pad the last micro-batch: all their labels are ignored."""
        rows = self.micro * self.num_micro
        tokens = np.zeros((rows, self.length), dtype=np.int64)
        labels = np.full((rows, self.length), IGNORED, dtype=np.int64)
        explicit = self.document_mask or self.places is not None
        positions = np.tile(np.arange(self.length, dtype=np.int64), (rows, 1)) if explicit else None
        ids = [""] * rows
        for row, sequence in enumerate(batch.sequences):
            tokens[row], labels[row] = sequence.tokens[:-1], sequence.tokens[1:]
            if sequence.loss is not None:
                labels[row][~sequence.loss[1:]] = IGNORED
            ids[row] = sequence.id
            if self.document_mask and positions is not None:
                positions[row] = document_positions(sequence.document_starts, self.length)
                ends = sequence.document_starts[sequence.document_starts > 0] - 1
                labels[row, ends] = IGNORED  # the token after a document's end belongs to another document
        if self.places is not None and positions is not None:
            tokens, labels, positions = tokens[:, self.places], labels[:, self.places], positions[:, self.places]
        micro_batches = [
            MicroBatch(
                tokens_mt=self._tensor(tokens[start : start + self.micro]),
                labels_mt=self._tensor(labels[start : start + self.micro]),
                positions_mt=None if positions is None else self._tensor(positions[start : start + self.micro]),
                ids=tuple(filter(None, ids[start : start + self.micro])),
                documents=self._bounds(positions[start : start + self.micro])
                if self.document_mask and positions is not None
                else None,
            )
            for start in range(0, rows, self.micro)
        ]
        return StepBatch(micro_batches, int((labels != IGNORED).sum()), batch.state, batch.epoch)

    def _bounds(self, positions: np.ndarray[Any, Any]) -> Tensor:
        starts = np.flatnonzero(positions.reshape(-1) == 0)
        bounds = self._tensor(np.append(starts, positions.size).astype(np.int32))
        if self.device.type == "cuda":
            torch._dynamo.maybe_mark_dynamic(bounds, 0)  # their number changes: one compiled block for any
        return bounds

    def _tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def document_positions(starts: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    """0, 1, 2, … restarting at every document start."""
    offsets = np.arange(length, dtype=np.int64)
    inside = starts[starts < length].astype(np.int64)
    last_start = np.zeros(length, dtype=np.int64)
    last_start[inside] = inside
    return offsets - np.maximum.accumulate(last_start)
