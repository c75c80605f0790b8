"""Mixtures of experts over ranks: experts shared by a group, and tokens spread evenly over all experts.

Shapes: N tokens, K experts that each meets, D model width, E experts; P = N · K pairs of a token and an expert.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from windlass.errors import UserError
from windlass.spec import Run
from windlass.trainer.distributed.ranks import Ranks
from windlass.trainer.model.structure import IGNORED, blocks, is_mixture


def mixtures(model: nn.Module) -> list[Any]:
    """Every part of the blocks that sends tokens to experts, by its block."""
    return [part for block in blocks(model).values() for part in block.modules() if is_mixture(part)]


def share_experts(mixture: Any, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` some of the experts, which tokens are then sent to (expert parallelism)."""
    experts = mixture.experts
    if isinstance(experts, nn.ModuleList):
        raise UserError(
            f"{type(mixture).__name__} holds its experts one by one, and cannot share them over ranks",
            fix="parallel.expert=1",
        )
    for name, parameter in list(experts.named_parameters(recurse=False)):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
    here = copy.copy(experts)  # as many as a rank has, which know nothing of the others
    here.num_experts = experts.num_experts // mesh.size()
    experts.forward = functools.partial(_on_their_ranks, experts, here, mesh)


def _on_their_ranks(
    experts: Any, here: Any, mesh: DeviceMesh, hidden_nd: Tensor, index_nk: Tensor, weights_nk: Tensor
) -> Tensor:
    """What the experts' own forward computes, each token's rows on the rank of its expert and back."""
    size, group, met = mesh.size(), mesh.get_group(), index_nk.shape[1]
    per_rank = here.num_experts
    expert_p = index_nk.flatten()
    order_p = expert_p.argsort(stable=True)
    to_send = torch.bincount(expert_p // per_rank, minlength=size)
    to_receive = torch.empty_like(to_send)
    dist.all_to_all_single(to_receive, to_send, group=group)
    sent, received = to_send.tolist(), to_receive.tolist()

    token_p = order_p // met
    rows = all_to_all_single_autograd(hidden_nd[token_p], received, sent, group)
    own_expert = torch.empty(sum(received), dtype=expert_p.dtype, device=expert_p.device)
    dist.all_to_all_single(own_expert, expert_p[order_p] % per_rank, received, sent, group=group)
    here._parameters = {name: parameter.to_local() for name, parameter in experts.named_parameters(recurse=False)}
    computed = _computed(here, rows, own_expert)
    here._parameters = {}  # gathered ones, which are let go after the pass
    back_pd = all_to_all_single_autograd(computed, sent, received, group)
    weighted_pd = back_pd * weights_nk.flatten()[order_p, None]
    return torch.zeros_like(hidden_nd).index_add(0, token_p, weighted_pd.to(hidden_nd.dtype))


def _computed(experts: Any, rows: Tensor, expert: Tensor) -> Tensor:
    """By the experts of this rank; without tokens with a row of zeros, so that they have gradients as others do."""
    count = len(rows)
    if not count:
        rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
    out: Tensor = experts.forward(rows, expert[:, None], rows.new_ones(len(rows), 1))
    return out[:count]


def balance_weight(run: Run, config: Any) -> float:
    """Of the balancing loss. Models that are trained already keep to the experts they have unless it is asked for."""
    if run.train.balance_experts is not None:
        return run.train.balance_experts
    wanted = run.model.init == "random" or "router_aux_loss_coef" in run.model.config
    return float(getattr(config.get_text_config(), "router_aux_loss_coef", 0.0)) if wanted else 0.0


class Balance:
    """Spreads tokens over experts: the loss of Switch Transformers (https://arxiv.org/abs/2101.03961, equation 4).

    E · Σ over experts of (share of tokens sent there) · (mean probability to be sent there), for every block, over the
    tokens that count of the micro-batches that all ranks compute at once. It enters where routers have decided, as
    a gradient: what is reported is the loss of the tokens alone.
    """

    def __init__(self, model: nn.Module, weight: float, ranks: Ranks) -> None:
        self.weight, self.ranks = weight, ranks
        self.world = dist.group.WORLD if ranks.world_size > 1 else None
        parts = mixtures(model)
        self.scale = torch.zeros((), device=ranks.device)
        self.counting_n = torch.zeros(0, device=ranks.device)
        self.tokens_le = torch.zeros(len(parts), parts[0].experts.num_experts, device=ranks.device)
        for part, tokens_e in zip(parts, self.tokens_le, strict=True):
            _router(part).register_forward_hook(functools.partial(self._balanced, tokens_e))
        model.register_forward_pre_hook(self._begin)

    @classmethod
    def of(cls, model: nn.Module, run: Run, ranks: Ranks) -> Balance | None:
        """None where there are no experts, nobody asks by name to balance those of a router that is not known, or pairs
        of answers are compared: their loss is no sum over tokens.
        """
        if run.train.objective == "dpo":
            return None
        if run.train.balance_experts and not mixtures(model):
            raise UserError(f"{type(model).__name__} has no experts to balance", fix="train.balance_experts=null")
        unknown = next((part for part in mixtures(model) if _router(part) is None), None)
        if unknown is not None and run.train.balance_experts:
            raise UserError(
                f"{type(unknown).__name__} cannot be balanced: its router is not known", fix="train.balance_experts=0"
            )
        return cls(model, balance_weight(run, model.config), ranks) if mixtures(model) and unknown is None else None

    def shares(self) -> list[list[float]]:
        """Of all tokens since the last call, the share that each expert of each block was sent. All ranks call it."""
        counts = torch.tensor(self.ranks.sum(self.tokens_le.flatten().tolist())).view_as(self.tokens_le)
        self.tokens_le.zero_()
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        return [[round(share, 4) for share in block] for block in shares.tolist()]

    def _begin(self, _model: nn.Module, args: Any) -> None:
        """A micro-batch: which of the tokens that this rank routes count, and for how much."""
        _, labels_mt, _, scale, *_ = args
        own_mt = labels_mt.chunk(self.ranks.tensor, dim=1)[self.ranks.rank % self.ranks.tensor]
        counting_n = (own_mt != IGNORED).flatten().float()
        if self.counting_n.shape == counting_n.shape:
            self.counting_n.copy_(counting_n)  # in place: compiled blocks know this tensor
        else:
            self.counting_n = counting_n
        self.scale.fill_(scale)

    def _balanced(self, tokens_e: Tensor, router: nn.Module, _args: Any, output: Any) -> Any:
        if not router.training:
            return output
        logits_ne, scores_nk, index_nk = output
        counting_n1 = self.counting_n[:, None]
        with torch.no_grad():
            sent_ne = torch.zeros_like(logits_ne, dtype=torch.float32)
            sent_e = sent_ne.scatter_add(1, index_nk, counting_n1.expand_as(index_nk)).sum(0)
            tokens_e += sent_e
        if not self.weight:
            return output
        everyone = torch.cat([sent_e, counting_n1.sum()[None]])
        if self.world is not None:
            everyone = all_reduce(everyone, "sum", self.world)
        share_e = everyone[:-1] / everyone[-1].clamp(min=1)
        probability_e = (logits_ne.float().softmax(-1) * counting_n1).sum(0)
        loss = self.weight * len(share_e) * (share_e * probability_e).sum() * self.scale
        return logits_ne, AddedLoss.apply(scores_nk, loss), index_nk


class AddedLoss(torch.autograd.Function):
    """The first as it is, and in the backward pass the gradient of the second."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor, _loss: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones((), device=gradients[0].device)


def _router(mixture: Any) -> Any:
    """What decides for a token, with a forward that returns logits, scores and indices; None where it is not known."""
    router = getattr(mixture, "gate", None) or getattr(mixture, "router", None)
    known = type(router).__name__.endswith("TopKRouter") and hasattr(mixture.experts, "num_experts")
    return router if known else None
