"""Steps whose numbers are still on the device: written down together, with one wait for the GPU, when they settle.

What a run says while it trains: metrics.jsonl first; the log line and TensorBoard come from the same record.

Model FLOPs and what share of the GPU's peak they are. Convention: causal attention, dense bf16 peak.
"""

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
import torch.distributed as dist
from torch import Tensor, nn

from windlass.catalog.gpus import Gpu
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder, append_json_line
from windlass.spec import Run
from windlass.trainer.batches import StepBatch
from windlass.trainer.checkpointing.saving import Progress
from windlass.trainer.distributed.ranks import Ranks


@dataclass
class OpenStep:
    before: Progress  # where the run stood before this step
    after: Progress
    batch: StepBatch
    losses: Tensor  # the share of each micro-batch of this rank in the step's loss
    loss: Tensor
    grad_norm: Tensor
    total_labels: float
    rate: float
    checkpoint_s: float = 0.0  # training stood still for a save before this step


class NotFiniteError(UserError):
    """A loss or gradient was not finite; `good` is where the run stood before that step, and the weights still are."""

    good: Progress


class Ledger:
    """On a CPU every step settles at once; on a GPU at log lines, saves and validations."""

    def __init__(self, reporter: Reporter, ranks: Ranks, *, steps: int, flops_per_token: float, peak: float | None):
        self.reporter, self.ranks, self.steps = reporter, ranks, steps
        self.flops_per_token, self.peak = flops_per_token, peak
        self.last_loss = math.nan
        self._open: list[OpenStep] = []
        self._stall = 0.0
        self._clock = time.perf_counter()

    def add(self, step: OpenStep) -> None:
        step.checkpoint_s, self._stall = self._stall, 0.0
        self._open.append(step)

    def due(self, step: int, log_every: int) -> bool:
        return self.ranks.device.type == "cpu" or step % log_every == 0 or step in (1, self.steps)

    def restart_clock(self) -> None:
        """What happened since the last settling is not training time."""
        self._clock = time.perf_counter()

    def add_stall(self, seconds: float) -> None:
        """Time that a save took from training; it is part of the next step's."""
        self._stall += seconds

    def settle(self) -> None:
        """Wait for the device and report all open steps; NotFiniteError for the first one that went wrong."""
        if not self._open:
            return
        numbers = torch.stack([torch.stack([one.loss, one.grad_norm.double()]) for one in self._open]).tolist()
        now = time.perf_counter()
        step_s = (now - self._clock) / len(self._open)
        self._clock = now
        steps, self._open = self._open, []
        for one, (loss, grad_norm) in zip(steps, numbers, strict=True):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise self._not_finite(one, loss, grad_norm)
            self.last_loss = loss
            self._report(one, loss, grad_norm, step_s)

    def _report(self, one: OpenStep, loss: float, grad_norm: float, step_s: float) -> None:
        speed = one.total_labels / step_s
        world_size = self.ranks.world_size
        self.reporter.step(
            StepMetrics(
                step=one.after.step,
                steps=self.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=one.rate,
                tokens=one.after.tokens,
                tokens_per_s=round(speed, 1),
                tokens_per_s_per_gpu=round(speed / world_size, 1),
                mfu=round(speed * self.flops_per_token / (self.peak * world_size), 4) if self.peak else None,
                step_s=round(step_s, 6),
                data_s=round(one.batch.wait_s, 6),
                checkpoint_s=round(one.checkpoint_s, 6),
                memory_gib=memory_gib(self.ranks.device),
                epoch=round(one.batch.epoch, 4),
                attempt=self.reporter.attempt,
                time=round(time.time(), 3),
            )
        )

    def _not_finite(self, one: OpenStep, loss: float, grad_norm: float) -> NotFiniteError:
        """Name the step, the rank and the sequences whose loss is not finite."""
        mine = [
            f"rank {self.ranks.rank}, micro-batch {index}: {', '.join(micro_batch.ids)}"
            for index, (value, micro_batch) in enumerate(zip(one.losses.tolist(), one.batch.micro_batches, strict=True))
            if not math.isfinite(value)
        ]
        culprits = [line for part in self.ranks.gather(mine) for line in part]
        error = NotFiniteError(
            f"step {one.after.step} was stopped before its optimizer step: loss {loss}, gradient norm {grad_norm}",
            evidence="\n".join(culprits) or "every rank's loss is finite; the gradient overflowed in the backward pass",
            cause="a bad sequence, or a learning rate that is too high",
            fix="windlass data inspect RUN.yaml --sequence ID    shows the text of one; or lower train.learning_rate",
            exit_code=ExitCode.FAILED,
        )
        error.good = one.before
        return error


def sum_over_ranks(losses: Tensor, ranks: Ranks) -> Tensor:
    """The step's loss from the shares of all micro-batches and ranks, left on the device."""
    total = losses.double().sum()
    if ranks.world_size > 1:
        dist.all_reduce(total)
    return total


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
        self._board: Any = None
        if ranks.is_first and run.train.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder.path / "tensorboard"))

    def step(self, metrics: StepMetrics) -> None:
        if not self.ranks.is_first:
            return
        self._append({"kind": "step", **asdict(metrics)})
        if self._board:
            for name in ("loss", "grad_norm", "learning_rate", "tokens_per_s"):
                self._board.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)
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
        record |= {"perplexity": perplexity, "accuracy": accuracy}
        self._append({**record, "attempt": self.attempt, "time": round(time.time(), 3)})
        if self._board:
            self._board.add_scalar("validation/loss", loss, step)
            self._board.add_scalar("validation/accuracy", accuracy, step)

    def _append(self, record: dict[str, Any]) -> None:
        """A disk that is full while a save fails must not end the run: lines wait for the next step."""
        self._unwritten.append(record)
        try:
            self._flush()
        except OSError as error:
            log.warning("%s cannot be written, %d lines wait: %s", self.folder.metrics, len(self._unwritten), error)

    def _flush(self) -> None:
        while self._unwritten:
            append_json_line(self.folder.metrics, self._unwritten[0])
            del self._unwritten[0]

    def close(self) -> None:
        self._flush()
        if self._board:
            self._board.close()


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


def peak_flops(gpu: Gpu | None) -> float | None:
    """Dense bf16 peak; None where it is not known."""
    return gpu.bf16_tflops * 1e12 if gpu and gpu.bf16_tflops else None


def flops_per_token(model: nn.Module, config: Any, sequence_length: int) -> float:
    """Forward and backward of one token: 6 per matrix weight it meets, 6·L·T·d for causal attention.

    A frozen weight counts 4: there is no gradient of its own to compute.
    """
    text = config.get_text_config()
    experts = getattr(text, "num_local_experts", 0) or 0
    per_token = getattr(text, "num_experts_per_tok", experts) or experts
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    total = head.numel() * _per_weight(head)  # looked up on the way in, multiplied on the way out
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or parameter is embedding or parameter is head:
            continue
        share = per_token / experts if experts and ".experts." in f".{name}" else 1.0
        total += parameter.numel() * share * _per_weight(parameter)
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return float(total + 6 * text.num_hidden_layers * sequence_length * width)


def _per_weight(parameter: Tensor) -> float:
    return 6.0 if parameter.requires_grad else 4.0
