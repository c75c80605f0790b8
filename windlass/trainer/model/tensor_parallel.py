"""Tensor parallelism: the ranks of a group compute every block together, with torch's DTensor.

Matrices are cut as the family's own plan in transformers says: columns, then rows. Between them, where a block adds to
its residual stream, each rank holds its part of every sequence (sequence parallelism). Embedding and head are cut by
tokens of the vocabulary, and the loss is computed from all parts without one rank having all logits.

Shapes: N tokens, D model width, V tokens of the vocabulary that a rank holds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from windlass.plan.memory import SPLIT_LOGITS_PER_BLOCK, rows_per_block
from windlass.trainer.model.structure import IGNORED, after_blocks, blocks, is_mixture

SEQUENCE, HEADS = Shard(1), 2  # of activations [batch, sequence, width], and of [batch, sequence, heads, size]


def split_over_ranks(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model on the meta device for the ranks of `mesh`; its forward must return the loss already."""
    inside = blocks(model)
    family_plan = {name.removeprefix("layers.*."): style for name, style in model.config.base_model_tp_plan.items()}
    for block in inside.values():
        parallelize_module(block, mesh, dict(block_plan(block, family_plan)))
        for name, part in block.named_children():
            if any(key.startswith(f"{name}.") for key in family_plan) and not is_mixture(part):
                part.register_forward_pre_hook(functools.partial(_gather_input, mesh), with_kwargs=True)
    next(iter(inside.values())).register_forward_pre_hook(functools.partial(_take_part, mesh))

    embedding, head, [norm] = model.get_input_embeddings(), model.get_output_embeddings(), after_blocks(model)
    tied = head.weight is embedding.weight
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    parallelize_module(norm, mesh, SequenceParallel())
    norm.register_forward_hook(_gather_output)
    head.weight = embedding.weight if tied else nn.Parameter(distribute_tensor(head.weight, mesh, [Shard(0)]))
    head.forward = functools.partial(_loss_of_head, head, mesh)


def block_plan(block: nn.Module, family_plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """How every part of a block that has weights is cut; mixtures are left whole, each rank has tokens of its own."""
    plan: dict[str, ParallelStyle] = {}
    mixtures = tuple(f"{name}." for name, part in block.named_modules() if is_mixture(part))
    for name, part in block.named_modules():
        if not any(True for _ in part.parameters(recurse=False)) or name.startswith(mixtures):
            continue
        style = family_plan.get(name)
        if style == "colwise":
            plan[name] = ColwiseParallel()
        elif style == "rowwise":
            plan[name] = RowwiseParallel(output_layouts=SEQUENCE)
        elif "." not in name:
            plan[name] = SequenceParallel(use_local_output=True)
        else:  # norms of queries and keys, which are of this rank's heads
            plan[name] = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    return plan


def _gather_input(mesh: DeviceMesh, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Whole sequences for attention and feed-forward; as DTensors, whose gradients are summed once for all uses."""

    def whole(part: Tensor) -> Tensor:
        return DTensor.from_local(part, mesh, [SEQUENCE], run_check=False).redistribute(placements=[Replicate()])

    if args:
        return (whole(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": whole(kwargs["hidden_states"])}


def _take_part(mesh: DeviceMesh, _block: nn.Module, args: Any) -> Any:
    """Of the embedding's output, once masks and positions were made of its length."""
    whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
    return (whole.redistribute(placements=[SEQUENCE]).to_local(), *args[1:])


def _gather_output(_norm: nn.Module, _args: Any, part: DTensor) -> Tensor:
    """Whole sequences for the head; each rank's rows of it make a part of the gradient."""
    return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class SplitCrossEntropy(torch.autograd.Function):
    """`fast.head.LinearCrossEntropy` where every rank has the rows of some tokens of the vocabulary.

    Its gradient too is complete after the forward pass. The gradient of `hidden_nd` is this rank's part of a sum.
    """

    @staticmethod
    def forward(ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, labels_n: Tensor, scale: float, mesh: Any) -> Tensor:
        rows = rows_per_block(weight_vd.shape[0], hidden_nd.shape[0], SPLIT_LOGITS_PER_BLOCK)
        grad_hidden_nd, grad_weight_vd = torch.empty_like(hidden_nd), torch.zeros_like(weight_vd)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        for start in range(0, hidden_nd.shape[0], rows):
            hidden, labels = hidden_nd[start : start + rows], labels_n[start : start + rows]
            logits_nv = hidden @ weight_vd.T
            loss += split_cross_entropy(logits_nv, labels, scale, mesh)[0]
            torch.mm(logits_nv, weight_vd, out=grad_hidden_nd[start : start + rows])
            grad_weight_vd.addmm_(logits_nv.T, hidden)
        ctx.save_for_backward(grad_hidden_nd, grad_weight_vd)
        return loss

    @staticmethod
    def backward(ctx: Any, *_grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.saved_tensors, None, None, None)


def split_cross_entropy(logits_nv: Tensor, labels_n: Tensor, scale: float, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The scaled loss, and how many labels are the likeliest token; `logits_nv` becomes its gradient."""
    group, first = mesh.get_group(), mesh.get_local_rank() * logits_nv.shape[1]
    wide_nv = logits_nv.float()
    most_n = wide_nv.amax(-1)
    dist.all_reduce(most_n, op=dist.ReduceOp.MAX, group=group)

    counting_n, own_n = labels_n != IGNORED, labels_n - first
    here_n = (own_n >= 0) & (own_n < logits_nv.shape[1])
    own_n = own_n.where(here_n, 0)[:, None]
    label_logit_n = wide_nv.gather(1, own_n).squeeze(1) * here_n
    probabilities_nv = (wide_nv - most_n[:, None]).exp_()
    sums_2n = torch.stack([probabilities_nv.sum(-1), label_logit_n])
    dist.all_reduce(sums_2n, group=group)
    total_n, label_logit_n = sums_2n

    factor_n = counting_n * scale
    losses_n = (total_n.log() + most_n - label_logit_n) * factor_n
    probabilities_nv /= total_n[:, None]
    probabilities_nv.scatter_add_(1, own_n, -here_n.to(torch.float32)[:, None])
    logits_nv.copy_(probabilities_nv.mul_(factor_n[:, None]))
    return losses_n.sum(), (counting_n & (label_logit_n == most_n)).sum()


def _loss_of_head(
    head: Any, mesh: DeviceMesh, hidden_nd: Tensor, labels_n: Tensor, scale: float, measuring: bool
) -> Tensor:
    weight_vd = head.weight.to_local()
    if measuring:
        rows = rows_per_block(weight_vd.shape[0], hidden_nd.shape[0], SPLIT_LOGITS_PER_BLOCK)
        parts = zip(torch.split(hidden_nd, rows), torch.split(labels_n, rows), strict=True)
        sums = [split_cross_entropy(hidden @ weight_vd.T, labels, 1.0, mesh) for hidden, labels in parts]
        return torch.stack([torch.stack(both).float() for both in sums]).sum(0)
    loss: Tensor = SplitCrossEntropy.apply(hidden_nd, weight_vd, labels_n, scale, mesh)
    return loss
