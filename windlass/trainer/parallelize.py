"""Spread a model over ranks, in the one order that works: tensor → fp8, lean blocks → recompute and compile → shard.

A block that is computed again whole is compiled first: inside what is compiled, functions with backward passes of their
own (lean blocks) would keep all they save. What is computed again in part is chosen by the compiler, from inside.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from windlass.plan.layout import Layout
from windlass.spec import Run
from windlass.trainer.distributed.meshes import Meshes
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.fp8 import use_fp8
from windlass.trainer.fast.kernels import cublas, flash4  # noqa: F401  they register operators
from windlass.trainer.fast.lean import use_lean_blocks
from windlass.trainer.model.structure import after_blocks, blocks, is_mixture
from windlass.trainer.model.tensor_parallel import split_over_ranks
from windlass.trainer.startup import drop_unfinished_kernels

log = logging.getLogger(__name__)


def parallelize(model: nn.Module, run: Run, layout: Layout, ranks: Ranks) -> None:
    """Apply all of it in place; parameter names do not change."""
    meshes = Meshes(run, layout, ranks)
    if layout.tensor > 1:
        split_over_ranks(model, meshes.tensor)
    if layout.fp8:
        use_fp8(model, run, ranks)
    if layout.lean:
        use_lean_blocks(model)
    if layout.compiled and (dropped := drop_unfinished_kernels()):
        log.warning("%d kernels in torch's cache were left unfinished by a kill; they are compiled again", len(dropped))
    for block in blocks(model).values():
        if layout.recompute == "selective":
            recompute(block, selective=True)
        if layout.compiled:
            # Under autocast (DDP) weights are fp32 until they are multiplied.
            experts = not_compiled(block, bf16=layout.precision == "bf16" and not layout.autocast)
            for module in experts:
                module.forward = torch._dynamo.disable(module.forward)  # type: ignore[no-untyped-call]
            block.forward = torch.compile(block.forward, fullgraph=not experts)
        if layout.recompute == "full":
            recompute(block, selective=False)
    if layout.compiled:
        for module in after_blocks(model):
            module.forward = torch.compile(module.forward, fullgraph=True)
    if layout.is_fsdp:
        shard(model, layout, meshes)


def not_compiled(block: nn.Module, *, bf16: bool) -> list[nn.Module]:
    """Experts that torch.compile cannot take: it multiplies groups of rows in bf16 only, and loops over none."""
    parts = dict(block.named_modules())
    named = [name for name in parts if name.rpartition(".")[2] == "experts"]
    lists = [parts[name.rpartition(".")[0]] for name in named if isinstance(parts[name], nn.ModuleList)]
    grouped = [parts[name] for name in named if not isinstance(parts[name], nn.ModuleList)]
    return lists + ([] if bf16 else grouped)


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


def shard(model: Any, layout: Layout, meshes: Meshes) -> None:
    """FSDP2: each block is a group of its own; so are embedding and head, unless they are tied. The rest is the root's.

    The head's gradient then leaves while the blocks go backward, and its weight comes while they go forward. Where
    there is nobody to send it to, that would only take memory while activations take most.
    """
    options: dict[str, Any] = {
        "mesh": meshes.shards,
        "offload_policy": CPUOffloadPolicy(pin_memory=meshes.ranks.device.type == "cuda")
        if layout.cpu_offload
        else OffloadPolicy(),
    }
    if layout.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model).values():
        if layout.tensor > 1:
            shard_mixtures(block, layout, meshes, options)
        fully_shard(block, reshard_after_forward=layout.reshard, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = layout.shards > 1 and not layout.cpu_offload  # which is for want of memory
    if apart and own_groups(embedding, head):
        fully_shard(embedding, **options)
        fully_shard(head, reshard_after_forward=False, **options)  # its backward pass is the next thing to happen
    fully_shard(model, **options)


def shard_mixtures(block: nn.Module, layout: Layout, meshes: Meshes, options: dict[str, Any]) -> None:
    """Experts and their router are groups over all ranks: in a tensor group too each rank has tokens of its own."""
    for part in filter(is_mixture, block.modules()):
        sharded: FSDPModule = fully_shard(
            part, **options | {"mesh": meshes.tokens}, reshard_after_forward=layout.reshard
        )
        # A sum over all ranks, where those of a tensor group are no copies of each other but count as one elsewhere.
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        sharded.set_gradient_divide_factor(meshes.ranks.loss_ranks)


def own_groups(embedding: Any, head: Any) -> bool:
    """Whether each is called as a module, so that FSDP2 sees it, and has a plain weight to itself."""
    return type(embedding) is nn.Embedding and type(head) is nn.Linear and embedding.weight is not head.weight
