"""An optimizer of the user's own around the same step: gradients clipped, the run's schedule, saved by name."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.common import own_code
from windlass.errors import UserError
from windlass.spec.training import TrainSection
from windlass.trainer.optimizer import local, norm_group

KEY = "train.optimizer"


class OwnOptimizer:
    """Steps a `torch.optim.Optimizer` over the model's own parameters, sharded ones as they are (DTensor).

    Every group's rate is scaled by the run's schedule. Looking at the gradients waits for the GPU once a step.
    """

    def __init__(self, model: nn.Module, train: TrainSection, *, goes_on: bool) -> None:
        self.train = train
        self.parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        make = own_code.load(train.optimizer or "", KEY)
        self.inner = make(list(self.parameters.items()), train)
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise UserError(f"{KEY}={train.optimizer} made a {type(self.inner).__name__}, no torch.optim.Optimizer")
        groups = self.inner.param_groups
        self.shares = [float(group["lr"]) / train.learning_rate for group in groups]
        missing = set(map(id, self.parameters.values())) - {id(one) for group in groups for one in group["params"]}
        if missing:
            names = [name for name, one in self.parameters.items() if id(one) in missing]
            raise UserError(
                f"{KEY}={train.optimizer} leaves out {', '.join(names[:5])}", cause="they would never train"
            )
        self.norm_group = norm_group(next(iter(self.parameters.values())))
        self.healthy = True  # nothing changes any more once a step was not finite
        if goes_on:
            self._make_room()

    def _make_room(self) -> None:
        """Let the optimizer make what it keeps, for a checkpoint to be read into: weights are read after it, too."""
        for group in self.inner.param_groups:
            group["lr"] = 0.0
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.inner.step()
        self.inner.zero_grad()

    def state(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {f"model.{name}": one.detach() for name, one in self.parameters.items()}
        named |= {f"optimizer.{name}.{key}": value for name, key, value in self._kept()}
        return named

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.parameters.items():
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield name, key, value
                elif value is not None:
                    raise UserError(
                        f"{KEY}={self.train.optimizer} keeps {key} as {type(value).__name__}, which is not saved",
                        cause="a resume would go on without it; tensors are saved",
                        fix=f"keep {key} as a tensor",
                    )

    def resumed(self, step: int) -> None:
        if step == 0:
            self.inner.state.clear()  # nothing was trained yet

    @torch.no_grad()
    def apply(self, rate: float, loss: Tensor) -> Tensor:
        """One step with the gradients of `loss`, which are used up; their global norm before clipping."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise UserError(f"the loss does not reach {name}: it has no gradient after the backward pass")
        norm = self._norm()
        limit = self.train.grad_clip
        self.healthy = self.healthy and math.isfinite(float(norm)) and math.isfinite(float(loss))
        if self.healthy:
            scale = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)
            for parameter in self.parameters.values():
                assert parameter.grad is not None
                local(parameter.grad).mul_(scale.to(parameter.grad.device))
            for group, share in zip(self.inner.param_groups, self.shares, strict=True):
                group["lr"] = rate * share
            self.inner.step()
        self.inner.zero_grad()
        return norm.to(loss.device)

    def _norm(self) -> Tensor:
        gradients = [local(one.grad) for one in self.parameters.values() if one.grad is not None]
        squared = torch.stack(list(torch._foreach_norm([one for one in gradients if one.numel()], 2)))
        total = squared.double().square().sum()
        if self.norm_group is not None:
            dist.all_reduce(total, group=self.norm_group)
        return total.sqrt().float()
