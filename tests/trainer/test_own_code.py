"""Code of the user's own by import path: it trains, resumes bitwise after kill -9; mistakes in it are said early."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml

from tests.trainer.harness import resume, train
from windlass.common import own_code
from windlass.errors import UserError
from windlass.plan import check, resolve
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.trainer.callbacks.history import code_before

EXAMPLE = Path(__file__).parents[2] / "examples" / "own"


def own_run(**train_changes):
    run = yaml.safe_load((EXAMPLE / "own.yaml").read_text())
    run["train"] |= {"steps": 8, "log_every": 1, **train_changes}
    return run | {"name": "own", "code": str(EXAMPLE), "checkpoint": {"every": 3}}


@pytest.mark.train
def test_own_model_loss_data_optimizer_and_callback_resume_bitwise_after_a_kill(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", own_run(), ranks=2)
    assert whole.codes == [0, 0], whole.output
    assert len(whole.losses) == 8
    assert whole.records("validation")[-1]["sequences"] == 50

    killed = train(tmp_path / "killed", own_run(), ranks=2, faults="kill:rank=1,step=6")
    assert -9 in killed.codes
    killed.folder.record("rank-died", rank=1, signal="SIGKILL", code=-9)  # as a supervisor writes it
    resumed = resume(tmp_path / "killed", own_run(), ranks=2)
    assert resumed.events("resumed")[0]["step"] == 3
    assert resumed.losses == whole.losses
    assert resumed.grad_norms == whole.grad_norms
    assert not resumed.events("code-changed")

    alone = train(tmp_path / "alone", own_run(callbacks=[]), ranks=1)  # the same data in the same order
    assert all(math.isclose(alone.losses[step], whole.losses[step], rel_tol=1e-5) for step in whole.losses)


@pytest.mark.train
def test_windlass_train_takes_objects_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: torch's process groups stay out of the tests'."""
    import subprocess
    import sys

    program = tmp_path / "program.py"
    program.write_text(
        "import sys, windlass\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import parts\n"
        "from windlass.trainer.callbacks.callback import Callback\n"
        "steps = []\n"
        "class Count(Callback):\n"
        "    def after_step(self, state): steps.append(state.step)\n"
        "class Few(parts.Counting):\n"
        "    def __len__(self): return 20\n"
        "config = dict(vocabulary=256, width=16, depth=1)\n"
        "run = windlass.Run(name='here', model={'class': 'parts:Model', 'config': config},\n"
        "    data={'tokenizer': 'tiny', 'sequence_length': 16},\n"
        "    train=dict(steps=4, global_batch=4, precision='fp32'), resources={'gpus_per_node': 0})\n"
        "local = lambda named, train: parts.sgd(named, train)\n"
        "def go(steps, **more):\n"
        "    longer = run.model_copy(update={'train': run.train.model_copy(update={'steps': steps})})\n"
        "    return windlass.train(longer, data=Few(run, 'train'), loss=parts.smoothed, callbacks=[Count], **more)\n"
        "first = go(4, optimizer=local)\n"
        "assert (first.state, first.step) == ('finished', 4), first\n"
        "second = go(6, optimizer=local)\n"
        "assert (second.step, steps) == (6, [1, 2, 3, 4, 5, 6]), (second, steps)\n"
        "try: go(8, optimizer=lambda named, train: None)\n"
        "except windlass.UserError as error: print(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    done = subprocess.run([sys.executable, program, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "made a NoneType" in done.stdout


@pytest.mark.parametrize(
    ("section", "key", "path", "words"),
    [
        ("model", "class", "parts:Modle", "model.class=parts:Model"),
        ("train", "loss", "no_such:loss", "has a module no_such"),
        ("train", "loss", "smoothed", "train.loss must be an import path, my.module:name, not 'smoothed'"),
        ("train", "optimizer", "parts:Adam", "has no 'Adam'"),
        ("train", "callbacks", ["parts:Reprot"], "train.callbacks=parts:Report"),
        ("data", "source", "python:parts:Count", "data.source=python:parts:Counting"),
        ("train", "fused_head", True, "computes its own loss"),
        ("train", "bf16_weights", True, "the run has another"),
        ("model", "init", "pretrained", "random weights"),
    ],
)
def test_mistakes_are_said_before_anything_starts(section, key, path, words):
    values = own_run()
    values[section][key] = path
    with pytest.raises(UserError) as told:
        check(resolve(parse_run(values)), 2)
    assert words in str(told.value)


def test_an_object_without_an_import_path_belongs_to_its_process():
    assert own_code.path_of(own_code.check, "train.loss") == "windlass.common.own_code:check"
    path = own_code.path_of(lambda: 3, "train.loss")
    assert path == "given:train_loss"
    assert own_code.load(path, "train.loss")() == 3
    own_code._given.clear()
    with pytest.raises(UserError, match="of the program that started this run"):
        own_code.load(path, "train.loss")


def test_a_list_or_an_array_is_a_dataset():
    import numpy as np

    for items in ([[1, 2, 3]], np.ones((3, 4), dtype=np.int64)):
        path = own_code.path_of(items, "data.source")
        assert own_code.load(path, "data.source") is items


def test_every_item_of_a_small_dataset_counts_for_its_fingerprint():
    from windlass.data.sequences.own import OwnDataset

    def fingerprint(items):
        settings = {"sequence_length": 4, "vocab_size": 100, "tokenizer": ("tiny", "")}
        return OwnDataset(items, name="parts:Items", **settings, num_sequences=len(items)).fingerprint()

    items = [[number, number] for number in range(10)]
    for changed in range(10):
        assert fingerprint(items) != fingerprint([[99, 99] if row[0] == changed else row for row in items]), changed


def test_a_change_in_any_file_of_own_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the first of several callbacks, and of a file that a package only passes on."""
    package = tmp_path / "digested"
    package.mkdir()
    (package / "__init__.py").write_text("from digested.inner import Second\n")
    (package / "inner.py").write_text("class Second: pass\n")
    (tmp_path / "digested_first.py").write_text("class First: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    named = [("train.callbacks", "digested_first:First"), ("train.callbacks", "digested:Second")]
    for key, path in named:
        own_code.load(path, key)
    seen = [own_code.source_digests(named)]
    for file in (tmp_path / "digested_first.py", package / "inner.py"):
        file.write_text(file.read_text() + "# changed\n")
        seen.append(own_code.source_digests(named))
    assert len({digests["train.callbacks"] for digests in seen}) == 3


def test_only_code_is_compared_with_code(tmp_path: Path) -> None:
    """Supervisors write exit codes under the same key, between a kill and the resume."""
    folder = RunFolder(tmp_path)
    assert code_before(folder) == {}
    folder.record("started", step=0, code={"train.loss": "old"})
    folder.record("resumed", step=3, code={"train.loss": "new"})
    folder.record("rank-died", rank=0, code=-9)
    folder.record("exit", state="failed", code=1)
    assert code_before(folder) == {"train.loss": "new"}


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_what_an_optimizer_counts_in_its_groups_is_refused():
    """It would not be in a checkpoint: a resume would go on with another number, and nobody would know."""
    from windlass.spec.training import TrainSection
    from windlass.trainer.optimizer import OwnOptimizer

    for make, is_refused in ((torch.optim.SGD, False), (Counting, True)):
        path = own_code.path_of(lambda named, train, make=make: make([p for _, p in named], lr=0.1), "train.optimizer")
        model = torch.nn.Linear(2, 2)
        optimizer = OwnOptimizer(model, TrainSection(optimizer=path), goes_on=False)
        optimizer.state()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.apply(0.1, loss.detach())
        if not is_refused:
            optimizer.state()
            continue
        with pytest.raises(UserError, match="keeps k in its groups"):
            optimizer.state()
