"""Turn a checkpoint into a Hugging Face folder: a model that transformers loads, or an adapter that `peft` loads."""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from windlass.checkpoint import Checkpoint, CheckpointFolder
from windlass.checkpoint.folder import Damage
from windlass.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME
from windlass.checkpoint.pickles import UnsafePickleError
from windlass.checkpoint.proven import DamagedError, ProvenFiles
from windlass.common import own_code
from windlass.common.files import read_json_lines, whole
from windlass.data.sequences.opening import tokenizer_of
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.checkpointing.materialize import obtain_to_read
from windlass.trainer.checkpointing.resuming import check_same_model, model_settings
from windlass.trainer.checkpointing.tensor_files import TensorReader
from windlass.trainer.model.adapters import open_adapter, write_adapter
from windlass.trainer.model.hub_files import Located, locate
from windlass.trainer.model.lora import lora_layers
from windlass.trainer.model.new_tokens import ROWS, rows_modules
from windlass.trainer.model.pretrained import Weights, find_weights, one_digest, read_tensor
from windlass.trainer.model.structure import facts, meta_model, trained_parameters
from windlass.trainer.model.weights import materialize, restore_buffers
from windlass.trainer.model.whole_models import Values, saved_tensors, write_model
from windlass.trainer.preparation import structure
from windlass.trainer.results.model_card import write_card

log = logging.getLogger(__name__)
TRIES = 20  # to take hold of a checkpoint of a run that goes on
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    step: int
    kind: str  # "model" or "adapter"
    dtype: str


def export_checkpoint(
    folder: RunFolder,
    destination: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    merge: bool = False,
    license: str | None = None,
) -> Exported:
    """Write a complete checkpoint with its tokenizer; of a LoRA run the adapter, or with `merge` the whole model.

    One process is enough. The default of `dtype` is the run's `checkpoint.export_dtype`; `license` is for the card.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    run = folder.load_run()
    kind = kind_of(run, merge=merge)
    with reading(folder, step) as checkpoint:
        dtype = dtype or run.checkpoint.export_dtype
        return _export(folder, run, checkpoint, destination, dtype=dtype, kind=kind, license=license)


def kind_of(run: Run, *, merge: bool) -> str:
    """What an export of a run is: its model, or its adapter unless that is merged."""
    if merge and run.model.lora is None:
        raise UserError(f"the run {run.name} has no adapter to merge: it trains the whole model", fix="drop --merge")
    return "adapter" if run.model.lora is not None and not merge else "model"


def exported_to(folder: RunFolder, destination: Path) -> Exported | None:
    """What a folder holds that this run was exported to, as its history says."""
    records = [record for record in read_json_lines(folder.history) if record.get("event") == "exported"]
    of_folder = [record for record in records if Path(str(record.get("path"))).absolute() == destination.absolute()]
    if not of_folder or not destination.is_dir():
        return None
    record = of_folder[-1]
    return Exported(whole(record.get("step")) or 0, str(record.get("kind")), str(record.get("dtype")))


@contextlib.contextmanager
def reading(folder: RunFolder, step: int | None) -> Iterator[ProvenFiles]:
    """A checkpoint that stays while it is read, whatever a run that goes on lets go meanwhile."""
    checkpoints = CheckpointFolder(folder.checkpoints)
    for _ in range(TRIES):
        source = obtain_to_read(folder, step)
        if isinstance(source, ProvenFiles):
            yield source
            return
        try:
            pinned = checkpoints.pin(source)
        except FileNotFoundError:  # it was the newest a moment ago
            continue
        try:
            yield _files_of(pinned, folder)
        finally:
            checkpoints.unpin(pinned)
        return
    raise UserError(
        f"the run {folder.name} lets its checkpoints go faster than they can be read",
        fix="checkpoint.keep=3 or more, or export when it is finished",
    )


def _files_of(checkpoint: Checkpoint, folder: RunFolder) -> ProvenFiles:
    try:
        return ProvenFiles.of_folder(checkpoint)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(checkpoint.step, Damage(MANIFEST_NAME, str(error) or type(error).__name__), folder) from None


def _unfit(checkpoint: ProvenFiles, damage: Damage, folder: RunFolder | None = None) -> UserError:
    """Damaged, or let go by a run that goes on: one in a store, or without hard links, cannot be kept from that."""
    if checkpoint.store.stat(MANIFEST_NAME) is None:
        return UserError(f"step {checkpoint.step} was let go while it was read", fix="the same command again")
    return _damaged(checkpoint.step, damage, folder)


def _damaged(step: int, damage: Damage, folder: RunFolder | None = None) -> UserError:
    return UserError(
        f"the checkpoint of step {step} is damaged",
        evidence=f"{damage.file}: {damage.reason}",
        fix=f"windlass ckpt verify {folder.name if folder else 'NAME'}    names a whole one; then --step N",
    )


@dataclass(frozen=True)
class Opened:
    """A checkpoint with what it takes to make a model of it."""

    located: Located
    config: Any
    reference: nn.Module


def opened(folder: RunFolder, run: Run, checkpoint: ProvenFiles) -> Opened:
    """Read a checkpoint that is whole and of this run's model. UserError for any other."""
    own_code.use_folder(run.code)
    damages = checkpoint.misfits() or list(checkpoint.damages(checkpoint.unproven()))
    if damages:
        raise _unfit(checkpoint, damages[0], folder)
    located = locate(run)
    config, _, reference = structure(run, located, open_adapter(run))
    check_same_model(
        checkpoint.manifest.model,
        facts(reference).as_dict(config) | model_settings(config, reference),
        where=f"the checkpoint of step {checkpoint.step}",
        fix=f"put the model's former config.json back, or model.config of {folder.run_file}",
    )
    return Opened(located, config, reference)


def _export(
    folder: RunFolder,
    run: Run,
    checkpoint: ProvenFiles,
    destination: Path,
    *,
    dtype: str,
    kind: str,
    license: str | None,
) -> Exported:
    parts = opened(folder, run, checkpoint)
    located, config, reference = parts.located, parts.config, parts.reference
    if not hasattr(reference, "save_pretrained"):
        raise UserError(
            f"{run.model.label} cannot be written as a Hugging Face folder",
            cause="transformers loads subclasses of its PreTrainedModel alone",
            fix=f"windlass ckpt get {folder.name}    has its weights, by name",
        )
    temporary = destination.with_name(f".{destination.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    if kind == "adapter":
        frozen = checkpoint.manifest.model["frozen"]
        trained = read_trained(checkpoint, reference)
        write_adapter(temporary, reference, trained, run, model_sha256=frozen["sha256"], dtype=DTYPES[dtype])
    else:
        plain = meta_model(config, run).to(DTYPES[dtype])
        plain.config.use_cache = True  # type: ignore[union-attr]
        write_model(temporary, plain, values_of(run, config, located, checkpoint, reference))
    tokenizer_of(run.data, located.tokenizer).save(temporary)
    write_card(temporary, folder, run, checkpoint.manifest, kind=kind, dtype=dtype, license=license)
    if destination.exists():
        shutil.rmtree(destination)
    temporary.replace(destination)
    folder.record("exported", path=str(destination), step=checkpoint.step, dtype=dtype, kind=kind)
    log.info("exported the %s of step %d to %s", kind, checkpoint.step, destination)
    return Exported(checkpoint.step, kind, dtype)


def read_trained(checkpoint: ProvenFiles, reference: nn.Module) -> dict[str, Tensor]:
    """What the checkpoint holds of the parameters that were trained."""
    read = CheckpointValues(checkpoint)
    return {name: read(name, value) for name, value in trained_parameters(reference).items()}


class CheckpointValues:
    """Tensors of a checkpoint, one at a time. What describes them all is read once."""

    def __init__(self, checkpoint: ProvenFiles) -> None:
        self.reader = TensorReader(checkpoint)
        try:
            self.reader.read_metadata()
        except DamagedError as error:
            raise _unfit(checkpoint, error.damage) from None
        except UnsafePickleError as error:
            raise _damaged(checkpoint.step, Damage(METADATA_NAME, str(error))) from None

    def __call__(self, name: str, like: Tensor) -> Tensor:
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        state = {f"model.{name}": torch.empty(like.shape, dtype=dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch points out that one process loads: it is meant to
            dcp.load(state, storage_reader=self.reader, no_dist=True)
        self.reader.blocks.check_reached()
        for damage in self.reader.blocks.problems:
            raise _unfit(self.reader.files, damage)
        return state[f"model.{name}"]


def values_of(run: Run, config: Any, located: Located, checkpoint: ProvenFiles, reference: nn.Module) -> Values:
    """Of the plain model: from the checkpoint, or the model's own with what was trained added to them."""
    if run.model.lora is None:
        return CheckpointValues(checkpoint)
    assert located.weights is not None
    weights = find_weights(located.weights, meta_model(config, run), trusted=run.model.trust_remote_code)
    check_same_weights(weights, checkpoint)
    trained, layers, rows = read_trained(checkpoint, reference), lora_layers(reference), rows_modules(reference)

    def merged(name: str, like: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        value = read_tensor(weights, name, like)
        if module in layers:  # W + scale · B A
            product = trained[f"{module}.lora_b"] @ trained[f"{module}.lora_a"]
            value.add_(product, alpha=layers[module].lora_scale)
        if module in rows and f"{module}.{ROWS}" in trained:  # a tied head has its rows from the embedding
            new, first = trained[f"{module}.{ROWS}"], rows[module].first_new
            value[first : first + len(new)] = new
        return value

    return merged


def whole_model(run: Run, parts: Opened, checkpoint: ProvenFiles) -> nn.Module:
    """The model in fp32, plain, in memory."""
    model = meta_model(parts.config, run)
    cpu = torch.device("cpu")
    materialize(model, cpu)
    restore_buffers(model, meta_model(parts.config, run), cpu)
    values = values_of(run, parts.config, parts.located, checkpoint, parts.reference)
    with torch.no_grad():
        for name, tensor in saved_tensors(model).items():
            tensor.copy_(values(name, tensor))
    return model


def check_same_weights(weights: Weights, checkpoint: ProvenFiles) -> None:
    expected, actual = checkpoint.manifest.model["frozen"]["sha256"], one_digest(weights.hashes())
    if actual != expected:
        raise UserError(
            f"{weights.folder} is not the model that this adapter was trained beside",
            evidence=f"its weights have SHA-256 {actual}, the checkpoint says {expected}",
            fix="put the model's former files back; without --merge the adapter alone is exported",
        )
