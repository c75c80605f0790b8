"""Give a sharded model memory and its first weights, drawn by name-keyed seeds.

Every rank ends up with its slice of the same full tensors, whatever the number of ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.trainer.model.own import fresh_buffers, is_plain
from windlass.trainer.model.safetensors_files import fill
from windlass.trainer.model.structure import blocks, named_seed

log = logging.getLogger(__name__)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a meta model memory, without values. Tensors that were one (tied embeddings) stay one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for other in others:
            module, _, attribute = other.rpartition(".")
            if model.get_parameter(other) is not model.get_parameter(first):
                setattr(model.get_submodule(module), attribute, model.get_parameter(first))


def draw_weights(model: nn.Module, reference: nn.Module, *, seed: int, device: torch.device) -> None:
    """Initialise `model` as its family prescribes. `reference` is a meta copy that was neither sharded nor wrapped.

    A unit (a block, or everything outside the blocks) is drawn whole under a seed made of its name, then cut: memory
    holds one unit at a time, and the values depend neither on the ranks nor on the order of drawing.
    """
    targets = dict(model.named_parameters())
    drawn: set[str] = set()
    for name, unit in _units(reference):
        for key, value in _draw_unit(reference, name, unit, seed, device).items():
            if key in targets:
                fill(targets[key], value)
                drawn.add(key)
    missing = set(targets) - drawn
    if missing:
        raise RuntimeError(f"parameters left without values: {sorted(missing)[:5]}")


def _units(reference: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside = blocks(reference)
    yield from inside.items()
    yield "", _without_blocks(reference, inside)


def _draw_unit(reference: nn.Module, name: str, unit: nn.Module, seed: int, device: torch.device) -> dict[str, Tensor]:
    own = copy.deepcopy(unit).to_empty(device=device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(named_seed(seed, name))
        for parameter in own.parameters():  # what the family's own rule leaves alone must not pass for a weight
            parameter.fill_(float("nan"))
        for module in _children_first(own):
            _rule(module, reference)(module)
            _fill_constants(module)
    prefix = f"{name}." if name else ""
    values = {f"{prefix}{key}": parameter.detach() for key, parameter in own.named_parameters()}
    for full_name, value in values.items():
        if bool(value.isnan().any()):
            raise UserError(
                f"{type(reference).__name__} has no rule to initialise {full_name}",
                cause="the model's own weight initialisation does not cover this parameter",
                fix="model.init=pretrained",
            )
    return values


def _rule(module: nn.Module, reference: nn.Module) -> Callable[[nn.Module], None]:
    """The initialisation that transformers would use: a model inside a model has its own."""
    rule: Callable[[nn.Module], None] = getattr(module, "_init_weights", None) or reference._init_weights  # type: ignore[assignment]
    return rule


def _fill_constants(module: nn.Module) -> None:
    """What the family's rule leaves to the module itself: learned constants of an activation."""
    own = module.named_parameters(recurse=False)
    left = {name: parameter for name, parameter in own if bool(parameter.isnan().all())}
    if not left or module._modules or len(left) < len(module._parameters):
        return
    try:
        made = dict(type(module)().named_parameters(recurse=False))
    except TypeError:
        return
    for name, parameter in left.items():
        if name in made and made[name].shape == parameter.shape:
            parameter.copy_(made[name])


def _without_blocks(model: nn.Module, inside: dict[str, nn.Module]) -> nn.Module:
    """A structural copy of the model whose block list is empty, so that copying it costs no blocks."""
    parent, _, _ = next(iter(inside)).rpartition(".")
    holder_name, _, attribute = parent.rpartition(".")
    memo: dict[int, Any] = {id(model.get_submodule(parent)): nn.ModuleList()}
    result = copy.deepcopy(model, memo)
    assert len(getattr(result.get_submodule(holder_name), attribute)) == 0
    return result


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def restore_buffers(model: nn.Module, reference: nn.Module, device: torch.device) -> None:
    """Recompute what is neither a parameter nor saved (rotary frequencies): `to_empty` left garbage there."""
    if is_plain(reference):
        for name, buffer in fresh_buffers(reference).items():
            model.get_buffer(name).copy_(buffer)
        return
    modules = dict(model.named_modules())
    for name, module in reference.named_modules():
        if not module._non_persistent_buffers_set and not module._buffers:
            continue
        fresh = _fresh_module(module, reference, device)
        for key, buffer in fresh.named_buffers(recurse=False):
            target = modules[name].get_buffer(key)
            target.copy_(buffer.to(target.device))
            if target.is_floating_point() and not bool(target.isfinite().all()):
                raise UserError(
                    f"{type(reference).__name__} cannot be trained: its buffer {name}.{key} has no value",
                    cause="the model computes it in a way that is not known here",
                )


def _fresh_module(module: nn.Module, reference: nn.Module, device: torch.device) -> nn.Module:
    """A module of the same kind with its buffers computed, built anew where a configuration is all it takes."""
    config = getattr(module, "config", None)
    if config is not None and not any(True for _ in module.parameters(recurse=False)):
        try:
            return type(module)(config).to(device)
        except TypeError:
            log.debug("%s takes more than a configuration", type(module).__name__)
    own = copy.deepcopy(module).to_empty(device=device)
    with torch.no_grad():
        for buffer in own.buffers():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        _rule(own, reference)(own)
    if any(buffer.is_floating_point() and not bool(buffer.isfinite().all()) for buffer in own.buffers(recurse=False)):
        try:
            return type(module)().to(device)  # constants of an activation, which take no configuration
        except TypeError:
            log.debug("%s takes arguments", type(module).__name__)
    return own
