"""Adapter files in the format of `peft`: read into a spread model, written from a checkpoint's tensors."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.catalog.adapters import CONFIG_FILE, TENSORS_FILE, adapter_facts
from windlass.errors import UserError
from windlass.spec import Run
from windlass.trainer.model.lora import lora_layers
from windlass.trainer.model.new_tokens import ROWS, rows_modules
from windlass.trainer.model.safetensors_files import StoredTensor, fill_from, read_header
from windlass.trainer.model.structure import trained_parameters, weights_path

log = logging.getLogger(__name__)
PREFIX = "base_model.model."
SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", ROWS: "token_adapter.trainable_tokens_delta"}
MODEL_REMARK = "model_sha256"  # of the weights an adapter was trained beside, in the file's own metadata


@dataclass(frozen=True)
class Adapter:
    """An adapter's tensors in their file, by the parameter that each one is."""

    folder: Path
    tensors: dict[str, StoredTensor]
    model_sha256: str | None

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(".lora_a") for name in self.tensors if name.endswith(".lora_a"))


def open_adapter(run: Run) -> Adapter | None:
    """The adapter that a resolved run begins with."""
    lora = run.model.lora
    if lora is None or lora.adapter is None:
        return None
    facts = adapter_facts(lora.adapter)
    stored, remarks = read_header(facts.folder / TENSORS_FILE)
    tensors: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        module, attribute = split_key(key, facts.folder)
        tensors[f"{module}.{attribute}"] = tensor
    adapter = Adapter(facts.folder, tensors, remarks.get(MODEL_REMARK))
    if adapter.model_sha256 is None and facts.model and Path(facts.model).name != Path(weights_path(run.model)).name:
        ours = weights_path(run.model)
        log.warning("the adapter %s was trained beside %s; this run's model is %s", lora.adapter, facts.model, ours)
    return adapter


def split_key(key: str, folder: Path) -> tuple[str, str]:
    for attribute, suffix in SUFFIXES.items():
        if key.startswith(PREFIX) and key.endswith(f".{suffix}"):
            return key.removeprefix(PREFIX).removesuffix(f".{suffix}"), attribute
    raise UserError(
        f"the adapter {folder} holds a tensor that is no LoRA matrix",
        evidence=key,
        cause="plain LoRA beside linear layers is read",
    )


def check_adapter(adapter: Adapter, reference: nn.Module, *, model_sha256: str) -> None:
    """An adapter of another model, or with other shapes, must not be trained on by accident."""
    if adapter.model_sha256 not in (None, model_sha256):
        raise UserError(
            f"the adapter {adapter.folder} belongs to another model",
            evidence=f"trained beside weights with SHA-256 {adapter.model_sha256}\nthe run's have {model_sha256}",
            fix="model.path=… (the model that it was trained beside)",
        )
    wanted = {name: tuple(parameter.shape) for name, parameter in trained_parameters(reference).items()}
    given = {name: tensor.shape for name, tensor in adapter.tensors.items()}
    wrong = [
        f"{name}: {given.get(name, 'nothing')} in the adapter, {wanted.get(name, 'nothing')} in the model"
        for name in sorted(wanted.keys() | given.keys())
        if wanted.get(name) != given.get(name)
    ]
    if wrong:
        raise UserError(
            f"the adapter {adapter.folder} does not fit the model",
            evidence="\n".join(wrong[:4]) + (f"\n… and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
            cause="it belongs to another model, or has other targets or special tokens than the run",
        )


def load_adapter(model: nn.Module, adapter: Adapter) -> None:
    for name, parameter in trained_parameters(model).items():
        fill_from(parameter, adapter.tensors[name])


def write_adapter(
    folder: Path, model: nn.Module, tensors: dict[str, Tensor], run: Run, *, model_sha256: str, dtype: torch.dtype
) -> None:
    """Write a folder that `peft` and this module read. `tensors` are by parameter name."""
    from safetensors.torch import save_file

    lora = run.model.lora
    assert lora is not None
    named = {}
    for name, tensor in tensors.items():
        module, _, attribute = name.rpartition(".")
        named[f"{PREFIX}{module}.{SUFFIXES[attribute]}"] = tensor.detach().to(dtype).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / TENSORS_FILE, metadata={"format": "pt", MODEL_REMARK: model_sha256})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": weights_path(run.model),
        "revision": run.model.revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": bool(lora.rank_stabilised),
        "target_modules": short_names(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "trainable_token_indices": token_indices(model) or None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def short_names(model: nn.Module) -> list[str]:
    """The targets by their last name where that means no other linear layer, else in full."""
    names = list(lora_layers(model))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen: dict[str, None] = {}
    for name in names:
        leaf = name.rpartition(".")[2]
        alike = [linear for linear in linears if linear == leaf or linear.endswith(f".{leaf}")]
        chosen[leaf if set(alike) <= set(names) else name] = None
    return list(chosen)


def token_indices(model: nn.Module) -> dict[str, list[int]]:
    """Ids of the tokens whose rows are in the adapter, by module; of a tied head the embedding says it."""
    indices: dict[str, list[int]] = {}
    seen: set[int] = set()
    for name, module in rows_modules(model).items():
        rows: Tensor = getattr(module, ROWS)
        if id(rows) not in seen:
            indices[name.rpartition(".")[2]] = list(range(module.first_new, module.first_new + rows.shape[0]))
            seen.add(id(rows))
    return indices
