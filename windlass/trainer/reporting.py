"""What a run writes while it trains: metrics.jsonl first; the log line and loggers get the same record."""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from windlass.common.files import append_json_line
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.callbacks.loggers import MetricSink, open_sinks
from windlass.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. docs/metrics.md says what each field means."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    step_s: float
    data_s: float
    checkpoint_s: float
    memory_gib: float
    epoch: float
    attempt: int
    time: float


class Reporter:
    """Rank 0 writes; the others are silent."""

    def __init__(self, run: Run, folder: RunFolder, ranks: Ranks) -> None:
        self.run, self.folder, self.ranks = run, folder, ranks
        self.attempt = attempt_number()
        self._unwritten: list[dict[str, Any]] = []
        self._sinks: list[MetricSink] = []

    def begin(self, step: int) -> None:
        """Open what else metrics go to, for an attempt that goes on after `step`."""
        self._sinks = open_sinks(self.run, self.folder, step)

    def step(self, metrics: StepMetrics) -> None:
        if not self.ranks.is_first:
            return
        self._append({"kind": "step", **asdict(metrics)})
        if metrics.step % self.run.train.log_every == 0 or metrics.step in (1, metrics.steps):
            mfu = f" · {metrics.mfu:.1%} MFU" if metrics.mfu is not None else ""
            log.info(
                "step %d/%d · loss %.4f · grad norm %.3f · lr %.2e · %s tokens/s%s",
                metrics.step,
                metrics.steps,
                metrics.loss,
                metrics.grad_norm,
                metrics.learning_rate,
                f"{metrics.tokens_per_s:,.0f}",
                mfu,
            )

    def validation(self, step: int, loss: float, sequences: int, tokens: int, *, accuracy: float) -> None:
        if not self.ranks.is_first:
            return
        perplexity = math.exp(min(loss, 700.0))
        log.info(
            "step %d · validation loss %.4f, perplexity %.4g, %.1f %% of tokens right, over %d sequences",
            step,
            loss,
            perplexity,
            100 * accuracy,
            sequences,
        )
        record = {"kind": "validation", "step": step, "loss": loss, "sequences": sequences, "tokens": tokens}
        self._append_now({**record, "perplexity": perplexity, "accuracy": accuracy})

    def ranks_compared(self, step: int, comparison: dict[str, Any]) -> None:
        """How the ranks' times compare; see callbacks/stragglers.py."""
        self._append_now({"kind": "ranks", "step": step, **comparison})

    def experts(self, step: int, shares: list[list[float]]) -> None:
        """Of every block, the share of tokens that each expert was sent."""
        if not self.ranks.is_first:
            return
        used = [share for block in shares for share in block]
        log.info("step %d · experts were sent %.1f to %.1f %% of tokens", step, 100 * min(used), 100 * max(used))
        self._append_now({"kind": "experts", "step": step, "shares": shares})

    def _append_now(self, record: dict[str, Any]) -> None:
        self._append({**record, "attempt": self.attempt, "time": round(time.time(), 3)})

    def _append(self, record: dict[str, Any]) -> None:
        """A disk that is full while a save fails must not end the run: lines wait for the next step."""
        self._unwritten.append(record)
        for sink in self._sinks if record["kind"] in ("step", "validation") else ():
            try:
                sink.write(record)
            except Exception as error:  # whatever it is, training goes on
                log.warning("%s did not take a record: %s: %s", type(sink).__name__, type(error).__name__, error)
        try:
            self._flush()
        except OSError as error:
            log.warning("%s cannot be written, %d lines wait: %s", self.folder.metrics, len(self._unwritten), error)

    def _flush(self) -> None:
        while self._unwritten:
            append_json_line(self.folder.metrics, self._unwritten[0])
            del self._unwritten[0]

    def close(self, *, finished: bool = True) -> None:
        self._flush()
        for sink in self._sinks:
            try:
                sink.close(finished=finished)
            except Exception as error:
                log.warning("%s could not be closed: %s: %s", type(sink).__name__, type(error).__name__, error)


def attempt_number() -> int:
    return int(os.environ.get("WINDLASS_ATTEMPT", "1"))


def memory_gib(device: torch.device) -> float:
    """Peak so far: allocated on the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)


def set_up_logging(folder: RunFolder, rank: int) -> None:
    """Everything into the rank's own file; on the console rank 0 speaks, the others only when something is wrong."""
    form = logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S")
    root = logging.getLogger("windlass")
    root.setLevel(logging.INFO)
    root.propagate = False
    console = logging.StreamHandler(sys.stdout)
    speaks = rank == 0 or os.environ.get("WINDLASS_SAY_ALL") == "1"  # where each console line is kept with its rank
    console.setLevel(logging.INFO if speaks else logging.WARNING)
    file = logging.FileHandler(folder.rank_log(rank), encoding="utf-8")
    for handler in (console, file):
        handler.setFormatter(form)
        root.addHandler(handler)
