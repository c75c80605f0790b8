"""Fill in what the run file left open, from the model alone: the result is the same on every machine.

And the learning rate of every step, which follows from it.
"""

from __future__ import annotations

import math

from windlass.catalog.adapters import resolve_lora
from windlass.catalog.models import default_tokenizer, known_config
from windlass.spec import Run
from windlass.spec.training import TrainSection

DEFAULT_SEQUENCE_LENGTH = 2048
C4 = "hf:allenai/c4"


def resolve(run: Run) -> Run:
    """The run with every default that depends on the model made explicit. Resolving twice changes nothing."""
    config = known_config(run.model) or {}
    longest = config.get("max_position_embeddings") or DEFAULT_SEQUENCE_LENGTH
    data, train = run.data, run.train
    data = data.model_copy(
        update={
            "sequence_length": data.sequence_length or min(DEFAULT_SEQUENCE_LENGTH, int(longest)),
            "tokenizer": data.tokenizer or default_tokenizer(run.model),
            "config": data.config or ("en" if data.source == C4 else None),
            "document_mask": data.format != "text" if data.document_mask is None else data.document_mask,
        }
    )
    train = train.model_copy(
        update={
            "warmup_steps": train.steps // 50 if train.warmup_steps is None else train.warmup_steps,
            "min_learning_rate": (
                train.learning_rate / 10 if train.min_learning_rate is None else train.min_learning_rate
            ),
        }
    )
    model = run.model.model_copy(update={"lora": resolve_lora(run.model.lora)}) if run.model.lora else run.model
    return run.model_copy(update={"model": model, "data": data, "train": train})


def learning_rate(step: int, train: TrainSection) -> float:
    """The rate of the optimizer step that follows `step` finished ones, of a resolved run.

    A pure function of the step: there is nothing to save and nothing to restore.
    """
    peak, last = train.learning_rate, train.steps
    floor = peak / 10 if train.min_learning_rate is None else train.min_learning_rate
    warmup = train.warmup_steps or 0
    if step < warmup:
        return peak * (step + 1) / warmup
    if train.schedule == "constant":
        return peak
    begin = warmup
    if train.schedule == "wsd":
        begin = max(warmup, last - math.ceil(last * train.decay_fraction))
    if step < begin:
        return peak
    progress = min(1.0, (step - begin + 1) / max(1, last - begin))
    if train.schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2
    return floor + (peak - floor) * (1 - progress)
