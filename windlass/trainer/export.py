"""Turn a checkpoint into a Hugging Face folder that transformers loads, in the published layout of the family."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from windlass.checkpoint import CheckpointFolder
from windlass.data.tokenizer import tokenizer_of
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.trainer.model import facts, meta_model, model_config
from windlass.trainer.weights import materialize, restore_buffers

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(folder: RunFolder, destination: Path, *, step: int | None = None, dtype: str = "float32") -> int:
    """Write weights, configuration and tokenizer of a complete checkpoint; the step it was. One process is enough."""
    from transformers.utils import logging as transformers_logging

    run = folder.load_run()
    checkpoint = CheckpointFolder(folder.checkpoints).choose(step)
    damage = next(iter(checkpoint.damages()), None)
    if damage:
        raise UserError(
            f"the checkpoint {checkpoint.name} is damaged",
            evidence=f"{damage.file}: {damage.reason}",
            fix=f"windlass ckpt verify {folder.name}    names a whole one; then --step N",
        )
    config = model_config(run)
    model, reference = meta_model(config, run), meta_model(config, run)
    if facts(model).fingerprint != checkpoint.manifest().model["fingerprint"]:
        raise UserError(f"the checkpoint {checkpoint.path} is of another model than {folder.run_file} describes")
    materialize(model, torch.device("cpu"))
    restore_buffers(model, reference, torch.device("cpu"))
    state = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch points out that one process loads: it is meant to
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=True)
    model = model.to(DTYPES[dtype])
    config.use_cache = True

    temporary = destination.with_name(f".{destination.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(temporary)  # type: ignore[operator]
    tokenizer_of(run.data).save(temporary)
    if destination.exists():
        shutil.rmtree(destination)
    temporary.replace(destination)
    folder.record("exported", path=str(destination), step=checkpoint.step, dtype=dtype)
    log.info("exported step %d to %s", checkpoint.step, destination)
    return checkpoint.step
