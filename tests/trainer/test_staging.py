"""A save is written from a copy of the state, whoever waits for it: what training does meanwhile is not in the file."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.harness import context
from tests.trainer.states import state_of
from windlass.checkpoint import CheckpointFolder
from windlass.runfolder import RunFolder
from windlass.trainer.checkpointing.tiers import Progress

pytestmark = pytest.mark.train

SLOW_S = 1.5  # what the writer sleeps before it writes


def checkpointer_of(root: str, checkpoint: dict[str, Any], *, name: str = "run", faults: str = "") -> Any:
    """In a process of its own, which is the only rank: what saves a run."""
    from windlass.plan import resolve
    from windlass.spec import parse_run
    from windlass.trainer.checkpointing.saving import Checkpointer
    from windlass.trainer.distributed.faults import Faults
    from windlass.trainer.distributed.ranks import join_ranks

    os.environ["WINDLASS_RUNS"] = root
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.pop("MASTER_ADDR", None)
    values = {"name": name, "model": {"preset": "llama3.2-tiny"}, "data": {"source": "corpus:austen"}}
    run = resolve(parse_run(values | {"checkpoint": checkpoint, "resources": {"gpus_per_node": 0}}))
    folder = RunFolder.of(run)
    folder.logs.mkdir(parents=True, exist_ok=True)
    return Checkpointer(
        run,
        folder,
        join_ranks(run),
        Faults(0, folder.logs, faults),
        model={"fingerprint": "f"},
        order={},
        sharding="none",
    )


def save_and_change(root: str, mode: str) -> None:
    """In a process of its own: save a tensor of ones, and while the writer sleeps make it a tensor of twos."""
    slow = f"sleep:point=save.staged,seconds={SLOW_S}"
    checkpointer = checkpointer_of(root, {"background": mode != "waits for every save"}, faults=slow)
    live = {"model.a": torch.ones(1000), "step": torch.tensor(1.0)}
    changer = threading.Timer(SLOW_S / 3, lambda: [tensor.fill_(2.0) for tensor in live.values()])
    changer.start()
    stalls = [checkpointer.save(Progress(500, 10, None), live, wait=mode == "must succeed", shared=True)]
    if mode == "in the background":
        stalls.append(checkpointer.save(Progress(500, 10, None), live, wait=False, shared=True))
    changer.join()
    checkpointer.finish()
    (Path(root) / "stalls.json").write_text(json.dumps(stalls))
    os._exit(0)


@pytest.mark.parametrize("mode", ["must succeed", "waits for every save", "in the background"])
def test_what_is_saved_is_what_was_there(mode: str, tmp_path: Path) -> None:
    process: Any = context.Process(target=save_and_change, args=(str(tmp_path), mode))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    checkpoint = CheckpointFolder(tmp_path / "run/checkpoints").at(500)
    assert list(checkpoint.damages()) == []
    saved = state_of(checkpoint.path)
    assert torch.equal(saved["model.a"], torch.ones(1000))
    assert saved["step"].item() == 1.0
    stalls = json.loads((tmp_path / "stalls.json").read_text())
    if mode == "in the background":
        assert max(stalls) < SLOW_S, "a second save of a step that is being written does not wait for it"
    else:
        assert stalls[0] >= SLOW_S


def save_again(root: str) -> None:
    """In a process of its own: hurry with a step that the node has already, then save a state that has grown."""
    checkpointer = checkpointer_of(root, {"every": 1000, "local_every": 1, "local_path": f"{root}/node"})
    folder = checkpointer.folder
    state = {"model.a": torch.ones(1000)}
    checkpointer.save(Progress(1, 10, None), state, wait=False)
    checkpointer.save(Progress(1, 10, None), state, wait=True, sigterm_at=time.monotonic())
    saves = [(record["tier"], record["step"]) for record in map(json.loads, folder.history.read_text().splitlines())]
    state["optimizer.a.late"] = torch.full((3,), 7.0)
    checkpointer.save(Progress(2, 20, None), state, wait=True, sigterm_at=time.monotonic())
    (Path(root) / "saves.json").write_text(json.dumps(saves))
    os._exit(0)


def test_a_step_that_a_node_has_is_not_written_there_again(tmp_path: Path) -> None:
    """A kill in the middle would leave the node with none; and what an optimizer keeps may grow between saves."""
    process: Any = context.Process(target=save_again, args=(str(tmp_path),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "saves.json").read_text()) == [["local", 1], ["shared", 1]]
    state = state_of(CheckpointFolder(tmp_path / "run" / "checkpoints").at(2).path)
    assert state["optimizer.a.late"].tolist() == [7.0] * 3


def resume_and_hurry(root: str) -> None:
    """In a process of its own: resume from the node what the lasting tier has too, and be told to stop at once."""
    from windlass.trainer.checkpointing.resuming import load, newest_whole

    written = {}
    for direct in (False, True):
        spec = {"every": 1, "local_every": 1, "local_path": f"{root}/node-{direct}", "direct": direct}
        spec |= {"store": f"{root}/store" if direct else None}
        state = {"model.a": torch.ones(1000)}
        for attempt in (1, 2):
            checkpointer = checkpointer_of(root, spec, name=f"run-{direct}")
            offer = newest_whole(checkpointer)
            checkpointer.clear_unfinished()
            if offer is not None:
                assert (attempt, offer.tier, load(offer, state, checkpointer)) == (2, "local", True)
            checkpointer.begin(offer, state)
            checkpointer.save(Progress(1, 10, None), state, wait=True, sigterm_at=time.monotonic())
        records = map(json.loads, checkpointer.folder.history.read_text().splitlines())
        written[f"run-{direct}"] = [record["tier"] for record in records if record["event"] == "checkpoint"]
    (Path(root) / "written.json").write_text(json.dumps(written))
    os._exit(0)


def test_a_step_that_was_resumed_is_not_written_again(tmp_path: Path) -> None:
    """A step is taken away before it is written again: a kill in between would lose it, in the lasting tier too."""
    process: Any = context.Process(target=resume_and_hurry, args=(str(tmp_path),))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    written = json.loads((tmp_path / "written.json").read_text())
    assert written == {"run-False": ["local", "shared"], "run-True": ["local", "store"]}
