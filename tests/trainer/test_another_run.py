"""A checkpoint is continued by the run that made it, and by no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import tiny_run
from tests.trainer.harness import train
from windlass.checkpoint import CheckpointFolder

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    assert train(root, tiny_run(corpus, train__steps=2), ranks=2).codes == [0, 0]
    return root


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"model__config": {"hidden_size": 32, "head_dim": 16}}, "hidden_size: 64 there, 32 here"),
    ({"model__preset": "mistral-tiny"}, "is of another model"),
    ({"model__config": {**SHAPE, "rms_norm_eps": 0.1, "num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4,
                        "hidden_act": "relu", "rope_theta": 77.0}},
     "head_dim: 16 there, 8 here"),
    ({"train__seed": 1}, "seed: 0 there, 1 here"),
    ({"data__sequence_length": 16}, "sequence_length: 32 there, 16 here"),
    ({"data__shuffle": False}, "shuffle: True there, False here"),
    ({"data__source": "corpus:austen"}, "source: "),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), OTHERS, ids=lambda one: "".join(one) if isinstance(one, dict) else "")
def test_a_difference_is_named(
    changes: dict[str, Any], named: str, finished: Path, corpus: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(finished, tmp_path / "copy"))
    other = train(root, tiny_run(corpus, train__steps=4, **changes), ranks=2, attempt=2)
    assert other.codes == [2, 2], other.output
    assert other.output.count("error: the checkpoint ") == 1
    assert named in other.output
    if "hidden_act" in changes.get("model__config", {}):  # the shapes are the same: only the settings tell
        for key in changes["model__config"].keys() - SHAPE.keys():
            assert f"{key}: " in other.output
    assert [checkpoint.step for checkpoint in CheckpointFolder(other.folder.checkpoints).complete()] == [2]


def test_resume_switched_off(finished: Path, corpus: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(finished, tmp_path / "copy"))
    run = tiny_run(corpus, train__steps=4, checkpoint__resume=False)
    refused = train(root, run, ranks=2, attempt=2)
    assert refused.codes == [2, 2]
    assert "checkpoint.resume is false" in refused.output
    assert "step-00000002" in refused.output


def test_the_refused_run_leaves_the_run_file_alone(finished: Path, corpus: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(finished, tmp_path / "copy"))
    before = (root / "runs/run/run.yaml").read_text()
    train(root, tiny_run(corpus, train__steps=4, train__seed=1), ranks=2, attempt=2)
    assert (root / "runs/run/run.yaml").read_text() == before
