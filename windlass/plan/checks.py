"""What cannot work, said before it costs anything: the model, the sequence and the ranks against each other."""

from __future__ import annotations

from typing import Any

from windlass.catalog.models import known_config
from windlass.errors import UserError
from windlass.plan.resolution import effective_sharding
from windlass.spec import Run


def check(run: Run, world_size: int) -> None:
    """Raise UserError for a resolved run that cannot train on `world_size` ranks."""
    config = known_config(run.model)
    if config is not None:
        check_model(config, run)
    check_ranks(run, world_size)


def check_model(config: dict[str, Any], run: Run) -> None:
    """A transformers configuration against itself and the run; the trainer calls it again for models from a hub."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if hidden and heads and not config.get("head_dim") and hidden % heads:
        raise UserError(
            f"the model cannot be built: hidden_size {hidden} is not divisible by num_attention_heads {heads}",
            fix=f"model.config.num_attention_heads={_nearest_divisor(hidden, heads)}",
        )
    if heads and kv_heads and heads % kv_heads:
        raise UserError(
            f"the model cannot be built: num_attention_heads {heads} is not divisible by "
            f"num_key_value_heads {kv_heads}",
            fix=f"model.config.num_key_value_heads={_nearest_divisor(heads, kv_heads)}",
        )
    longest, asked = config.get("max_position_embeddings"), run.data.sequence_length
    if longest and asked and asked > longest:
        raise UserError(
            f"sequences of {asked} tokens are longer than the model's maximum of {longest}",
            evidence=f"max_position_embeddings is {longest}",
            fix=f"data.sequence_length={longest}",
        )
    if run.model.init == "pretrained" and run.model.config:
        raise UserError(
            "model.config changes a model whose weights are to be loaded",
            evidence=f"model.init is pretrained and model.config sets {', '.join(run.model.config)}",
            fix="model.init=random, or drop model.config",
        )
    if run.model.init == "pretrained" and run.model.preset and run.model.preset.endswith("-tiny"):
        raise UserError(
            f"the preset {run.model.preset} has no published weights", fix="model.init=random, or model.path=FOLDER"
        )


def check_ranks(run: Run, world_size: int) -> None:
    parallel = run.parallel
    sharding = effective_sharding(run, world_size)
    if sharding == "none" and world_size > 1:
        raise UserError(
            f"parallel.sharding is none but the run has {world_size} ranks",
            cause="without sharding or copies every rank would train a model of its own",
            fix="parallel.sharding=full   (or ddp)",
        )
    if parallel.cpu_offload and sharding not in ("full", "hybrid"):
        raise UserError(
            f"parallel.cpu_offload needs FSDP2, but parallel.sharding is {sharding}", fix="parallel.sharding=full"
        )
    if sharding == "hybrid":
        group = parallel.shard_group or world_size // run.resources.nodes
        if world_size % group:
            raise UserError(
                f"{world_size} ranks cannot be divided into groups of {group}",
                fix=f"parallel.shard_group={_nearest_divisor(world_size, group)}",
            )
    if run.train.global_batch < world_size:
        raise UserError(
            f"a global batch of {run.train.global_batch} sequences leaves some of {world_size} ranks without any",
            fix=f"train.global_batch={world_size}",
        )


def _nearest_divisor(number: int, near: int) -> int:
    divisors = [one for one in range(1, number + 1) if number % one == 0]
    return min(divisors, key=lambda one: abs(one - near))
