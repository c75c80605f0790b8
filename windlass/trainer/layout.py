"""The layout of a run as the trainer resolves it: with facts of the built model and of this rank's device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from windlass.errors import UserError
from windlass.plan.fitting import batch_shape
from windlass.plan.layout import LEAN, Facts, Layout, effective_sharding, flash4_unsuited
from windlass.spec import Run
from windlass.trainer.distributed.ranks import Ranks, local_world_size
from windlass.trainer.fast.attention import obstacle_to_flash4
from windlass.trainer.fast.lean_lora import obstacle_to_lean_lora
from windlass.trainer.model.lora import lora_layers
from windlass.trainer.model.structure import blocks, facts, shape_of
from windlass.trainer.startup import clock


def resolve_layout(run: Run, model: nn.Module, config: Any, ranks: Ranks) -> Layout:
    """Every rank calls this together: the smallest GPU decides the micro-batch.

    Ranks with other numbers of micro-batches would begin other numbers of collectives, and wait for each other.
    """
    known = model_facts(run, model, config, cuda=ranks.device.type == "cuda")
    shape = shape_of(model, config)
    micro = min(ranks.gather(batch_shape(run, ranks.world_size, ranks.gpu, shape, known)))[0]
    clock.mark("data and model files")
    if run.model.attention in ("auto", "flash4") and not flash4_unsuited(run, known):
        text = config.get_text_config()
        by_name, packed = run.model.attention == "flash4", bool(run.data.document_mask)
        known = replace(known, flash4_obstacle=obstacle_to_flash4(text, ranks, asked_by_name=by_name, documents=packed))
    clock.mark("attention tried")
    return Layout.resolve(run, ranks.world_size, micro, known, local_world_size=agreed_local_size(run, ranks))


def model_facts(run: Run, model: nn.Module, config: Any, *, cuda: bool) -> Facts:
    """Of a model with its adapters."""
    layers, lora, obstacle = lora_layers(model), run.model.lora, ""
    known = Facts.of(config.get_text_config().to_dict(), cuda=cuda)
    if lora and known.family in LEAN:
        obstacle = next(filter(None, map(obstacle_to_lean_lora, blocks(model).values())), "")
    return replace(
        known,
        biases=any(parameter.ndim == 1 and name.endswith("bias") for name, parameter in model.named_parameters()),
        trained=facts(model).num_trained if lora else None,
        four_bits=sum(layer.weight.numel() for layer in layers.values()) if lora and lora.quantize else 0,
        lean_lora_obstacle=obstacle,
    )


def agreed_local_size(run: Run, ranks: Ranks) -> int | None:
    """Ranks of one node: of the nodes that are there and not of those asked for. None where no launcher says."""
    if effective_sharding(run, ranks.world_size) != "hybrid":
        return None
    sizes = [size for size in ranks.gather(local_world_size()) if size]
    if not run.parallel.shard_group and len(set(sizes)) > 1:
        raise UserError(
            "parallel.sharding=hybrid makes groups of a node's ranks, and nodes have different numbers of them",
            evidence=f"{min(sizes)} to {max(sizes)} ranks on a node",
            fix=f"parallel.shard_group={math.gcd(*sizes)}, or parallel.sharding=full",
        )
    return sizes[0] if sizes else None
