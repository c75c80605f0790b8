"""Build a causal language model on the meta device: its structure, no memory."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.catalog.models import known_config
from windlass.catalog.models import preset as find_preset
from windlass.errors import UserError
from windlass.plan.checks import check_model
from windlass.spec import Run
from windlass.spec.training import ModelSection


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of the trainer needs to know about a model's structure."""

    num_parameters: int
    num_trained: int
    fingerprint: str  # of parameter names and shapes: two models that can share a checkpoint agree on it
    vocab_size: int
    tied: bool

    def as_dict(self, config: Any) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "num_parameters": self.num_parameters,
            "config": config.to_diff_dict(),
        }


def model_config(run: Run, *, folder: Path | None = None, vocab_size: int = 0) -> Any:
    """The transformers configuration that a resolved run asks for, with room for `vocab_size` tokens.

    `folder` is where the files of a hub id are on this machine.
    """
    from transformers import AutoConfig

    values = known_config(run.model)
    if values is not None and run.model.preset:
        values = copy.deepcopy(values)  # transformers writes into nested ones, rope_scaling for example
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        config.architectures = None
    else:
        try:
            config = AutoConfig.from_pretrained(
                folder or run.model.path,
                revision=run.model.revision or "main",
                trust_remote_code=run.model.trust_remote_code,
                **copy.deepcopy(run.model.config),
            )
        except (OSError, ValueError) as error:
            if "trust_remote_code" in str(error):
                raise UserError(
                    f"the model {run.model.path} brings code of its own, which is not run unless you say so",
                    evidence=str(error).splitlines()[0],
                    cause="whoever wrote that code could do on every rank what you can",
                    fix="read the .py files of the model, then model.trust_remote_code=true",
                ) from None
            raise UserError(
                f"the model {run.model.path} cannot be read",
                evidence=str(error).splitlines()[0],
                fix="model.path must be a folder with config.json or a hub id; HF_TOKEN opens gated ones",
            ) from None
    check_model(config.to_dict(), run)
    text = config.get_text_config()
    if vocab_size > (getattr(text, "vocab_size", None) or vocab_size):
        text.vocab_size = vocab_size
    return config


def meta_model(config: Any, run: Run) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            # our own names become torch's attention here; attention.py takes it from there
            attn_implementation="sdpa" if run.model.attention in ("auto", "flash4") else run.model.attention,
            dtype=torch.float32,  # master weights
            trust_remote_code=run.model.trust_remote_code,
        )
    model.config.use_cache = False
    return model.train()  # type: ignore[no-any-return]


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated decoder blocks by name: the largest list of equal modules, outermost first."""
    best: dict[str, nn.Module] = {}
    best_size = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(child) for child in module}) != 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best_size:
            best, best_size = {f"{name}.{key}": child for key, child in module.named_children()}, size
    if not best:
        raise UserError(f"{type(model).__name__} has no repeated blocks to shard or recompute")
    return best


def facts(model: nn.Module) -> ModelFacts:
    parameters = dict(model.named_parameters())  # a tied tensor counts once
    shapes = "\n".join(f"{name} {tuple(parameter.shape)}" for name, parameter in sorted(parameters.items()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    return ModelFacts(
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_trained=sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad),
        fingerprint=hashlib.sha256(shapes.encode()).hexdigest()[:16],
        vocab_size=int(embedding.weight.shape[0]),
        tied=head is not None and head.weight is embedding.weight,
    )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights, under the names they are saved by. Few families have any."""
    buffers = dict(model.named_buffers())
    return {f"model.{name}": buffers[name] for name in model.state_dict() if name in buffers}


def weights_path(spec: ModelSection) -> str:
    """Where pretrained weights come from: a folder or a hub id."""
    if spec.preset:
        hub_id = find_preset(spec.preset).hub_id
        assert hub_id  # plan.check refused presets without published weights
        return hub_id
    return str(spec.path)
