"""AdamW on this rank's slices: clip, update and, where the model computes in bf16 copies, fp32 masters, in one pass.

Nothing here waits for the GPU. A loss or gradient that is not finite changes nothing, and neither does any step after
it, so that the host may look later and still find the weights of the last good step.

An optimizer of the user's own gets the same around it: gradients clipped, the run's schedule, state saved by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from windlass.common import own_code
from windlass.errors import UserError
from windlass.spec.training import TrainSection
from windlass.trainer.model.structure import trained_parameters

OWN_KEY = "train.optimizer"


@dataclass(frozen=True)
class Slot:
    """A parameter and what AdamW keeps for it. Tensors that are saved may be sharded; `local_…` are plain slices."""

    name: str
    parameter: nn.Parameter
    master: Tensor  # fp32; the parameter itself unless the model computes in bf16 copies
    first: Tensor
    second: Tensor
    decay: float
    sum: Tensor | None  # fp32 sum of gradients over micro-batches, where the parameter's own would be bf16

    def local_gradient(self) -> Tensor:
        gradient = self.sum if self.sum is not None else self.parameter.grad
        if gradient is None:
            raise UserError(
                f"the model cannot be trained on the next token alone: its loss does not reach {self.name}",
                evidence="there is no gradient after the backward pass",
                cause="the part is for another loss, another input or another length than the run has",
            )
        return local(gradient)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def compute_in_bf16(model: nn.Module) -> None:
    """Turn every parameter into bf16, before the first pass. FSDP2 then gathers what it holds, without a cast.

    Gradients are still summed over ranks in fp32, and over micro-batches too; each sum is rounded to bf16 once.
    """
    if isinstance(model, FSDPModule):
        model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: tensor.to(torch.bfloat16) if isinstance(tensor, DTensor) else tensor
        )
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


class Optimizer(Protocol):
    """What the loop and checkpoints ask of an optimizer."""

    def state(self) -> dict[str, Tensor]: ...
    def resumed(self, step: int) -> None: ...
    def apply(self, rate: float, loss: Tensor) -> Tensor: ...


class AdamW:
    """Decoupled weight decay on matrices only."""

    def __init__(self, model: nn.Module, train: TrainSection, *, bf16_copies: bool, num_micro: int) -> None:
        self.train = train
        self.step = 0
        masters: dict[str, Tensor] = {}
        if bf16_copies:
            masters = {name: parameter.detach().clone() for name, parameter in trained_parameters(model).items()}
            compute_in_bf16(model)
        self.slots = [
            self._slot(name, parameter, masters.get(name), num_micro=num_micro)
            for name, parameter in trained_parameters(model).items()
        ]
        device = self.slots[0].parameter.device
        self._on_gpu = device.type == "cuda"
        self._healthy = torch.ones((), dtype=torch.float32, device=device)
        self._norm = GradientNorm([slot.parameter for slot in self.slots])
        self._cpu: torch.optim.AdamW | None = None

    def _slot(self, name: str, parameter: nn.Parameter, master: Tensor | None, *, num_micro: int) -> Slot:
        """`master` is there where the model computes in bf16 copies."""
        fp32_sum = torch.zeros_like(master) if master is not None and num_micro > 1 else None
        master = parameter.detach() if master is None else master
        if fp32_sum is not None:
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(fp32_sum))  # type: ignore[no-untyped-call]
        return Slot(
            name=name,
            parameter=parameter,
            master=master,
            first=torch.zeros_like(master),
            second=torch.zeros_like(master),
            decay=self.train.weight_decay if parameter.ndim >= 2 else 0.0,
            sum=fp32_sum,
        )

    def state(self) -> dict[str, Tensor]:
        """Every tensor a resume needs, by a name that depends on neither ranks nor sharding nor bf16 copies."""
        named: dict[str, Tensor] = {}
        for slot in self.slots:
            named[f"model.{slot.name}"] = slot.master
            named[f"optimizer.{slot.name}.exp_avg"] = slot.first
            named[f"optimizer.{slot.name}.exp_avg_sq"] = slot.second
        return named

    def resumed(self, step: int) -> None:
        """The state was loaded: go on after `step` steps."""
        self.step = step
        self._copy_masters()

    @torch.no_grad()
    def apply(self, rate: float, loss: Tensor) -> Tensor:
        """One step with the gradients of `loss`, which are used up; their global norm before clipping."""
        self.step += 1
        gradients = [slot.local_gradient() for slot in self.slots]
        norm = self._norm(gradients)
        self._healthy *= norm.isfinite() & loss.isfinite().to(norm.device)  # gradients may be offloaded to the host
        scale = clipping(norm, self.train.grad_clip)
        if self._on_gpu:
            self._apply_on_gpu(gradients, scale, rate)
        elif bool(self._healthy):
            self._apply_on_cpu(gradients, scale, rate)
        for slot in self.slots:
            slot.parameter.grad = None
            if slot.sum is not None:
                slot.sum.zero_()
        return norm.to(loss.device)

    def _apply_on_gpu(self, gradients: list[Tensor], scale: Tensor, rate: float) -> None:
        from windlass.trainer.fast.kernels.adamw import adamw_step

        beta1, beta2 = self.train.beta1, self.train.beta2
        numbers = torch.tensor([rate, 1 - beta1**self.step, 1 - beta2**self.step], dtype=torch.float32)
        scalars = torch.cat([scale.reshape(1), numbers.pin_memory().to(scale.device, non_blocking=True)])
        scalars = torch.cat([scalars, self._healthy.reshape(1)])
        for slot, gradient in zip(self.slots, gradients, strict=True):
            if gradient.numel():
                adamw_step(
                    local(slot.parameter.detach()),
                    gradient.contiguous(),
                    local(slot.master),
                    local(slot.first),
                    local(slot.second),
                    scalars,
                    decay=slot.decay,
                    beta1=beta1,
                    beta2=beta2,
                    epsilon=self.train.epsilon,
                )

    def _apply_on_cpu(self, gradients: list[Tensor], scale: Tensor, rate: float) -> None:
        if self._cpu is None:
            self._cpu = self._torch_adamw()
        slots = [(slot, gradient) for slot, gradient in zip(self.slots, gradients, strict=True) if gradient.numel()]
        for (slot, gradient), group in zip(slots, self._cpu.param_groups, strict=True):
            group["lr"] = rate
            group["params"][0].grad = gradient.to(slot.master.dtype) * scale
        self._cpu.step()
        self._cpu.zero_grad()
        self._copy_masters()

    def _torch_adamw(self) -> torch.optim.AdamW:
        """torch's own AdamW over plain views of the slices, with the moments it shares with the slots."""
        slots = [slot for slot in self.slots if local(slot.master).numel()]
        groups = [{"params": [nn.Parameter(local(slot.master))], "weight_decay": slot.decay} for slot in slots]
        train = self.train
        optimizer = torch.optim.AdamW(
            groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.epsilon, fused=True
        )
        for slot, group in zip(slots, optimizer.param_groups, strict=True):
            optimizer.state[group["params"][0]] = {
                "step": torch.tensor(float(self.step - 1), dtype=torch.float32),
                "exp_avg": local(slot.first),
                "exp_avg_sq": local(slot.second),
            }
        return optimizer

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for slot in self.slots:
            if slot.parameter.dtype != slot.master.dtype:
                slot.parameter.copy_(slot.master)


class OwnOptimizer:
    """Steps a `torch.optim.Optimizer` over the model's own parameters, sharded ones as they are (DTensor).

    Every group's rate is scaled by the run's schedule. Looking at the gradients waits for the GPU once a step.
    """

    def __init__(self, model: nn.Module, train: TrainSection, *, goes_on: bool) -> None:
        self.train = train
        self.parameters = trained_parameters(model)
        make = own_code.load(train.optimizer or "", OWN_KEY)
        self.inner = make(list(self.parameters.items()), train)
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise UserError(f"{OWN_KEY}={train.optimizer} made a {type(self.inner).__name__}, no torch.optim.Optimizer")
        groups = self.inner.param_groups
        self.shares = [float(group["lr"]) / train.learning_rate for group in groups]
        missing = set(map(id, self.parameters.values())) - {id(param) for group in groups for param in group["params"]}
        if missing:
            names = [name for name, part in self.parameters.items() if id(part) in missing]
            raise UserError(
                f"{OWN_KEY}={train.optimizer} leaves out {', '.join(names[:5])}", cause="they would never train"
            )
        self.settings = [_settings(group) for group in groups]
        self.norm = GradientNorm(list(self.parameters.values()))
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
        named: dict[str, Tensor] = {f"model.{name}": part.detach() for name, part in self.parameters.items()}
        named |= {f"optimizer.{name}.{key}": value for name, key, value in self._kept()}
        return named

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        for group, settings in zip(self.inner.param_groups, self.settings, strict=True):
            changed = [key for key, value in _settings(group).items() if key not in settings or settings[key] != value]
            if changed:
                raise UserError(
                    f"{OWN_KEY}={self.train.optimizer} keeps {', '.join(changed)} in its groups, which are not saved",
                    cause="a resume would go on without it; tensors of a parameter's state are saved",
                    fix=f"keep {changed[0]} as a tensor in the state of a parameter",
                )
        for name, parameter in self.parameters.items():
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield name, key, value
                elif value is not None:
                    raise UserError(
                        f"{OWN_KEY}={self.train.optimizer} keeps {key} as {type(value).__name__}, which is not saved",
                        cause="a resume would go on without it; tensors are saved",
                        fix=f"keep {key} as a tensor",
                    )

    def resumed(self, step: int) -> None:
        if step == 0:
            self.inner.state.clear()  # nothing was trained yet

    @torch.no_grad()
    def apply(self, rate: float, loss: Tensor) -> Tensor:
        """One step with the gradients of `loss`, which are used up; their global norm before clipping."""
        gradients = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise UserError(f"the loss does not reach {name}: it has no gradient after the backward pass")
            gradients.append(local(parameter.grad))
        norm = self.norm(gradients)
        self.healthy = self.healthy and math.isfinite(float(norm)) and math.isfinite(float(loss))
        if self.healthy:
            scale = clipping(norm, self.train.grad_clip)
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.device))
            for group, share in zip(self.inner.param_groups, self.shares, strict=True):
                group["lr"] = rate * share
            self.inner.step()
        self.inner.zero_grad()
        return norm.to(loss.device)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a group of parameters, without the rate, which the run's schedule sets."""
    plain = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in group.items() if key != "lr" and isinstance(value, plain)}


def _move_gradient_to(fp32_sum: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        fp32_sum.add_(parameter.grad)
        parameter.grad = None

    return move


def clipping(norm: Tensor, limit: float) -> Tensor:
    """By which gradients are multiplied to be no longer than a limit, if there is one."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)


class GradientNorm:
    """The norm of all slices together; one that several ranks hold counts on each for its share."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.is_sharded = isinstance(parameters[0], DTensor)
        self.copies = [_copies(parameter) for parameter in parameters]

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        squared = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
        for copies in sorted(set(self.copies)):
            held = zip(gradients, self.copies, strict=True)
            nonempty = [gradient for gradient, number in held if number == copies and gradient.numel()]
            if nonempty:
                norms = torch.stack(list(torch._foreach_norm(nonempty, 2, dtype=torch.float32)))
                squared += norms.double().square().sum() / copies
        if self.is_sharded:
            dist.all_reduce(squared)
        return squared.sqrt().float()


def _copies(parameter: Tensor) -> int:
    """How many ranks hold the same slice of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    shards = math.prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if not place.is_replicate())
    return dist.get_world_size() // shards
