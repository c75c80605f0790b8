"""Model presets: true published configurations, and tiny ones of the same families for tests and demos."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from windlass.common.hub import is_hub_id
from windlass.errors import UserError
from windlass.spec.training import ModelSection


@dataclass(frozen=True)
class Preset:
    name: str
    config: dict[str, Any]  # transformers configuration, with its model_type
    hub_id: str | None  # where the published weights and tokenizer are; None for the tiny ones
    tokenizer: str | None
    num_parameters: int | None  # as published


@cache
def presets() -> dict[str, Preset]:
    entries = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    return {
        name: Preset(
            name=name,
            config=entry["config"],
            hub_id=entry.get("hub_id"),
            tokenizer=entry.get("tokenizer") or entry.get("hub_id"),
            num_parameters=entry.get("num_parameters"),
        )
        for name, entry in entries.items()
    }


def preset(name: str, *, given_as: str = "model.preset=") -> Preset:
    if name in presets():
        return presets()[name]
    near = difflib.get_close_matches(name.lower(), presets(), 1, cutoff=0.5)
    raise UserError(
        f"there is no model preset {name!r}",
        evidence=f"presets: {', '.join(presets())}",
        fix=f"{given_as}{near[0]}" if near else "windlass init --list",
    )


def known_config(model: ModelSection) -> dict[str, Any] | None:
    """The transformers configuration of a model as far as it is known without asking a hub: of presets and folders."""
    if model.own_class:
        return None
    if model.preset:
        base = preset(model.preset).config
    else:
        folder = Path(model.path or "")
        if is_hub_id(model.path or ""):
            return None
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(
                f"model.path {folder} holds no model",
                evidence=f"{file} does not exist",
                cause="a transformers model folder holds config.json" if folder.is_dir() else "the folder is missing",
                fix=f"windlass ckpt export {folder.parent.name}    writes it"
                if folder.name == "export"
                else "model.path=FOLDER    that holds a model, or a hub id",
            )
        try:
            base = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(
                f"{file} is not valid JSON", evidence=str(error), fix="model.path=FOLDER    whose config.json is whole"
            ) from None
    return {**base, **model.config}


def default_tokenizer(model: ModelSection) -> str:
    return (preset(model.preset).tokenizer or "tiny") if model.preset else model.path or "tiny"
