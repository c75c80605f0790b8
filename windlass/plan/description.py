"""What a run will do, as rows for a person."""

from __future__ import annotations

from windlass.catalog.gpus import Gpu
from windlass.catalog.models import known_config
from windlass.plan.fitting import batch_shape
from windlass.plan.layout import effective_sharding, rows_per_rank
from windlass.plan.shape import checkpoint_bytes, num_parameters
from windlass.spec import Run
from windlass.spec.data import CHARACTERS_HELD


def describe(run: Run, world_size: int, gpu: Gpu | None = None) -> list[tuple[str, str]]:
    """(label, text) rows that say what a resolved run will do."""
    config = known_config(run.model)
    count = num_parameters(config)
    length, train = run.data.sequence_length or 0, run.train
    micro, num_micro = batch_shape(run, world_size, gpu)
    tokens = train.global_batch * length
    size = checkpoint_bytes(run)
    weights = "random weights" if run.model.init == "random" else "pretrained weights"
    if run.model.lora:
        weights += f", frozen; LoRA of rank {run.model.lora.rank} beside them"
        weights += ", in 4 bits" if run.model.lora.quantize else ""
    rows = [
        ("model", f"{run.model.label}, {_count(count)} parameters, {weights}"),
        ("data", f"{_sources(run)}, sequences of {length:,} tokens, tokenizer {run.data.tokenizer}"),
        *_shuffled(run, world_size),
        ("ranks", _ranks(run, world_size)),
        ("batch", f"{_sequences(train.global_batch)} = {tokens:,} tokens a step; {num_micro} × {micro} per rank"),
        ("steps", f"{train.steps:,} ({train.steps * tokens:,} tokens), {train.precision}, {train.schedule} schedule"),
        (
            "checkpoints",
            f"every {run.checkpoint.every} steps, newest {run.checkpoint.keep} kept"
            + (f", {size / 2**30:.2f} GiB each" if size else ""),
        ),
    ]
    if run.data.validation_source or run.data.holdout:
        every = f"every {train.validate_every} steps and at the end" if train.validate_every else "at the end"
        rows.append(("validation", f"{_sequences(train.validation_sequences)} {every}"))
    return rows


def _sequences(number: int) -> str:
    return "1 sequence" if number == 1 else f"{number:,} sequences"


def _ranks(run: Run, world_size: int) -> str:
    nodes = run.resources.nodes
    where = f" on {nodes} nodes" if nodes > 1 else ""
    sharding = effective_sharding(run, world_size)
    alone = {"none": "the whole model on it", "ddp": "a copy of the model on each (DDP)"}
    groups = [(name, getattr(run.parallel, name)) for name in ("tensor", "context", "expert")]
    split = "".join(f", {name} {size}" for name, size in groups if size > 1)
    return f"{world_size}{where}, {alone.get(sharding, f'{sharding} sharding')}{split}"


def _sources(run: Run) -> str:
    total = sum(source.weight for source in run.data.sources)
    shares = (f"{source.weight / total:.4g} of {source.source}" for source in run.data.sources)
    return " + ".join(shares) or run.data.source


def _shuffled(run: Run, world_size: int) -> list[tuple[str, str]]:
    """What shuffling the documents of a stream costs."""
    data = run.data
    sources = [source.source for source in data.sources] or [data.source]
    if not data.shuffle or data.shuffle_window == 1 or not any(name.startswith("hf:") for name in sources):
        return []
    held = rows_per_rank(run, world_size) * data.shuffle_window
    size = f"at most {CHARACTERS_HELD / 2**20:,.0f} MiB of text"
    return [("", f"documents shuffled over {data.shuffle_window:,}: up to {held:,} held by a rank, {size}")]


def _count(count: int | None) -> str:
    if count is None:
        return "an unknown number of"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
