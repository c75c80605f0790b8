"""Metrics of every step, written together when the host waits for the GPU anyway.

On a CPU that is after every step; on a GPU at log lines, and before saves and validations: no step is saved that is
not finite, or not in the metrics.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from windlass.catalog.gpus import Gpu
from windlass.errors import ExitCode, UserError
from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.distributed.agreement import on_first_rank
from windlass.trainer.reporting import StepMetrics, memory_gib
from windlass.trainer.state import StepResult, TrainState


class Metrics(Callback):
    def __init__(self, state: TrainState) -> None:
        prepared, length = state.prepared, state.run.data.sequence_length or 0
        self.flops_per_token = flops_per_token(prepared.reference, prepared.config, length)
        self.peak = peak_flops(state.ranks.gpu)
        self.open: list[tuple[StepResult, float]] = []  # steps still on the device, and how long saves held each up

    def on_start(self, state: TrainState) -> None:
        on_first_rank(state.ranks, lambda: state.reporter.begin(state.step))

    def after_step(self, state: TrainState) -> None:
        assert state.result is not None
        self.open.append((state.result, state.stall_s))
        state.stall_s = 0.0
        train, step = state.run.train, state.step
        logs = step % train.log_every == 0 or step in (1, train.steps)
        if logs or state.pausing or state.ranks.device.type == "cpu":
            self.settle(state)

    def on_end(self, state: TrainState) -> None:
        self.settle(state)

    def on_close(self, state: TrainState) -> None:
        state.reporter.close(finished=not state.preempted)

    def settle(self, state: TrainState) -> None:
        """Wait for the device and write the open steps; UserError for the first one that is not finite."""
        if not self.open:
            return
        numbers = torch.stack([torch.stack([result.loss, result.grad_norm.double()]) for result, _ in self.open])
        values = numbers.tolist()
        step_s = (time.perf_counter() - state.clock) / len(self.open)
        state.restart_clock()
        steps, self.open = self.open, []
        for (result, stall_s), (loss, grad_norm) in zip(steps, values, strict=True):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                error = not_finite(state, result, loss, grad_norm)
                # The optimizer has changed nothing since: the weights are those before this step.
                state.save(wait=True, position=result.before)
                raise error
            state.last_loss = loss
            self.report(state, result, loss, grad_norm, step_s=step_s, stall_s=stall_s)

    def report(
        self, state: TrainState, result: StepResult, loss: float, grad_norm: float, *, step_s: float, stall_s: float
    ) -> None:
        speed, world_size = result.total_labels / step_s, state.ranks.world_size
        state.reporter.step(
            StepMetrics(
                step=result.after.step,
                steps=state.run.train.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=result.rate,
                tokens=result.after.tokens,
                tokens_per_s=round(speed, 1),
                tokens_per_s_per_gpu=round(speed / world_size, 1),
                mfu=round(speed * self.flops_per_token / (self.peak * world_size), 4) if self.peak else None,
                step_s=round(step_s, 6),
                data_s=round(result.batch.wait_s, 6),
                checkpoint_s=round(stall_s, 6),
                memory_gib=memory_gib(state.ranks.device),
                epoch=round(result.batch.epoch, 4),
                attempt=state.reporter.attempt,
                time=round(time.time(), 3),
            )
        )


class ExpertShares(Callback):
    """Which experts of a mixture are used: reported as often as steps are logged."""

    def after_step(self, state: TrainState) -> None:
        every, last = state.run.train.log_every, state.run.train.steps
        if state.balance is not None and (state.step % every == 0 or state.step == last):
            state.reporter.experts(state.step, state.balance.shares())


def not_finite(state: TrainState, result: StepResult, loss: float, grad_norm: float) -> UserError:
    """Name the step, the rank and the sequences whose loss is not finite."""
    mine = [
        f"rank {state.ranks.rank}, micro-batch {index}: {', '.join(micro_batch.ids)}"
        for index, (value, micro_batch) in enumerate(
            zip(result.losses.tolist(), result.batch.micro_batches, strict=True)
        )
        if not math.isfinite(value)
    ]
    culprits = [line for lines in state.ranks.gather(mine) for line in lines]
    return UserError(
        f"step {result.after.step} was stopped before its optimizer step: loss {loss}, gradient norm {grad_norm}",
        evidence="\n".join(culprits) or "every rank's loss is finite; the gradient overflowed in the backward pass",
        cause="a bad sequence, or a learning rate that is too high",
        fix="windlass data inspect RUN.yaml --sequence ID    shows the text of one; or lower train.learning_rate",
        exit_code=ExitCode.FAILED,
    )


def peak_flops(gpu: Gpu | None) -> float | None:
    """The GPU's dense bf16 peak, which model FLOPs are compared with; None where it is not known."""
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
    heads = getattr(text, "num_attention_heads", None)
    if not heads:  # of a model whose attention is not known
        return float(total)
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return float(total + 6 * text.num_hidden_layers * sequence_length * width)


def _per_weight(parameter: Tensor) -> float:
    return 6.0 if parameter.requires_grad else 4.0
