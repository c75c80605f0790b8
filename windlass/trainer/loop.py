"""The training loop, top to bottom."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import time

import torch
from torch import nn

from windlass.errors import ExitCode, UserError
from windlass.plan.resolution import effective_sharding
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.batches import Batches
from windlass.trainer.callbacks.early_stopping import Judge
from windlass.trainer.callbacks.preemption import Preemption
from windlass.trainer.callbacks.validation import Validator
from windlass.trainer.checkpointing.resuming import (
    check_same_run,
    model_settings,
    newest_whole,
    refuse_to_start_over,
    take_over,
)
from windlass.trainer.checkpointing.saving import Checkpointer, Progress
from windlass.trainer.checkpointing.tiers import Offer
from windlass.trainer.distributed.agreement import on_first_rank
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.attention import naming_attention, use_attention
from windlass.trainer.fast.head import return_loss, use_fused_head
from windlass.trainer.fast.lean import join_weights
from windlass.trainer.metrics import (
    Ledger,
    NotFiniteError,
    OpenStep,
    Reporter,
    flops_per_token,
    peak_flops,
    sum_over_ranks,
)
from windlass.trainer.model.adapters import load_adapter
from windlass.trainer.model.lora import draw_adapters
from windlass.trainer.model.parallelize import parallelize, use_bf16_copies
from windlass.trainer.model.pretrained import check_same_frozen, load_pretrained
from windlass.trainer.model.structure import ModelFacts, attention_name, persistent_buffers
from windlass.trainer.model.weights import draw_weights, materialize, restore_buffers
from windlass.trainer.optimizer import AdamW
from windlass.trainer.preparation import Prepared, build
from windlass.trainer.schedule import learning_rate
from windlass.trainer.startup import clock
from windlass.trainer.step import Stepper

log = logging.getLogger(__name__)


def train(
    run: Run, prepared: Prepared, folder: RunFolder, ranks: Ranks, faults: Faults, preemption: Preemption
) -> ExitCode:
    """Train a resolved run to its last step, or until all ranks agree to stop."""
    sequences = prepared.sequences
    identity = prepared.model_identity() | model_settings(prepared.config, prepared.reference)
    checkpointer = Checkpointer(run, folder, ranks, faults, model=identity, order=prepared.order)
    reporter = Reporter(run, folder, ranks)
    found = find_checkpoint(run, folder, ranks, checkpointer)
    if ranks.is_first:
        folder.create(run)  # not before it is known that this run may go on from what is there
        checkpointer.clear_unfinished()
    clock.mark("checkpoints")
    model = build_model(run, prepared, ranks, draw=found is None)
    updates = AdamW(
        model,
        run.train,
        bf16_copies=use_bf16_copies(run, ranks),
        num_micro=prepared.batch_shape[1],
    )
    join_weights(model)
    state = updates.state() | persistent_buffers(model)
    position, validated = Progress(step=0, tokens=0, data_state=None), None
    if found is not None:
        found.load(state)
        manifest = found.manifest
        position = Progress(manifest.step, manifest.tokens, manifest.data_state, sequences=manifest.sequences_read)
        validated = manifest.validation
        sequences.restore(position.step, position.data_state)
        updates.resumed(position.step)
    judge = Judge(run, folder, ranks, step=position.step, earlier=validated)
    checkpointer.describe_validations = judge.as_dict
    judge.protect(checkpointer)  # before the first upload: its retention must know the best
    checkpointer.begin(found, state)
    clock.mark("optimizer and checkpoint")
    announce(run, prepared, folder, ranks, reporter, position, tier=found.tier if found else None)

    stepper = Stepper(model, run, ranks)
    validator = None
    if prepared.validation:
        micro = prepared.batch_shape[0]
        validator = Validator(prepared.validation, run, ranks, faults, preemption, micro=micro)
    ledger = Ledger(
        reporter,
        ranks,
        steps=run.train.steps,
        flops_per_token=flops_per_token(prepared.reference, prepared.config, run.data.sequence_length or 0),
        peak=peak_flops(ranks.gpu),
    )
    stopping = False
    unheard = judge.last_step < position.step < run.train.steps and not judge.enough
    if validator and unheard and validator.due(position.step):
        stopping = not validator.validate(stepper, reporter, position.step)  # the attempt before may have died in it
        if not stopping:
            judge.hear(position.step, validator.loss)
            judge.protect(checkpointer)
    first_step = position.step + 1
    end = position.step if stopping or judge.enough else run.train.steps
    ledger.restart_clock()
    try:
        batches = Batches.for_training(sequences, run, ranks, prepared.batch_shape, position)
        for batch in batches.from_step(position.step, end):
            before, step = position, position.step + 1
            faults.reach("step.begin", step)
            total_labels, told = ranks.sum([batch.num_labels, preemption.told])
            if told:
                stopping = True
                break
            total_labels = max(total_labels, 1.0)
            rate = learning_rate(before.step, run.train)
            seed_dropout(run.train.seed, step, ranks)
            with naming_attention(folder, ranks, wanted=step == first_step):
                losses = stepper.backward(batch, total_labels, poisoned=faults.reach("step.loss", step))
            loss = sum_over_ranks(losses, ranks)
            grad_norm = updates.apply(rate, loss)
            position = Progress(
                step,
                before.tokens + int(total_labels),
                batch.state,
                sequences=before.sequences + run.train.global_batch,
            )
            ledger.add(OpenStep(before, position, batch, losses, loss, grad_norm, total_labels, rate))

            saving = checkpointer.due(step) and step < run.train.steps
            validating = validator is not None and validator.due(step) and step < run.train.steps
            if saving or validating or ledger.due(step, run.train.log_every):
                ledger.settle()  # before a save: no step is saved that is not finite, or not in the metrics
            if step == first_step and ranks.is_first:
                clock.mark("first step, compiled")
                log.info(clock.describe())
            if saving:
                judge.protect(checkpointer)
                ledger.add_stall(checkpointer.save(position, state, wait=False))
            collect_garbage(step, now=saving or validating)
            faults.reach("step.end", step)
            if validating and validator:
                stopping = not validator.validate(stepper, reporter, step)
                if not stopping and judge.hear(step, validator.loss) and run.checkpoint.keep_best:
                    judge.protect(checkpointer)
                    checkpointer.save(position, state, wait=False, shared=True)
                ledger.restart_clock()
                if stopping or judge.enough:
                    break
        ledger.settle()
    except NotFiniteError as error:
        checkpointer.save(error.good, state, wait=True)
        raise

    if stopping or run.checkpoint.at_end:
        checkpointer.finish(must_succeed=False)
        judge.protect(checkpointer)
        checkpointer.save(position, state, wait=True)
    checkpointer.finish()
    if not stopping and validator and not judge.enough:
        stopping = not validator.validate(stepper, reporter, position.step)
        if stopping:
            checkpointer.save(position, state, wait=True)
    only_local = checkpointer.close(position.step, told_at=(preemption.since or time.monotonic()) if stopping else None)
    reporter.close()
    if ranks.is_first:
        if stopping:
            folder.record("preempted", step=position.step, **({"only_local": only_local} if only_local else {}))
            log.warning("stopped on request after step %d; its checkpoint is complete", position.step)
        else:
            early = {"early": judge.reason} if judge.enough else {}
            loss_now = None if math.isnan(ledger.last_loss) else ledger.last_loss
            folder.record("finished", step=position.step, loss=loss_now, **early)
            log.info("finished after step %d%s", position.step, f": {judge.reason}" if judge.enough else "")
    return ExitCode.PREEMPTED if stopping else ExitCode.OK


def build_model(run: Run, prepared: Prepared, ranks: Ranks, *, draw: bool) -> nn.Module:
    """The model, spread over the ranks; with its first weights unless a checkpoint will bring them."""
    model = build(prepared.config, run, prepared.adapter, prepared.added, quantize=True)
    clock.mark("structure")
    use_attention(model, run, ranks)
    clock.mark("attention tried")
    log.info("attention: %s", attention_name(model))
    return_loss(model, fused=use_fused_head(prepared.config, run, ranks))
    parallelize(model, run, ranks)
    materialize(model, torch.device("cpu") if run.parallel.cpu_offload else ranks.device)
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
    found = newest_whole(checkpointer)
    if found is None:
        on_first_rank(ranks, lambda: refuse_to_start_over(folder))
        if run.checkpoint.branch_from is None:
            return None
        on_first_rank(ranks, lambda: take_over(run.checkpoint.branch_from or "", folder, order=checkpointer.order))
        found = newest_whole(checkpointer)
        assert found is not None
    if not run.checkpoint.resume:
        raise UserError(
            f"checkpoint.resume is false, but {folder.path} holds checkpoints",
            evidence=f"the newest is step-{found.step:08d}",
            fix="checkpoint.resume=true, or --fresh to set the old run aside",
        )
    where = f"the checkpoint {found.where}"
    check_same_run(found.manifest, model=checkpointer.model, order=checkpointer.order, where=where)
    check_same_frozen(found.manifest.model, checkpointer.model, where=where)
    return found


def announce(
    run: Run,
    prepared: Prepared,
    folder: RunFolder,
    ranks: Ranks,
    reporter: Reporter,
    position: Progress,
    *,
    tier: str | None,
) -> None:
    if not ranks.is_first:
        return
    start = {"attempt": reporter.attempt, "world_size": ranks.world_size, "step": position.step}
    if position.step:
        folder.record("resumed", **start, checkpoint=f"step-{position.step:08d}", tier=tier)
    else:
        folder.record("started", **start)
    log.info(
        "%s: %s · %s · %d ranks on %s, %s sharding · %s",
        run.model.preset or run.model.path,
        parameters(prepared.facts),
        prepared.sequences.description,
        ranks.world_size,
        ranks.device.type,
        effective_sharding(run, ranks.world_size),
        f"resumed after step {position.step} ({tier})" if position.step else "from step 0",
    )


def parameters(facts: ModelFacts) -> str:
    if facts.num_trained == facts.num_parameters:
        return f"{facts.num_parameters:,} parameters"
    share = facts.num_trained / facts.num_parameters
    return f"{facts.num_parameters:,} parameters, {facts.num_trained:,} of them trained ({share:.2%})"


def seed_dropout(seed: int, step: int, ranks: Ranks) -> None:
    """Random draws inside a step depend on the step and the rank alone, so there is no generator state to save."""
    key = hashlib.blake2b(f"{seed}:{step}:{ranks.rank}".encode(), digest_size=8).digest()
    seed_here = torch.default_generator.manual_seed if ranks.device.type == "cpu" else torch.manual_seed
    seed_here(int.from_bytes(key, "little") >> 1)  # torch's own walks the stack for GPUs that are not there


def collect_garbage(step: int, *, now: bool) -> None:
    """Python's collector pauses a rank when it likes, and all others wait for it: run it at chosen moments alone."""
    if step == 2:
        gc.collect()
        gc.freeze()
        gc.disable()
    elif now:
        gc.collect(1)
