"""Spread a model over ranks, in the one order that works: tensor → fp8, lean blocks → recompute and compile → shard.

A block that is computed again whole is compiled first: inside what is compiled, functions with backward passes of their
own (lean blocks) would keep all they save. What is computed again in part is chosen by the compiler, from inside.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from windlass.plan.layout import Layout
from windlass.spec import Run
from windlass.trainer.distributed.meshes import Meshes, outer
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.fast.fp8 import use_fp8
from windlass.trainer.fast.kernels import cublas, flash4  # noqa: F401  they register operators
from windlass.trainer.fast.lean import use_lean_blocks
from windlass.trainer.model.context_parallel import share_sequences
from windlass.trainer.model.experts import mixtures, share_experts
from windlass.trainer.model.structure import after_blocks, blocks, is_mixture
from windlass.trainer.model.tensor_parallel import split_over_ranks
from windlass.trainer.startup import drop_unfinished_kernels

log = logging.getLogger(__name__)


def parallelize(model: nn.Module, run: Run, layout: Layout, ranks: Ranks) -> None:
    """Apply all of it in place; parameter names do not change."""
    meshes = Meshes(run, layout, ranks)
    if layout.tensor > 1:
        split_over_ranks(model, meshes.tensor)
    if layout.context > 1:
        share_sequences(model, meshes.context)
    for mixture in mixtures(model) if layout.expert > 1 else ():
        share_experts(mixture, meshes.experts["expert"])
    if layout.fp8:
        use_fp8(model, layout, ranks.device)
    if layout.lean:
        use_lean_blocks(model)
    if layout.compiled and (dropped := drop_unfinished_kernels()):
        log.warning("%d kernels in torch's cache were left unfinished by a kill; they are compiled again", len(dropped))
    for block in blocks(model).values():
        if layout.recompute in ("selective", "attention"):
            recompute(block, keep=kept_products(model.config, layout))
        if layout.compiled:
            # Under autocast (DDP) weights are fp32 until they are multiplied.
            bf16, apart = layout.precision == "bf16" and not layout.autocast, layout.tensor > 1 or layout.expert > 1
            experts = not_compiled(block, grouped=bf16 and not apart)
            for module in experts:
                module.forward = torch._dynamo.disable(module.forward)  # type: ignore[no-untyped-call]
            block.forward = torch.compile(block.forward, fullgraph=not experts)
        if layout.recompute == "full":
            recompute(block)
    if layout.compiled:
        for module in after_blocks(model):
            module.forward = torch.compile(module.forward, fullgraph=True)
    if layout.is_fsdp:
        shard(model, layout, meshes)


def not_compiled(block: nn.Module, *, grouped: bool) -> list[nn.Module]:
    """Experts that torch.compile cannot take: groups of rows are for bf16 and where they are no group of FSDP2's own,
    loops for none."""
    parts = dict(block.named_modules())
    named = [name for name in parts if name.rpartition(".")[2] == "experts"]
    lists = [parts[name.rpartition(".")[0]] for name in named if isinstance(parts[name], nn.ModuleList)]
    others = [parts[name] for name in named if not isinstance(parts[name], nn.ModuleList)]
    return lists + ([] if grouped else others)


Policy = Callable[..., CheckpointPolicy]
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
EXPENSIVE = {
    *PRODUCTS,
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


def recompute(block: nn.Module, *, keep: Policy | None = None) -> None:
    """Let a block forget its activations, but for those to `keep`, and compute them again in the backward pass."""
    forward: Callable[..., Any] = block.forward
    contexts = functools.partial(create_selective_checkpoint_contexts, keep) if keep else None
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": contexts} if contexts else {})

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    block.forward = recomputed


SCATTERED = torch.ops._c10d_functional.reduce_scatter_tensor.default


def kept_products(config: Any, layout: Layout) -> Policy:
    """What a block keeps that computes the rest again.

    Not the products of the feed-forward part where only those of attention are kept. And of a tensor group not what
    one rank adds to a sum, which is of whole sequences, but its part of the sum.
    """
    text = config.get_text_config()
    widths = getattr(text, "intermediate_size", 0), getattr(text, "hidden_size", 0)
    ffn_width, width = (size if isinstance(size, int) else 0 for size in widths)
    parts = [ffn_width, ffn_width // layout.tensor] if layout.recompute == "attention" else []
    again = {*parts, *(2 * part for part in parts)}  # gate and up, each or joined

    def keep(_context: SelectiveCheckpointContext, op: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kept = op in EXPENSIVE
        if kept and again and outputs_of(op, args) in again:
            kept = False
        if kept and layout.tensor > 1 and op in PRODUCTS:
            kept = not _adds_to_a_sum(args[-1], width)
        kept = kept or (layout.tensor > 1 and op == SCATTERED)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return keep


def outputs_of(op: Any, args: Any) -> int:
    """The width of what a product makes."""
    if op in PRODUCTS:
        return int(args[-1].shape[-1])
    weights = args[1] if op == torch.ops.windlass.gathered_product.default else ()
    return sum(weight.shape[0] for weight in weights)


def _adds_to_a_sum(matrix: Tensor, width: int) -> bool:
    """Whether a tensor group has the rows of a matrix apart: as DTensors have it, or as it looks once compiled."""
    if isinstance(matrix, DTensor):
        return matrix.placements[-1] == Shard(0)
    return matrix.shape[-1] == width


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
        if layout.tensor > 1 or layout.expert > 1:
            shard_mixtures(block, layout, meshes, options)
        fully_shard(block, reshard_after_forward=layout.reshard, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    apart = layout.shards > 1 and not layout.cpu_offload  # which is for want of memory
    if apart and own_groups(embedding, head):
        fully_shard(embedding, **options)
        fully_shard(head, reshard_after_forward=False, **options)  # its backward pass is the next thing to happen
    fully_shard(model, **options)


def shard_mixtures(block: nn.Module, layout: Layout, meshes: Meshes, options: dict[str, Any]) -> None:
    """Experts and their router are groups over all ranks: in a tensor group too each rank has tokens of its own.

    Their gradients are sums over other numbers of ranks than those of all else, and become the same mean.
    """
    options = options | {"reshard_after_forward": layout.reshard}
    if "mp_policy" in options:
        # All that enters is bf16 but for the router's scores, which one rank multiplies with in fp32. torch 2.11 casts
        # them in the forward pass and not when it is computed again, and then refuses what it finds.
        options["mp_policy"] = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
    for part in filter(is_mixture, list(block.modules())):
        groups: list[tuple[Any, DeviceMesh]] = [(part, meshes.tokens)]
        if layout.expert > 1:
            groups.insert(0, (part.experts, outer(meshes.experts, "expert")))
        for module, mesh in groups:
            sharded: FSDPModule = fully_shard(module, **options | {"mesh": mesh}, shard_placement_fn=along_rows(mesh))
            # gloo has no other sums; of one shard torch divides itself, and would do so twice
            sharded.set_force_sum_reduction_for_comms(mesh["shard"].size() > 1)
            sharded.set_gradient_divide_factor(meshes.ranks.loss_ranks)


def along_rows(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Cut experts that are fewer than ranks along their rows, and not by their number."""
    shards = mesh["shard"].size()

    def place(parameter: nn.Parameter) -> Shard | None:
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(1) if own.ndim == 3 and own.shape[0] % shards and own.shape[1] % shards == 0 else None

    return place


def own_groups(embedding: Any, head: Any) -> bool:
    """Whether each is called as a module, so that FSDP2 sees it, and has a plain weight to itself."""
    return type(embedding) is nn.Embedding and type(head) is nn.Linear and embedding.weight is not head.weight
