"""AdamW on this rank's slices: clip, update and, where the model computes in bf16 copies, fp32 masters, in one pass.

Nothing here waits for the GPU. A loss or gradient that is not finite changes nothing, and neither does any step after
it, so that the host may look later and still find the weights of the last good step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from windlass.errors import UserError
from windlass.spec.training import TrainSection


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
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        masters = {name: parameter.detach().clone() for name, parameter in trained.items()} if bf16_copies else {}
        if bf16_copies:
            compute_in_bf16(model)
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.slots = [
            self._slot(name, parameter, masters.get(name), num_micro=num_micro) for name, parameter in trained.items()
        ]
        device = self.slots[0].parameter.device
        self._on_gpu = device.type == "cuda"
        self._healthy = torch.ones((), dtype=torch.float32, device=device)
        self._norm_group = norm_group(self.slots[0].parameter)
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
        limit = self.train.grad_clip
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else torch.ones_like(norm)
        if self._on_gpu:
            self._apply_on_gpu(gradients, scale, rate)
        elif bool(self._healthy):
            self._apply_on_cpu(gradients, scale, rate)
        for slot in self.slots:
            slot.parameter.grad = None
            if slot.sum is not None:
                slot.sum.zero_()
        return norm.to(loss.device)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        nonempty = [gradient for gradient in gradients if gradient.numel()] or [
            torch.zeros(1, device=self._healthy.device)
        ]
        squared = torch.stack(list(torch._foreach_norm(nonempty, 2, dtype=torch.float32))).double().square().sum()
        if self._norm_group is not None:
            dist.all_reduce(squared, group=self._norm_group)
        return squared.sqrt().float()

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


def _move_gradient_to(fp32_sum: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        fp32_sum.add_(parameter.grad)
        parameter.grad = None

    return move


def norm_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks whose slices together make one gradient; None where every rank has it whole."""
    if not isinstance(parameter, DTensor):
        return None
    return parameter.device_mesh.get_group("shard")
