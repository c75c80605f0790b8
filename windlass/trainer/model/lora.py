"""LoRA: small trainable matrices beside frozen linear layers, which keep their names, shapes and values.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.plan.shape import matches
from windlass.spec import Run
from windlass.spec.training import LoraSection
from windlass.trainer.model.nf4 import NF4Weight, product
from windlass.trainer.model.safetensors_files import fill
from windlass.trainer.model.structure import blocks, named_seed

ROUTERS = {"gate", "router", "shared_expert_gate"}  # linear layers that choose experts: not projections


class LoraLinear(nn.Linear):
    """A linear layer with `scale · B A x` added. Its class says so: one compiled block then serves all layers."""

    lora_a: nn.Parameter  # (R, I), fp32
    lora_b: nn.Parameter  # (O, R), fp32
    lora_scale: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.added(x)

    def frozen(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def added(self, x: Tensor) -> Tensor:
        if self.lora_dropout and self.training:
            x = F.dropout(x, self.lora_dropout)
        inner = F.linear(x, self.lora_a.to(x.dtype))
        return F.linear(inner, self.lora_b.to(x.dtype)) * self.lora_scale


class QuantizedLoraLinear(LoraLinear):
    """The same beside a weight that is held in 4 bits."""

    nf4: NF4Weight

    def frozen(self, x: Tensor) -> Tensor:
        return product(x, self.nf4, self.bias)


def adapt(model: nn.Module, run: Run, *, targets: Sequence[str] | None, quantize: bool) -> None:
    """Freeze a meta model and put LoRA beside its targets; nothing happens without `model.lora`.

    `targets` are those of an adapter, which hold where the run names none.
    """
    lora = run.model.lora
    if lora is None:
        return
    names = target_names(model, lora.targets or targets)
    freeze(model, torch.bfloat16 if run.train.precision == "bf16" else torch.float32)
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        attach(linear, lora)
        if quantize and lora.quantize:
            linear.__class__ = QuantizedLoraLinear
            linear.nf4 = NF4Weight(linear.out_features, linear.in_features, linear.weight.dtype)
            linear.register_parameter("weight", None)


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights that no optimizer touches need no fp32 masters: they are held in the type that is computed with."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def attach(linear: nn.Linear, lora: LoraSection) -> None:
    rank, alpha = lora.rank, lora.alpha
    assert rank is not None  # both resolved
    assert alpha is not None
    linear.__class__ = LoraLinear
    assert isinstance(linear, LoraLinear)
    device = linear.weight.device
    linear.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
    linear.lora_b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
    linear.lora_scale = alpha / (math.sqrt(rank) if lora.rank_stabilised else rank)
    linear.lora_dropout = lora.dropout


def target_names(model: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """The linear layers that patterns name, in the model's order; without patterns all projections of the blocks."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = tuple(f"{name}." for name in blocks(model))
    projections = [
        linear for linear in linears if linear.startswith(inside) and linear.rpartition(".")[2] not in ROUTERS
    ]
    if patterns is None:
        if not projections:
            raise UserError(
                f"{type(model).__name__} has no linear layers in its blocks for model.lora",
                cause="LoRA goes beside linear layers; this family computes with others",
                fix="full fine-tuning: drop model.lora",
            )
        return projections
    chosen: set[str] = set()
    for pattern in patterns:
        named = {linear for linear in linears if matches(linear, pattern)}
        if not named:
            raise no_such_target(model, pattern, projections)
        chosen |= named
    head = model.get_output_embeddings()  # type: ignore[operator]
    outside = [name for name in chosen if model.get_submodule(name) is head]
    if outside:
        raise UserError(
            f"model.lora.targets names the head {outside[0]}, which LoRA is not put beside",
            fix="model.lora.targets without it; data.special_tokens trains rows of the head",
        )
    return [linear for linear in linears if linear in chosen]


def no_such_target(model: nn.Module, pattern: str, projections: Sequence[str]) -> UserError:
    others = [name for name, _ in model.named_modules() if matches(name, pattern)]
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in projections))
    near = difflib.get_close_matches(pattern, [*leaves, *projections], 1, cutoff=0.5)
    return UserError(
        f"model.lora.targets: no linear layer matches {pattern!r}",
        evidence=f"it matches {others[0]}, a {type(model.get_submodule(others[0])).__name__}"
        if others
        else f"linear layers of the blocks: {', '.join(leaves) or 'none'}",
        fix=f"model.lora.targets=[{near[0]}]" if near else "drop model.lora.targets: all projections",
    )


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def draw_adapters(model: nn.Module, *, seed: int) -> None:
    """First values: A uniform by its inputs, B zero, so that the model is what it was; the same on any ranks."""
    for name, layer in lora_layers(model).items():
        generator = torch.Generator().manual_seed(named_seed(seed, f"{name}.lora_a"))
        bound = 1 / math.sqrt(layer.in_features)
        drawn = torch.empty(layer.lora_a.shape).uniform_(-bound, bound, generator=generator)
        fill(layer.lora_a, drawn)
        fill(layer.lora_b, torch.zeros(layer.lora_b.shape))
