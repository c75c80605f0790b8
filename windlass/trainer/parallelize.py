"""Spread a model over ranks, in the one order that works: fp8 → lean blocks → recompute and compile → shard.

A block that is computed again whole is compiled first: inside what is compiled, functions with backward passes of their
own (lean blocks) would keep all they save. What is computed again in part is chosen by the compiler, from inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from windlass.errors import UserError
from windlass.plan.resolution import effective_sharding
from windlass.spec import Run
from windlass.trainer.fp8 import use_fp8
from windlass.trainer.kernels import cublas, flash4  # noqa: F401  they register operators
from windlass.trainer.lean import use_lean_blocks
from windlass.trainer.model import blocks
from windlass.trainer.ranks import Ranks


def parallelize(model: nn.Module, run: Run, ranks: Ranks) -> None:
    """Apply recomputation, compilation and sharding in place; parameter names do not change."""
    if run.train.fp8:
        use_fp8(model, run, ranks)
    use_lean_blocks(model, run, ranks, bf16_copies=use_bf16_copies(run, ranks))
    for block in blocks(model).values():
        if run.parallel.activation_checkpointing == "selective":
            recompute(block, selective=True)
        if should_compile(run, ranks):
            block.forward = torch.compile(block.forward, fullgraph=True)
        if run.parallel.activation_checkpointing == "full":
            recompute(block, selective=False)
    if should_compile(run, ranks):
        for module in after_blocks(model):
            module.forward = torch.compile(module.forward, fullgraph=True)
    if effective_sharding(run, ranks.world_size) in ("full", "hybrid"):
        shard(model, run, ranks)


def after_blocks(model: nn.Module) -> list[nn.Module]:
    """The last norm: outside the blocks, and in plain torch a dozen passes over all tokens."""
    backbone: nn.Module = model.get_decoder()  # type: ignore[operator]
    others = [one for one in backbone.children() if not isinstance(one, nn.ModuleList | nn.Embedding)]
    return [one for one in others if any(parameter.ndim == 1 for parameter in one.parameters())]


def use_bf16_copies(run: Run, ranks: Ranks) -> bool:
    """Compute in bf16 weights whose fp32 masters only the optimizer sees: whole, or this rank's slices of them.

    Of slices only where asked: FSDP2 casts a slice when it gathers it, which costs less the more ranks there are, and
    the copy would cost memory.
    """
    sharding = effective_sharding(run, ranks.world_size)
    possible = run.train.precision == "bf16" and sharding != "ddp" and not run.parallel.cpu_offload
    possible = possible and run.model.lora is None  # adapters are small, and frozen weights have no masters
    if run.train.bf16_weights and not possible:
        offload = ", parallel.cpu_offload" if run.parallel.cpu_offload else ""
        raise UserError(
            "train.bf16_weights cannot be had here",
            evidence=f"sharding {sharding}{offload}, {run.train.precision}{', model.lora' if run.model.lora else ''}",
            cause="it needs bf16, no model.lora, no CPU offload, and sharding other than ddp",
            fix="train.bf16_weights=false",
        )
    return possible and sharding == "none" if run.train.bf16_weights is None else run.train.bf16_weights


def should_compile(run: Run, ranks: Ranks) -> bool:
    return ranks.device.type == "cuda" if run.train.compile is None else run.train.compile


def recompute(block: nn.Module, *, selective: bool) -> None:
    """Let a block forget its activations and compute them again in the backward pass."""
    forward: Callable[..., Any] = block.forward
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_expensive) if selective else None
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": contexts} if contexts else {})

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    block.forward = recomputed


EXPENSIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.windlass.flash4.default,
    torch.ops.windlass.flash4_documents.default,
    torch.ops.windlass.product_plus.default,
    torch.ops.windlass.gathered_product.default,
    torch.ops.windlass.nf4_product.default,
    torch.ops.windlass.nf4_wide.default,
}


def _keep_expensive(_context: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def shard(model: Any, run: Run, ranks: Ranks) -> None:
    """FSDP2: each block is a group of its own; so are embedding and head, unless they are tied. The rest is the root's.

    The head's gradient then leaves while the blocks go backward, and its weight comes while they go forward. Where
    there is nobody to send it to, that would only take memory while activations take most.
    """
    options: dict[str, Any] = {
        "mesh": mesh(run, ranks),
        "offload_policy": CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        if run.parallel.cpu_offload
        else OffloadPolicy(),
    }
    if run.train.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model).values():
        fully_shard(block, reshard_after_forward=run.parallel.reshard_after_forward, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = options["mesh"]["shard"].size() > 1 and not run.parallel.cpu_offload  # which is for want of memory
    if apart and own_groups(embedding, head):
        fully_shard(embedding, **options)
        fully_shard(head, reshard_after_forward=False, **options)  # its backward pass is the next thing to happen
    fully_shard(model, **options)


def own_groups(embedding: Any, head: Any) -> bool:
    """Whether each is called as a module, so that FSDP2 sees it, and has a plain weight to itself."""
    return type(embedding) is nn.Embedding and type(head) is nn.Linear and embedding.weight is not head.weight


def mesh(run: Run, ranks: Ranks) -> DeviceMesh:
    if effective_sharding(run, ranks.world_size) == "full":
        return init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("shard",))
    group = run.parallel.shard_group or ranks.world_size // run.resources.nodes
    return init_device_mesh(
        ranks.device.type, (ranks.world_size // group, group), mesh_dim_names=("replicate", "shard")
    )
