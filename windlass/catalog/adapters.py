"""What an adapter in the format of `peft` says about itself, and whether it is of a kind that can be trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.common.hub import local_folder
from windlass.errors import UserError
from windlass.spec.training import LoraSection

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
DEFAULT_RANK = 16
# Variants that compute something else than W + scale · B A; each must be unset.
VARIANTS = (
    "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "target_parameters",
    "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "megatron_config", "kasa_config",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterFacts:
    """The parts of adapter_config.json that decide what is computed."""

    folder: Path
    rank: int
    alpha: float
    rank_stabilised: bool
    model: str | None  # that it was trained beside, by its path there


def adapter_facts(adapter: str) -> AdapterFacts:
    """Of a folder or hub id."""
    folder = local_folder(adapter, files=(CONFIG_FILE, TENSORS_FILE), what="adapter")
    missing = [name for name in (CONFIG_FILE, TENSORS_FILE) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"model.lora.adapter {adapter} holds no adapter",
            evidence=f"{folder / missing[0]} does not exist",
            cause=f"an adapter is a folder with {CONFIG_FILE} and {TENSORS_FILE}, as `peft` writes it",
            fix="model.lora.adapter=FOLDER    that holds both; windlass ckpt export RUN writes one",
        )
    try:
        values: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        facts = AdapterFacts(
            folder=folder,
            rank=int(values["r"]),
            alpha=float(values["lora_alpha"]),
            rank_stabilised=bool(values.get("use_rslora", False)),
            model=values.get("base_model_name_or_path"),
        )
        used = [name for name in VARIANTS if values.get(name)]
        kind, bias = values.get("peft_type"), values.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder / CONFIG_FILE} is not the configuration of a LoRA adapter",
            evidence=f"{type(error).__name__}: {error}",
            fix="model.lora.adapter=FOLDER    as `peft` writes it",
        ) from None
    if kind != "LORA" or bias != "none" or used:
        unsupported = f"peft_type {kind}" if kind != "LORA" else f"bias {bias}" if bias != "none" else ", ".join(used)
        raise UserError(
            f"the adapter {adapter} is of a kind that cannot be trained on",
            evidence=f"{CONFIG_FILE} has {unsupported}",
            cause="plain LoRA beside linear layers is read",
            fix="model.lora.adapter=null    begins with a new one",
        )
    return facts


def resolve_lora(lora: LoraSection) -> LoraSection:
    """The section with rank, alpha and scaling filled in: from its adapter, else from defaults."""
    if lora.adapter is None:
        rank = lora.rank or DEFAULT_RANK
        filled = {"rank": rank, "alpha": lora.alpha or 2.0 * rank, "rank_stabilised": bool(lora.rank_stabilised)}
        return lora.model_copy(update=filled)
    facts = adapter_facts(lora.adapter)
    own = {"rank": facts.rank, "alpha": facts.alpha, "rank_stabilised": facts.rank_stabilised}
    for name, value in own.items():
        requested = getattr(lora, name)
        if requested is not None and requested != value:
            raise UserError(
                f"model.lora.{name} is {requested}, but the adapter {lora.adapter} has {value}",
                fix=f"model.lora.{name}={json.dumps(value)}, or drop it",
            )
    return lora.model_copy(update=own)
