"""The training loop, top to bottom."""

from __future__ import annotations

import hashlib
import logging
import math
import time

import torch
from torch import nn

from windlass.checkpoint import Checkpoint
from windlass.errors import ExitCode, UserError
from windlass.plan.resolution import effective_sharding
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.batches import Batches, StepBatch
from windlass.trainer.faults import Faults
from windlass.trainer.flops import flops_per_token, peak_flops
from windlass.trainer.model import meta_model
from windlass.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    prepare_moments,
    set_learning_rate,
    training_state,
)
from windlass.trainer.parallelize import parallelize
from windlass.trainer.preemption import Preemption
from windlass.trainer.preparation import Prepared
from windlass.trainer.ranks import Ranks
from windlass.trainer.reporting import Reporter, StepMetrics, memory_gib
from windlass.trainer.resuming import check_same_run, load_state, newest_whole
from windlass.trainer.saving import Checkpointer, Progress
from windlass.trainer.schedule import learning_rate
from windlass.trainer.step import Stepper
from windlass.trainer.validation import Validator
from windlass.trainer.weights import draw_weights, load_pretrained, materialize, restore_buffers

log = logging.getLogger(__name__)


def train(
    run: Run, prepared: Prepared, folder: RunFolder, ranks: Ranks, faults: Faults, preemption: Preemption
) -> ExitCode:
    """Train a resolved run to its last step, or until all ranks agree to stop."""
    sequences = prepared.sequences
    checkpointer = Checkpointer(
        run.checkpoint, folder, ranks, faults, model=prepared.model_identity(), order=prepared.order
    )
    reporter = Reporter(run, folder, ranks)
    found = find_checkpoint(run, folder, ranks, checkpointer)
    model = build_model(run, prepared, ranks, draw=found is None)
    optimizer = build_optimizer(model, run.train)
    prepare_moments(optimizer, found.step if found else 0)
    state = training_state(model, optimizer)
    position = Progress(step=0, tokens=0, data_state=None)
    if found is not None:
        load_state(found, state, ranks)
        manifest = found.manifest()
        position = Progress(manifest.step, manifest.tokens, manifest.data_state)
        sequences.restore(position.step, position.data_state)
        checkpointer.saved_step = position.step
    announce(run, prepared, folder, ranks, reporter, position)

    stepper = Stepper(model, run, ranks)
    validator = Validator(prepared.validation, run, ranks, faults, preemption) if prepared.validation else None
    flops = flops_per_token(prepared.reference, prepared.config, run.data.sequence_length or 0)
    peak = peak_flops(ranks.device)
    stopping = False
    loss = math.nan
    clock = time.perf_counter()
    for batch in Batches.for_training(sequences, run, ranks).from_step(position.step, run.train.steps):
        step = position.step + 1
        faults.reach("step.begin", step)
        total_labels, told = ranks.sum([batch.num_labels, preemption.told])
        if told:
            stopping = True
            break
        rate = learning_rate(position.step, run.train)
        set_learning_rate(optimizer, rate)
        seed_dropout(run.train.seed, step, ranks)
        losses = stepper.backward(batch, max(total_labels, 1.0), poisoned=faults.reach("step.loss", step))
        grad_norm = float(clip_gradients(model, run.train.grad_clip))
        loss = ranks.sum([float(torch.stack(losses).sum())])[0] / max(total_labels, 1.0)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            optimizer.zero_grad()
            checkpointer.save(position, state, wait=True)
            raise not_finite(step, loss, grad_norm, losses, batch, ranks)
        optimizer.step()
        optimizer.zero_grad()
        position = Progress(step, position.tokens + int(total_labels), batch.state)

        stall_s = 0.0
        if checkpointer.due(step) and step < run.train.steps:
            stall_s = checkpointer.save(position, state, wait=False)
        now = time.perf_counter()
        step_s, clock = now - clock, now
        speed = total_labels / step_s
        reporter.step(
            StepMetrics(
                step=step,
                steps=run.train.steps,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=rate,
                tokens=position.tokens,
                tokens_per_s=round(speed, 1),
                tokens_per_s_per_gpu=round(speed / ranks.world_size, 1),
                mfu=round(speed * flops / (peak * ranks.world_size), 4) if peak else None,
                step_s=round(step_s, 6),
                data_s=round(batch.wait_s, 6),
                checkpoint_s=round(stall_s, 6),
                memory_gib=memory_gib(ranks.device),
                epoch=round(batch.epoch, 4),
                attempt=reporter.attempt,
                time=round(time.time(), 3),
            )
        )
        faults.reach("step.end", step)
        if validator and validator.due(step) and step < run.train.steps:
            stopping = not validator.validate(stepper, reporter, step)
            clock = time.perf_counter()
            if stopping:
                break

    checkpointer.save(position, state, wait=True)
    if not stopping and validator:
        stopping = not validator.validate(stepper, reporter, position.step)
    reporter.close()
    if ranks.is_first:
        if stopping:
            folder.record("preempted", step=position.step)
            log.warning("stopped on request after step %d; its checkpoint is complete", position.step)
        else:
            folder.record("finished", step=position.step, loss=loss if math.isfinite(loss) else None)
            log.info("finished after step %d", position.step)
    return ExitCode.PREEMPTED if stopping else ExitCode.OK


def build_model(run: Run, prepared: Prepared, ranks: Ranks, *, draw: bool) -> nn.Module:
    """The model, spread over the ranks; with its first weights unless a checkpoint will bring them."""
    model = meta_model(prepared.config, run)
    parallelize(model, run, ranks)
    materialize(model, torch.device("cpu") if run.parallel.cpu_offload else ranks.device)
    restore_buffers(model, prepared.reference, ranks.device)
    if draw and run.model.init == "pretrained":
        load_pretrained(model, run.model, ranks)
    elif draw:
        draw_weights(model, prepared.reference, seed=run.train.seed, device=ranks.device)
    return model


def find_checkpoint(run: Run, folder: RunFolder, ranks: Ranks, checkpointer: Checkpointer) -> Checkpoint | None:
    found = newest_whole(folder, ranks)
    if found is None:
        return None
    if not run.checkpoint.resume:
        raise UserError(
            f"checkpoint.resume is false, but {folder.path} holds checkpoints",
            evidence=f"the newest is {found.name}",
            fix="checkpoint.resume=true, or --fresh to set the old run aside",
        )
    where = f"the checkpoint {found.path}"
    check_same_run(found.manifest(), model=checkpointer.model, order=checkpointer.order, where=where)
    return found


def announce(
    run: Run, prepared: Prepared, folder: RunFolder, ranks: Ranks, reporter: Reporter, position: Progress
) -> None:
    if not ranks.is_first:
        return
    start = {"attempt": reporter.attempt, "world_size": ranks.world_size, "step": position.step}
    if position.step:
        folder.record("resumed", **start, checkpoint=f"step-{position.step:08d}")
    else:
        folder.record("started", **start)
    log.info(
        "%s: %s parameters · %s · %d ranks on %s, %s sharding · %s",
        run.model.preset or run.model.path,
        f"{prepared.facts.num_parameters:,}",
        prepared.sequences.description,
        ranks.world_size,
        ranks.device.type,
        effective_sharding(run, ranks.world_size),
        f"resumed after step {position.step}" if position.step else "from step 0",
    )


def seed_dropout(seed: int, step: int, ranks: Ranks) -> None:
    """Random draws inside a step depend on the step and the rank alone, so there is no generator state to save."""
    key = hashlib.blake2b(f"{seed}:{step}:{ranks.rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(key, "little") >> 1)


def not_finite(
    step: int, loss: float, grad_norm: float, losses: list[torch.Tensor], batch: StepBatch, ranks: Ranks
) -> UserError:
    """Name the step, the rank and the sequences whose loss is not finite."""
    mine = [
        f"rank {ranks.rank}, micro-batch {index}: {', '.join(micro_batch.ids)}"
        for index, (value, micro_batch) in enumerate(zip(losses, batch.micro_batches, strict=True))
        if not math.isfinite(float(value))
    ]
    culprits = [line for part in ranks.gather(mine) for line in part]
    return UserError(
        f"step {step} was stopped before its optimizer step: loss {loss}, gradient norm {grad_norm}",
        evidence="\n".join(culprits) or "every rank's loss is finite; the gradient overflowed in the backward pass",
        cause="a bad sequence, or a learning rate that is too high",
        fix="windlass data inspect names the text of a sequence; or lower train.learning_rate",
        exit_code=ExitCode.FAILED,
    )
