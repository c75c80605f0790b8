"""What one training run consists of while it trains, and how it is put together: the state that callbacks get."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from windlass.common import own_code
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.batches import StepBatch
from windlass.trainer.callbacks.preemption import Preemption
from windlass.trainer.checkpointing.resuming import (
    check_same_run,
    load,
    model_settings,
    newest_whole,
    refuse_to_start_over,
    take_over,
)
from windlass.trainer.checkpointing.saving import Checkpointer
from windlass.trainer.checkpointing.tiers import Offer, Progress
from windlass.trainer.distributed.agreement import on_first_rank
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.peers import PeerWatch
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.attention import PACKAGE, use_attention
from windlass.trainer.fast.head import return_loss
from windlass.trainer.fast.lean import join_weights
from windlass.trainer.model.adapters import load_adapter
from windlass.trainer.model.experts import Balance
from windlass.trainer.model.lora import draw_adapters
from windlass.trainer.model.pretrained import check_same_frozen, load_pretrained
from windlass.trainer.model.structure import attention_name, persistent_buffers
from windlass.trainer.model.weights import draw_weights, materialize, restore_buffers
from windlass.trainer.optimizer import AdamW, Optimizer, OwnOptimizer, compute_in_bf16
from windlass.trainer.parallelize import parallelize
from windlass.trainer.preparation import Prepared, build
from windlass.trainer.reporting import Reporter
from windlass.trainer.startup import clock
from windlass.trainer.step import PreferenceStepper, Stepper, return_log_probabilities

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Its tensors are still on the device: looking at them waits for the GPU."""

    before: Progress  # where the run stood before this step
    after: Progress
    batch: StepBatch
    losses: Tensor  # the share of each micro-batch of this rank in the step's loss
    loss: Tensor
    grad_norm: Tensor
    total_labels: float
    rate: float


@dataclass(frozen=True)
class Stop:
    """Why a run ends before its last step."""

    exit_code: ExitCode
    reason: str


@dataclass
class Attempt:
    """What a rank begins to train with."""

    run: Run
    prepared: Prepared
    folder: RunFolder
    ranks: Ranks
    faults: Faults
    preemption: Preemption
    peers: PeerWatch


@dataclass
class TrainState(Attempt):
    """A run between two steps. Callbacks read it, and change what the last group of fields names."""

    checkpointer: Checkpointer
    reporter: Reporter
    stepper: Stepper
    balance: Balance | None  # of a mixture's experts
    optimizer: Optimizer
    tensors: dict[str, Tensor]  # everything a checkpoint holds
    checkpoint: Offer | None  # that this attempt goes on from
    position: Progress  # steps, tokens and sequences that are done
    result: StepResult | None = None  # of the newest step of this attempt
    pausing: bool = False  # a callback is due after this step

    stopping: Stop | None = None
    validated_step: int = 0  # of the newest validation, in this attempt or before
    validation_loss: float = math.nan
    last_loss: float = math.nan  # of the newest step whose metrics are written
    stall_s: float = 0.0  # by which saves held training up since the last step
    clock: float = field(default_factory=time.perf_counter)  # training time counts from here
    only_local: list[int] = field(default_factory=list)  # steps that the store lacks at the end

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.position.step

    def stop(self, exit_code: ExitCode, reason: str) -> None:
        """End training after this step, on all ranks alike. The first reason stands."""
        self.stopping = self.stopping or Stop(exit_code, reason)

    @property
    def preempted(self) -> bool:
        return self.stopping is not None and self.stopping.exit_code == ExitCode.PREEMPTED

    def save(self, *, wait: bool, shared: bool = False, position: Progress | None = None) -> float:
        """Save what is trained so far; the seconds for which training stood still."""
        self.tensors |= self.optimizer.state()  # an optimizer may only know what it keeps after its first step
        sigterm_at = (self.preemption.since or time.monotonic()) if wait and self.preempted else None
        return self.checkpointer.save(
            position or self.position, self.tensors, wait=wait, shared=shared, sigterm_at=sigterm_at
        )

    def restart_clock(self) -> None:
        """What happened since the last step is not training time."""
        self.clock = time.perf_counter()


def begin(attempt: Attempt) -> TrainState:
    """The model and its optimizer on all ranks, where the newest checkpoint left them or as they begin."""
    run, prepared, folder, ranks = attempt.run, attempt.prepared, attempt.folder, attempt.ranks
    identity = prepared.model_identity() | model_settings(prepared.config, prepared.reference)
    layout = prepared.layout
    checkpointer = Checkpointer(
        run, folder, ranks, attempt.faults, model=identity, order=prepared.order, sharding=layout.sharding
    )
    reporter = Reporter(run, folder, ranks)
    checkpoint = find_checkpoint(run, folder, ranks, checkpointer)
    if ranks.is_first:
        folder.create(run)  # not before it is known that this run may go on from what is there
    checkpointer.clear_unfinished()
    clock.mark("checkpoints")
    model = build_model(run, prepared, ranks, draw=checkpoint is None)
    optimizer: Optimizer = (
        OwnOptimizer(model, run.train, goes_on=checkpoint is not None)
        if run.train.optimizer
        else AdamW(model, run.train, bf16_copies=layout.bf16_weights, num_micro=layout.num_micro)
    )
    join_weights(model)
    tensors = optimizer.state() | persistent_buffers(model)
    position = Progress(step=0, tokens=0, data_state=None)
    while checkpoint is not None and not load(checkpoint, tensors, checkpointer):
        checkpoint = find_checkpoint(run, folder, ranks, checkpointer)
    if checkpoint is not None:
        manifest = checkpoint.manifest
        position = Progress(manifest.step, manifest.tokens, manifest.data_state, sequences=manifest.sequences_read)
        prepared.sequences.restore(position.step, position.data_state)
        optimizer.resumed(position.step)
    balance = Balance.of(model, run, ranks)
    clock.mark("optimizer and checkpoint")
    return TrainState(
        **vars(attempt),
        checkpointer=checkpointer,
        reporter=reporter,
        stepper=make_stepper(run, prepared, model, ranks),
        balance=balance,
        optimizer=optimizer,
        tensors=tensors,
        checkpoint=checkpoint,
        position=position,
    )


def make_stepper(run: Run, prepared: Prepared, model: nn.Module, ranks: Ranks) -> Stepper:
    layout = prepared.layout
    if run.train.objective != "dpo":
        return Stepper(model, layout, ranks)
    reference: nn.Module | None = None
    if run.model.lora is None:
        reference = build_model(run, prepared, ranks, draw=True).requires_grad_(False).eval()
        if layout.bf16_weights:
            compute_in_bf16(reference)
    return PreferenceStepper(model, layout, ranks, beta=run.train.dpo_beta, reference=reference)


def build_model(run: Run, prepared: Prepared, ranks: Ranks, *, draw: bool) -> nn.Module:
    """The model, spread over the ranks; with its first weights unless a checkpoint will bring them."""
    model = build(prepared.config, run, prepared.adapter, prepared.added, quantize=True)
    clock.mark("structure")
    layout = prepared.layout
    use_attention(model, layout)
    log.info("attention: %s", attention_name(model))
    if layout.flash4_obstacle.startswith(PACKAGE) and ranks.is_first:  # a GPU on which it would pay
        log.warning("attention is torch's own: %s", layout.flash4_obstacle)
    if run.train.objective == "dpo":
        return_log_probabilities(model)
    else:
        own_loss = own_code.load(run.train.loss, "train.loss") if run.train.loss else None
        return_loss(model, fused=layout.fused_head, own=own_loss)
    parallelize(model, run, layout, ranks)
    materialize(model, torch.device("cpu") if layout.cpu_offload else ranks.device)
    restore_buffers(model, prepared.reference, ranks.device)
    clock.mark("spreading")
    if prepared.weights and (draw or run.model.lora):  # a checkpoint of adapters does not hold the frozen weights
        load_pretrained(model, prepared.weights, ranks, new_rows=draw)
        if draw and prepared.adapter:
            load_adapter(model, prepared.adapter)
        elif draw:
            draw_adapters(model, seed=run.train.seed)
    elif draw:
        draw_weights(model, prepared.reference, seed=run.train.seed, device=ranks.device)
    clock.mark("weights")
    return model


def find_checkpoint(run: Run, folder: RunFolder, ranks: Ranks, checkpointer: Checkpointer) -> Offer | None:
    checkpoint = newest_whole(checkpointer)
    if checkpoint is None:
        on_first_rank(ranks, lambda: refuse_to_start_over(folder))
        if run.checkpoint.branch_from is None:
            return None
        on_first_rank(ranks, lambda: take_over(run.checkpoint.branch_from or "", folder, order=checkpointer.order))
        checkpoint = newest_whole(checkpointer)
        assert checkpoint is not None
    if not run.checkpoint.resume:
        raise UserError(
            f"checkpoint.resume is false, but {folder.path} holds checkpoints",
            evidence=f"the newest is step-{checkpoint.step:08d}",
            fix="checkpoint.resume=true, or --fresh to set the old run aside",
        )
    where = f"the checkpoint {checkpoint.where}"
    check_same_run(checkpoint.manifest, model=checkpointer.model, order=checkpointer.order, where=where)
    check_same_frozen(checkpoint.manifest.model, checkpointer.model, where=where)
    return checkpoint
