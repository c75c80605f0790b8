"""AdamW over matrices and the rest, and the named tensors that make up the training state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.spec.run import TrainSection

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(model: nn.Module, train: TrainSection) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on matrices only."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        eps=train.epsilon,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def prepare_moments(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Create AdamW's state as it is after `step` steps, zeros for the moments, so that a load has somewhere to go."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor a resume needs, by a name that does not depend on ranks or sharding. They are views, not copies."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            if parameter in optimizer.state:
                state[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    for name, buffer in model.state_dict().items():
        if f"model.{name}" not in state and not _is_parameter(model, name):
            state[f"model.{name}"] = buffer
    return state


def _is_parameter(model: nn.Module, name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(module)._parameters


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale gradients down to a global norm of `limit` (0: leave them); the norm they had, over all ranks."""
    parameters = [one for one in model.parameters() if one.grad is not None]
    norm = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
