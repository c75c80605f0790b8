"""Write a model's folder for transformers, tensor by tensor: memory holds one of them, however large the model is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.trainer.model.safetensors_files import INDEX_FILE, WEIGHTS_FILE, write_tensors
from windlass.trainer.model.structure import blocks, persistent_buffers

LARGEST_FILE = 5 * 10**9  # bytes, unless one tensor alone is larger
Values = Callable[[str, Tensor], Tensor]  # of a tensor, by its name in the model and its shape
Named = dict[str, Tensor]


def write_model(folder: Path, model: nn.Module, values: Values) -> None:
    """`model` is on the meta device, in the type to write; names and layout are those of published files."""
    model.save_pretrained(folder, state_dict={})  # type: ignore[operator]  # all but the weights
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    tensors = saved_tensors(model)
    parts = [(names, published(model, {name: tensors[name] for name in names})) for names in units(model, tensors)]
    files = list(files_of(parts, LARGEST_FILE))
    index: dict[str, str] = {}
    for number, file in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else WEIGHTS_FILE
        described = {key: tensor for _, made in file for key, tensor in made.items()}
        write_tensors(folder / name, described, _filled(model, tensors, [names for names, _ in file], values))
        index |= dict.fromkeys(described, name)
    if len(files) > 1:
        total = sum(_size(made) for file in files for _, made in file)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def saved_tensors(model: nn.Module) -> Named:
    """What belongs to a model's weights; a tied tensor once."""
    buffers = {name.removeprefix("model."): buffer for name, buffer in persistent_buffers(model).items()}
    return dict(model.named_parameters()) | buffers


def units(model: nn.Module, tensors: Named) -> list[list[str]]:
    """Tensors that can be brought into the published layout without the others: each alone, or those of a block."""
    alone = [[name] for name in tensors]
    whole = set(published(model, tensors))
    if whole == {key for names in alone for key in published(model, {name: tensors[name] for name in names})}:
        return alone
    of_blocks = [[name for name in tensors if name.startswith(f"{block}.")] for block in blocks(model)]
    inside = {name for names in of_blocks for name in names}
    return [*of_blocks, [name for name in tensors if name not in inside]]


def published(model: nn.Module, tensors: Named) -> Named:
    """Under the names and in the layout of the family's published files."""
    from transformers.core_model_loading import revert_weight_conversion

    made: Named = revert_weight_conversion(model, tensors)
    return made


def files_of(parts: list[tuple[list[str], Named]], largest: int) -> Iterator[list[tuple[list[str], Named]]]:
    file: list[tuple[list[str], Named]] = []
    size = 0
    for names, made in parts:
        if file and size + _size(made) > largest:
            yield file
            file, size = [], 0
        file.append((names, made))
        size += _size(made)
    yield file


def _size(tensors: Named) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _filled(model: nn.Module, tensors: Named, parts: list[list[str]], values: Values) -> Iterator[tuple[str, Any]]:
    for names in parts:
        with torch.no_grad():
            filled = {name: values(name, tensors[name]).to(tensors[name].dtype) for name in names}
            yield from published(model, filled).items()
