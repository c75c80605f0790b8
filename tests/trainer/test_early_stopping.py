"""A run ends when validations stop improving, keeps its best checkpoint, and a kill changes neither."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.campaign import campaign
from tests.trainer.conftest import tiny_run
from tests.trainer.harness import Result, resume, start, train
from tests.trainer.states import weights_of
from tests.trainer.test_bad_input import assert_refused
from windlass.checkpoint import CheckpointFolder
from windlass.checkpoint.pruning import best_step
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.trainer.callbacks.early_stopping import EarlyStopping

pytestmark = pytest.mark.train


def stopping_run(corpus: Path, **changes: Any) -> dict[str, Any]:
    """It learns a little training text by heart, and soon knows the rest of the text less well."""
    run = tiny_run(corpus, data__holdout=0.3, checkpoint={"every": 100, "keep": 1, "keep_best": True})
    run["train"] |= {
        "steps": 400,
        "learning_rate": 2e-2,
        "global_batch": 4,
        "validate_every": 5,
        "schedule": "constant",
    }
    run["train"] |= {"early_stopping": {"patience": 2}, "validation_sequences": 16}
    run["data"]["sequence_length"] = 64
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        run[section][leaf] = value
    return run


@pytest.fixture(scope="module")
def little(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("little") / "little.jsonl"
    path.write_text("".join(line + "\n" for line in corpus.read_text().splitlines()[:12]))
    return path


def losses(result: Result) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in result.records("validation")}


@pytest.fixture(scope="module")
def stopped(little: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    result = train(tmp_path_factory.mktemp("stopped"), stopping_run(little, checkpoint__export=True), ranks=2)
    assert result.codes == [0, 0], result.output
    return result


def test_it_ends_after_its_patience(stopped: Result) -> None:
    seen = losses(stopped)
    best = min(seen, key=lambda step: seen[step])
    assert max(seen) == best + 2 * 5 < 400
    (end,) = stopped.events("finished")
    assert end["step"] == max(seen)
    assert f"no validation since step {best} was better" in end["early"]
    assert "finished after step" in stopped.output


def test_the_best_checkpoint_is_kept_and_exported(stopped: Result) -> None:
    seen = losses(stopped)
    best = min(seen, key=lambda step: seen[step])
    checkpoints = CheckpointFolder(stopped.folder.checkpoints)
    kept = [checkpoint.step for checkpoint in checkpoints.complete()]
    assert best in kept
    assert max(seen) in kept
    assert not [step for step in kept if step not in (best, max(seen))], "former bests are let go"
    (exported,) = stopped.events("exported")
    assert exported["step"] == best
    written = load_file(stopped.folder.export / "model.safetensors")
    weights = weights_of(checkpoints.at(best).path)
    assert all((written[name] == weights[name]).all() for name in written)


def test_evaluation_is_reported(stopped: Result) -> None:
    for record in stopped.records("validation"):
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert 0 <= record["accuracy"] <= 1
    assert max(record["accuracy"] for record in stopped.records("validation")) > 0.02


def test_a_stopped_run_stays_stopped(stopped: Result, little: Path) -> None:
    root = stopped.folder.path.parent.parent
    before = losses(stopped)
    again = train(root, stopping_run(little, checkpoint__export=True), ranks=2, attempt=2)
    assert again.codes == [0, 0], again.output
    assert losses(again) == before
    assert max(again.losses) == max(before)


@pytest.mark.parametrize(
    ("kill", "every"),
    campaign(
        [
            ("kill:rank=1,step={after_best}", 5),  # resumes from a step with its validation: that counts once
            ("kill:rank=0,step=10,point=validation.batch", 4),
            ("kill:rank=1,step=12", 4),
        ],
        always=2,
    ),
)
def test_a_kill_changes_neither_end_nor_best(
    kill: str, every: int, stopped: Result, little: Path, tmp_path: Path
) -> None:
    run = stopping_run(little, checkpoint__background=False, checkpoint__every=every)
    seen = losses(stopped)
    kill = kill.format(after_best=min(seen, key=lambda step: seen[step]) + 5 + 2)
    train(tmp_path, run, ranks=2, faults=kill)
    result = resume(tmp_path, run, ranks=2)
    assert losses(result) == losses(stopped)
    assert result.losses == stopped.losses
    assert [event["step"] for event in result.events("finished")] == [
        event["step"] for event in stopped.events("finished")
    ][:1]


def test_accuracy_is_the_same_with_the_fused_head_and_on_any_ranks(little: Path, tmp_path: Path) -> None:
    seen = []
    for ranks, fused in ((1, False), (1, True), (3, True)):
        run = stopping_run(little, train__fused_head=fused, train__steps=10)
        result = train(tmp_path / f"{ranks}{fused}", run, ranks=ranks)
        seen.append([(round(record["loss"], 4), record["accuracy"]) for record in result.records("validation")])
    assert seen[0] == seen[1] == seen[2]


def test_a_new_machine_knows_the_best_and_how_long_ago_it_was(stopped: Result, little: Path, tmp_path: Path) -> None:
    """Killed after the best; the run folder is lost with its metrics, the store has the best and the newest."""
    seen = losses(stopped)
    best = min(seen, key=lambda step: seen[step])
    run = stopping_run(little, checkpoint__background=False, checkpoint__every=5, checkpoint__store=str(tmp_path / "s"))
    job = start(tmp_path / "old", run, ranks=2, faults=f"sleep:step={best + 5 + 2},seconds=100")
    job.wait_for(lambda: best + 5 in {event["step"] for event in Result(job.folder, [], "").events("uploaded")})
    for process in job.processes:
        process.kill()
    job.result()
    resumed = resume(tmp_path / "new", run, ranks=2)
    assert resumed.events("resumed")[0]["step"] == best + 5
    assert [event["step"] for event in resumed.events("finished")] == [
        event["step"] for event in stopped.events("finished")
    ][:1]
    (run_id,) = [path for path in (tmp_path / "s/run").iterdir() if path.is_dir()]
    assert [checkpoint.step for checkpoint in CheckpointFolder(run_id).complete()] == [best, max(seen)]
    assert best_step(resumed.folder) == best


class Alone:
    is_first = True

    def broadcast(self, value: Any, *, patient: bool = False) -> Any:
        return value


def early_stopping(folder: RunFolder, step: int = 10**6, **stopping: Any) -> EarlyStopping:
    train_section = {"validate_every": 1, "early_stopping": stopping}
    run = parse_run({"model": {"preset": "llama-tiny"}, "data": {}, "train": train_section})
    return EarlyStopping(run, folder, Alone(), step=step)  # type: ignore[arg-type]


def test_patience_and_margin(tmp_path: Path) -> None:
    stopping = early_stopping(RunFolder(tmp_path), patience=2, min_delta=0.1)
    observed = [
        (stopping.observe(step, loss), stopping.should_stop)
        for step, loss in enumerate([3.0, 2.95, 2.85, 2.8, 2.9], start=1)
    ]
    assert observed == [(True, False), (False, False), (True, False), (False, False), (False, True)]
    assert stopping.best_step == 3


def test_what_was_validated_before_a_resume_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    records = [(5, 3.0), (10, 2.0), (15, 2.5), (15, 2.4), (20, 2.2)]
    folder.metrics.write_text(
        "".join(json.dumps({"kind": "validation", "step": step, "loss": loss}) + "\n" for step, loss in records)
    )
    assert (
        early_stopping(folder, patience=2).should_stop,
        early_stopping(folder, step=15, patience=2).should_stop,
    ) == (True, False)
    assert early_stopping(folder, step=9, patience=2).best_step == 5


def test_a_repeated_validation_counts_once(tmp_path: Path) -> None:
    stopping = early_stopping(RunFolder(tmp_path), patience=2)
    assert [stopping.observe(step, loss) for step, loss in [(5, 3.0), (10, 3.5), (10, 3.5), (10, 2.0), (5, 1.0)]] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert (stopping.without_best, stopping.should_stop, stopping.best_step) == (1, False, 5)


def test_what_a_manifest_says_is_where_early_stopping_goes_on(tmp_path: Path) -> None:
    """On a machine without metrics, and on one whose metrics have more than the manifest."""
    stopping = early_stopping(RunFolder(tmp_path), patience=3)
    assert stopping.as_dict() is None
    for step, loss in [(5, 3.0), (10, 2.0), (15, 2.5)]:
        stopping.observe(step, loss)
    known = stopping.as_dict()
    assert known == {"best_step": 10, "best_loss": 2.0, "without_best": 1, "last_step": 15}
    train_section = {"validate_every": 1, "early_stopping": {"patience": 3}}
    run = parse_run({"model": {"preset": "llama-tiny"}, "data": {}, "train": train_section})
    other = EarlyStopping(run, RunFolder(tmp_path / "none"), Alone(), step=15, earlier=known)  # type: ignore[arg-type]
    assert other.as_dict() == known
    folder = RunFolder(tmp_path)
    records = [(5, 3.0), (10, 2.0), (15, 2.5), (20, 2.6), (25, 1.0)]
    folder.metrics.write_text(
        "".join(json.dumps({"kind": "validation", "step": step, "loss": loss}) + "\n" for step, loss in records)
    )
    other = EarlyStopping(run, folder, Alone(), step=20, earlier=known)  # type: ignore[arg-type]
    assert (other.without_best, other.last_step, other.best_step) == (2, 20, 10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"early_stopping": {}}}, "train.validate_every is not set"),
        ({"train": {"early_stopping": {}, "validate_every": 2}}, "no validation data"),
        ({"checkpoint": {"keep_best": True}}, "no validation data"),
        ({"train": {"early_stopping": {"patience": 0}, "validate_every": 2}}, "train.early_stopping.patience"),
    ],
)
def test_refused(changes: dict[str, Any], said: str, corpus: Path, tmp_path: Path) -> None:
    assert_refused(train(tmp_path, tiny_run(corpus, **changes), ranks=2), said)
