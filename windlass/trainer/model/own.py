"""A model class of the user's own, given what the trainer asks of transformers' models.

Either one of transformers' kind (a subclass of `PreTrainedModel`), or any module: `model.config` holds the arguments of
its constructor, and its forward makes logits of token ids.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from windlass.common import own_code
from windlass.errors import UserError
from windlass.spec.training import ModelSection

KEY = "model.class"


def own_config(spec: ModelSection) -> Any:
    """A transformers configuration of the fields in `model.config`."""
    from transformers import PretrainedConfig

    make = own_code.load(spec.own_class or "", KEY)
    return (make.config_class if _is_pretrained(make) else PretrainedConfig)(**spec.config)


def own_model(spec: ModelSection, config: Any) -> nn.Module:
    """The model on the meta device, without memory."""
    make = own_code.load(spec.own_class or "", KEY)
    try:
        with torch.device("meta"):
            model: nn.Module = make(config) if _is_pretrained(make) else make(**spec.config)
    except TypeError as error:
        raise UserError(
            f"{KEY}={spec.own_class} cannot be made of model.config",
            evidence=f"{error}; model.config is {dict(spec.config)}",
            fix="model.config holds the arguments of its constructor, by name",
        ) from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{KEY}={spec.own_class} makes a {type(model).__name__}, which is no torch module")
    model.config = config
    config.use_cache = False
    if not _is_pretrained(make):
        _complete(model, spec)
    return model.float().train()


def fresh_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a plain module as its constructor makes them: nothing else knows how they are computed."""
    return dict(type(model)(**model._arguments).named_buffers()) if dict(model.named_buffers()) else {}  # type: ignore[arg-type]


def is_plain(model: nn.Module) -> bool:
    return hasattr(model, "_arguments")


def _is_pretrained(make: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(make, type) and issubclass(make, PreTrainedModel)


def _complete(model: nn.Module, spec: ModelSection) -> None:
    """Give a plain module the few methods that the trainer calls on transformers' models."""
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise UserError(f"{KEY}={spec.own_class} has no nn.Embedding: tokens are looked up in one")
    heads = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features == embedding.num_embeddings
    ]
    if not heads:
        raise UserError(
            f"{KEY}={spec.own_class} has no nn.Linear that makes {embedding.num_embeddings:,} logits",
            cause="as many as the embedding has rows: one for each token",
        )
    plain_forward = model.forward

    def forward(input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False) -> Any:
        if position_ids is not None:
            raise UserError(
                f"data.document_mask needs positions that restart, which {spec.own_class} does not take",
                fix="data.document_mask=false",
            )
        return SimpleNamespace(logits=plain_forward(input_ids))

    methods = {
        "forward": forward,
        "get_input_embeddings": lambda: embedding,
        "get_output_embeddings": lambda: heads[-1],
        "get_decoder": lambda: model,
        "_arguments": dict(spec.config),
    }
    if not hasattr(model, "_init_weights"):
        methods["_init_weights"] = _reset
    for name, value in methods.items():
        object.__setattr__(model, name, value)


def _reset(module: nn.Module) -> None:
    """torch's own first weights. A module with parameters of its own kind brings `reset_parameters`."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
