"""A model larger than the memory of its process is exported, tensor by tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from tests.store.s3_server import FaultyS3
from tests.targets.test_oom import memory_limited
from windlass.checkpoint import Checkpoint, CheckpointFolder, FileRecord, Manifest, hash_file
from windlass.checkpoint.stored import StoredCheckpoints, write_current_id
from windlass.plan import resolve
from windlass.runfolder import RunFolder
from windlass.spec.loading import parse_run
from windlass.store import open_store
from windlass.trainer.checkpointing.resuming import model_settings
from windlass.trainer.model.structure import facts, meta_model, model_config

pytestmark = [pytest.mark.slow, pytest.mark.train]

LIMIT = 1000 * 2**20
PROGRAM = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from windlass.runfolder import RunFolder
from windlass.trainer.export import export_checkpoint
from windlass.trainer.checkpointing.materialize import obtain
folder, out = RunFolder(Path(sys.argv[2])), Path(sys.argv[3])
export_checkpoint(folder, out, dtype="float32")
obtain(folder, 1, to=out.with_name("got"))
"""


@pytest.mark.parametrize("place", ["folder", pytest.param("store", marks=pytest.mark.campaign_only)])
def test_a_model_larger_than_the_memory_of_its_process(place: str, s3: FaultyS3, tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5, "head_dim": 512}
    model = {"preset": "llama3.2-tiny", "config": sizes}
    run = resolve(
        parse_run(
            {
                "name": "large",
                "model": model,
                "data": {"source": "corpus:austen", "tokenizer": "tiny"},
                "checkpoint": {"store": "s3://bucket/runs"} if place == "store" else {},
            }
        )
    )
    folder = RunFolder(tmp_path / "large")
    folder.create(run)
    config = model_config(run)
    reference = meta_model(config, run)
    torch.manual_seed(0)
    state = {f"model.{name}": torch.randn(like.shape) for name, like in reference.named_parameters()}
    size = sum(tensor.nbytes for tensor in state.values())
    assert size > 1.2 * LIMIT
    checkpoint = CheckpointFolder(folder.checkpoints).at(1)
    checkpoint.path.mkdir(parents=True)
    # moto reads all of an object for every range of it: a file for each tensor there.
    writer = dcp.FileSystemWriter(checkpoint.path, single_file_per_rank=place == "folder")
    dcp.save(state, storage_writer=writer, no_dist=True)
    files = {path.name: hash_file(path) for path in checkpoint.path.iterdir()}
    identity = facts(reference).as_dict(config) | model_settings(config, reference)
    checkpoint.publish(Manifest(step=1, tokens=1, files=files, model=identity, order={}, data_state=None))
    if place == "store":
        move_to_store(checkpoint, files)
    with memory_limited(LIMIT) as group:
        words = [sys.executable, "-c", PROGRAM, str(group), str(folder.path), str(tmp_path / "out")]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert answer.returncode == 0, answer.stderr[-3000:]
    assert list(CheckpointFolder(tmp_path / "got").at(1).damages()) == []
    assert place == "folder" or not checkpoint.path.exists(), "it is read where it is"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as exported:
        names = list(exported.keys())
        assert {f"model.{name}" for name in names} == set(state)
        for name in names:
            assert torch.equal(exported.get_tensor(name), state[f"model.{name}"]), name


def move_to_store(checkpoint: Checkpoint, files: dict[str, FileRecord]) -> None:
    store = open_store("s3://bucket/runs")
    write_current_id(store, "large", "id")
    stored = StoredCheckpoints.of_run(store, "large", "id")
    for name, record in files.items():
        stored.put(checkpoint, name, record)
    stored.publish(checkpoint.manifest())
    checkpoint.delete()
