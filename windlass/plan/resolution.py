"""Fill in what the run file left open, from the model alone: the result is the same on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.catalog.adapters import resolve_lora
from windlass.catalog.gpus import Gpu
from windlass.catalog.models import default_tokenizer, known_config
from windlass.spec import Run

if TYPE_CHECKING:
    from windlass.plan.shape import ModelShape

DEFAULT_SEQUENCE_LENGTH = 2048
MOST_UNSEEN = 8  # sequences of a micro-batch on hardware that is not known
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


def effective_sharding(run: Run, world_size: int) -> str:
    if run.parallel.sharding != "auto":
        return run.parallel.sharding
    if world_size == 1 and not run.parallel.cpu_offload:
        return "none"
    return "ddp" if run.model.lora and run.model.lora.quantize else "full"


def shard_group(run: Run, world_size: int, local_world_size: int | None = None) -> int:
    """Ranks per group of `hybrid`: as asked, else those of a node, as many as there are or as nodes are asked for."""
    return run.parallel.shard_group or local_world_size or max(1, world_size // run.resources.nodes)


def batch_shape(run: Run, world_size: int, gpu: Gpu | None = None, shape: ModelShape | None = None) -> tuple[int, int]:
    """(micro-batch, micro-batches per step) of every rank. The last rows may be padding that counts for nothing.

    `shape` is that of a model which is not known without asking a hub.
    """
    rows = -(-run.train.global_batch // world_size)
    micro = run.train.micro_batch
    if micro is None and gpu is not None:
        from windlass.plan.fitting import choose_micro_batch  # which needs the rest of this module

        micro = choose_micro_batch(run, world_size, gpu, shape)
    micro = min(micro or MOST_UNSEEN, rows)
    return micro, -(-rows // micro)
