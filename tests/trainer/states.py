"""Read a checkpoint without windlass, and look into the models that ranks train."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.trainer.harness import train
from windlass.checkpoint import CheckpointFolder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, read without windlass."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(value.size) for name, value in metadata.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch points out that one process loads: it is meant to
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by the names transformers gives them."""
    return {
        name.removeprefix("model."): tensor for name, tensor in state_of(folder).items() if name.startswith("model.")
    }


def first_weights(root: Path, run: dict[str, Any], ranks: int) -> dict[str, Tensor]:
    """The weights a run begins with: stopped before its first step, it saves them."""
    result = train(root, run, ranks=ranks, faults="term:step=1")
    assert result.codes == [75] * ranks, result.output
    return weights_of(CheckpointFolder(result.folder.checkpoints).at(0).path)


def looking(folder: Path) -> Callable[[int], None]:
    """A prelude: every rank writes its model's buffers, and at each step whether its embeddings are tied."""
    return functools.partial(_look, folder)


def _look(folder: Path, rank: int) -> None:
    from windlass.trainer import state
    from windlass.trainer.step import Stepper

    build, backward = state.build_model, Stepper.backward

    def built(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        torch.save({name: buffer.clone() for name, buffer in model.named_buffers()}, folder / f"buffers-{rank}.pt")
        return model

    def noted(self: Stepper, *args: Any, **options: Any) -> Any:
        losses = backward(self, *args, **options)
        model: Any = self.model
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        with (folder / f"tied-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(tied) + "\n")
        return losses

    state.build_model = built
    Stepper.backward = noted  # type: ignore[method-assign]
