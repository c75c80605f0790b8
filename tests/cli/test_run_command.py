"""`windlass run` up to the moment of submission, and the commands that read a run folder."""

import json
import os
import socket

import pytest

from windlass.api.summary import Steps
from windlass.common.files import append_json_line
from windlass.plan import resolve
from windlass.runfolder import RunFolder
from windlass.spec import load_run
from windlass.targets.launch import processes


@pytest.fixture
def ended(run_file, windlass):
    """A run folder as a finished run with one restart leaves it."""
    run = resolve(load_run(run_file))
    folder = RunFolder.of(run)
    folder.create(run)
    folder.record("launched", attempt=1, argv=[])
    folder.record("started", attempt=1, world_size=2, step=0)
    for step, attempt, when in [(1, 1, 10), (2, 1, 11), (3, 1, 12), (3, 2, 30), (4, 2, 31), (5, 2, 32), (6, 2, 33)]:
        record = {"step": step, "steps": 6, "loss": 7.0 - step, "tokens": 128 * step, "tokens_per_s": 100.0 * step}
        append_json_line(folder.metrics, {"kind": "step", **record, "step_s": 1.0, "attempt": attempt, "time": when})
    folder.record("rank-died", attempt=1, rank=1, signal="SIGKILL", code=-9, first=True, error=None)
    folder.record("restart", attempt=2, why="rank 1 was killed by SIGKILL", left=2)
    folder.record("launched", attempt=2, argv=[])
    folder.record("resumed", attempt=2, world_size=2, step=2, checkpoint="step-00000002")
    append_json_line(folder.metrics, {"kind": "validation", "step": 6, "loss": 1.5, "sequences": 4})
    folder.record("finished", step=6, loss=1.0)
    folder.record("exit", state="finished", code=0, reason=None)
    gone = {"pid": os.getpid(), "start_time": 1, "host": socket.gethostname()}
    (folder.path / "supervisor.json").write_text(json.dumps(gone))
    folder.rank_log(0).write_text("hello from 0\n")
    folder.rank_log(1).write_text("hello from 1\nno newline at the end")
    return folder


def test_dry_run_prints_the_request_and_creates_nothing(windlass, run_file, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    answer = windlass("run", run_file, "train.steps=9", "--dry-run", "--inject", "kill:rank=1,step=3")
    assert answer.code == 0
    assert "steps: 9" in answer.out
    assert "processes_per_node: 2" in answer.out  # decided
    assert "cache_gib" not in answer.out  # a default
    assert len(answer.out.splitlines()) < 50
    assert "torch.distributed.run --standalone --nproc-per-node 2 -m windlass.trainer runs/small/run.yaml" in answer.out
    assert "WINDLASS_FAULTS=kill:rank=1,step=3" in answer.out
    as_json = windlass("run", run_file, "--dry-run", "--json").json
    assert as_json["request"]["argv"][-1] == "runs/small/run.yaml"
    assert as_json["run"]["resources"]["processes_per_node"] == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_says_so(windlass, run_file, ended):
    answer = windlass("run", run_file)
    assert answer.code == 0
    assert "small is finished" in answer.out
    assert windlass("run", run_file, "--json").json["state"] == "finished"
    fewer = windlass("run", run_file, "train.steps=4", "--json").json
    assert fewer["warnings"] == ["it has trained 6 steps, more than the 4 that are asked for; nothing was changed"]


def test_other_settings_are_refused_with_both_values(windlass, run_file, ended):
    answer = windlass("run", run_file, "data.sequence_length=16", "seed=3")
    assert answer.code == 2
    assert "data.sequence_length" in answer.err
    assert "0 there, 3 asked" in answer.err
    assert "train.seed" in answer.err
    assert "name=OTHER" in answer.err
    assert "--fresh" in answer.err


def test_fresh_asks_first(windlass, run_file, ended, tmp_path):
    answer = windlass("run", run_file, "--fresh")
    assert answer.code == 2
    assert "--fresh --yes" in answer.err
    assert (tmp_path / "runs" / "small" / "run.yaml").exists()
    assert not list((tmp_path / "runs").glob("*.old-*"))


def test_fresh_never_moves_a_running_one(windlass, run_file, ended):
    alive = {"pid": os.getpid(), "start_time": processes.start_time(os.getpid()), "host": socket.gethostname()}
    (ended.path / "supervisor.json").write_text(json.dumps(alive))
    answer = windlass("run", run_file, "--fresh", "--yes")
    assert answer.code == 2
    assert "already running" in answer.err
    assert "windlass stop small" in answer.err


def test_unknown_faults_are_refused(windlass, run_file, tmp_path):
    answer = windlass("run", run_file, "--inject", "explode:rank=1")
    assert answer.code == 2
    assert "explode" in answer.err
    assert not (tmp_path / "runs").exists()


def test_ls(windlass, ended):
    assert "small" in windlass("ls").out
    (row,) = windlass("ls", "--json").json
    assert (row["name"], row["state"], row["step"], row["attempt"]) == ("small", "finished", 6, 2)


def test_show(windlass, ended):
    text = windlass("show", "small", "--curve").out
    assert "rank 1 was killed by SIGKILL" in text
    assert "steps repeated" in text
    assert "┤" in text
    facts = windlass("show", "small", "--json", "--curve").json
    assert facts["summary"]["steps_repeated"] == 1
    assert facts["summary"]["validation_loss"] == 1.5
    assert facts["summary"]["seconds_lost"] == 18.0  # from 12 to 31, of which the new step took one
    assert facts["curve"][-1] == [6, 1.0]
    assert facts["history"][0]["event"] == "launched"


def test_logs(windlass, ended):
    assert windlass("logs", "small", "--rank", 0).out == "hello from 0\n"
    assert windlass("logs", "small").out.splitlines() == [
        "[0] hello from 0",
        "[1] hello from 1",
        "[1] no newline at the end",
    ]
    assert windlass("logs", "small", "--follow", "--rank", 1).out.splitlines()[-1] == "no newline at the end"
    assert windlass("logs", "small", "--json").json[0] == {"rank": 0, "text": "hello from 0"}
    answer = windlass("logs", "small", "--rank", 7)
    assert answer.code == 2


def test_stop_of_an_ended_run_is_no_error(windlass, ended):
    answer = windlass("stop", "small", "--json")
    assert (answer.code, answer.json["was"], answer.json["state"]) == (0, "finished", "finished")


def test_ls_of_nothing(windlass):
    assert windlass("ls").code == 0
    assert windlass("ls", "--json").json == []


def test_a_pause_between_two_starts_by_hand_is_not_lost_time(tmp_path):
    for step, when in ((1, 0.0), (2, 3600.0)):
        record = {"kind": "step", "step": step, "attempt": step, "time": when, "step_s": 1.0}
        append_json_line(tmp_path / "metrics.jsonl", record)
    assert Steps.of(tmp_path / "metrics.jsonl", restarts=set()).seconds_lost == 0.0
    assert Steps.of(tmp_path / "metrics.jsonl", restarts={2}).seconds_lost == 3599.0


def test_fewer_steps_than_a_run_has_are_not_called_its_length(windlass, run_file, ended):
    text = windlass("run", run_file, "train.steps=3").out
    assert "it has trained 6 steps, more than the 3 that are asked for" in text


def test_a_run_that_goes_on_with_other_settings_says_what_they_do(windlass, run_file, ended):
    answer = windlass("run", run_file, "train.steps=60", "train.learning_rate=3e-5", "--dry-run", "--json")
    assert answer.code == 0
    warnings = answer.json["warnings"]
    assert "train.learning_rate is 3e-05 from here on; it was 0.0003" in warnings
    assert "train.steps is 60 from here on; it was 6" in warnings
    (jump,) = [one for one in warnings if "of step 7" in one]
    assert "as it was set before" in jump


def test_a_run_that_becomes_shorter_than_its_default_warm_up_goes_on_and_says_so(windlass, run_file, ended):
    """Of 2000 steps 40 are warm-up by default; nobody wrote that into the run file, so 30 steps are no mistake."""
    ended.run_file.write_text(ended.run_file.read_text().replace("steps: 6", "steps: 2000").replace("s: 0", "s: 40", 1))
    assert "warmup_steps: 40" in ended.run_file.read_text()
    answer = windlass("run", run_file, "train.steps=30", "--dry-run", "--json")
    assert answer.code == 0
    assert answer.json["run"]["train"]["warmup_steps"] == 0
    assert "train.warmup_steps is 0 from here on; it was 40" in answer.json["warnings"]
    assert any("the learning rate of step 7 is" in warning for warning in answer.json["warnings"])


def test_a_run_that_never_saved_may_change_everything(windlass, run_file, tmp_path):
    run = resolve(load_run(run_file))
    folder = RunFolder.of(run)
    folder.create(run)
    folder.record("launched", attempt=1, argv=[])
    folder.record("exit", state="failed", code=2, reason="rank 0 exited with code 2")
    append_json_line(folder.metrics, {"kind": "step", "step": 1, "steps": 6, "loss": 7.0})
    gone = {"pid": os.getpid(), "start_time": 1, "host": socket.gethostname()}
    (folder.path / "supervisor.json").write_text(json.dumps(gone))
    assert windlass("run", run_file, "data.sequence_length=16", "--dry-run").code == 0
    other = run.model_copy(update={"data": run.data.model_copy(update={"sequence_length": 16})})
    folder.create(other)
    events = [json.loads(line) for line in folder.history.read_text().splitlines()]
    assert events[-1]["changes"] == {"data.sequence_length": [32, 16]}
    assert not folder.metrics.exists()  # those steps were another run's
    assert (folder.path / "metrics.old-1.jsonl").exists()
    folder.record("checkpoint", step=1, tier="shared")
    answer = windlass("run", run_file, "data.sequence_length=32", "--dry-run")
    assert answer.code == 2
    assert "its checkpoints belong to those settings" in answer.err


def test_a_run_under_way_keeps_its_settings(windlass, run_file, ended):
    alive = {"pid": os.getpid(), "start_time": processes.start_time(os.getpid()), "host": socket.gethostname()}
    (ended.path / "supervisor.json").write_text(json.dumps(alive))
    answer = windlass("run", run_file, "train.learning_rate=1e-5", "--detach")
    assert answer.code == 2
    assert "is under way with other settings" in answer.err
    assert "windlass stop small" in answer.err


def test_compare(windlass, run_file, ended):
    run = ended.load_run()
    other = RunFolder(ended.path.with_name("other"))
    other.create(run.model_copy(update={"name": "other", "train": run.train.model_copy(update={"steps": 4})}))
    for step in (1, 2, 3, 4):
        append_json_line(other.metrics, {"kind": "step", "step": step, "steps": 4, "loss": 5.0 - step, "attempt": 1})
    text = windlass("compare", "small", "other").out
    assert "train.steps" in text
    assert "loss at step 4" in text
    facts = windlass("compare", "small", "other", "--json").json
    assert facts["common_step"] == 4
    assert [one["settings"]["train.steps"] for one in facts["runs"]] == [6, 4]
    assert [one["loss_at_common_step"] for one in facts["runs"]] == [3.0, 1.0]
    assert windlass("compare", "small").code == 2


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_model_too_large_for_this_machine_is_refused(windlass, run_file, tmp_path, command, monkeypatch):
    """A run of 70 billion parameters on the CPU: 16 bytes each, whatever machine this is."""
    monkeypatch.setattr("windlass.targets.launch.machine.free_bytes", lambda _path: 2**60)
    answer = windlass(command, run_file, "model.preset=llama3.1-70b", "data.tokenizer=bytes", "data.sequence_length=8")
    assert answer.code == 2
    assert "of memory, and this machine has" in answer.err
    assert "70,553,706,496 parameters × 16 bytes" in answer.err
    assert not (tmp_path / "runs").exists()


def test_plan_says_what_a_run_on_cpus_holds(windlass, run_file):
    answer = windlass("plan", run_file)
    assert "at least 0." in answer.out
    assert "2, full sharding" in answer.out
    assert "1, the whole model on it" in windlass("plan", run_file, "resources.processes_per_node=1").out


def test_a_quiet_run_of_a_finished_run_says_nothing_new(windlass, run_file, ended):
    answer = windlass("run", run_file, "--quiet")
    assert answer.code == 0


def test_ranks_share_a_gpu_in_tests_of_the_trainer_only(windlass, run_file, monkeypatch):
    monkeypatch.setenv("WINDLASS_SHARE_GPUS", "1")
    refused = windlass("run", run_file, "--dry-run")
    assert refused.code == 2
    assert "WINDLASS_SHARE_GPUS is set" in refused.err
    assert "unset WINDLASS_SHARE_GPUS" in refused.err


def test_from_is_refused_where_the_run_has_checkpoints_of_its_own(windlass, run_file, ended):
    ended.record("checkpoint", step=6, tier="shared")
    text = run_file.read_text().replace("checkpoint: {every: 2}", "checkpoint: {every: 2, branch_from: other@4}")
    run_file.write_text(text)
    answer = windlass("run", run_file, "steps=9", "--dry-run")
    assert answer.code == 2
    assert "cannot begin from other@4" in answer.err
    assert "name=OTHER --from other@4" in answer.err


def test_a_branch_goes_on_and_keeps_its_origin(windlass, run_file, ended):
    ended.record("checkpoint", step=6, tier="shared")
    saved = ended.run_file.read_text()
    ended.run_file.write_text(saved.replace("branch_from: null", "branch_from: other@4"))
    same = windlass("run", run_file, "steps=9", "--dry-run")
    assert same.code == 0
    assert "branch_from: other@4" in same.out
    later = windlass("run", run_file, "steps=9", "checkpoint.branch_from=other@6", "--dry-run")
    assert "began as a branch of other@4" in later.err
    assert "branch_from: other@4" in later.out
    ended.run_file.write_text(saved.replace("branch_from: null", "branch_from: small@4"))  # as earlier versions left it
    assert windlass("run", run_file, "steps=9", "checkpoint.branch_from=small@4", "--dry-run").code == 2


def test_a_mistake_is_not_called_another_setting(windlass, run_file, ended):
    answer = windlass("run", run_file, "model.config.hiden_size=64")
    assert answer.code == 2
    assert "hidden_size" in answer.err
    assert "exists with other settings" not in answer.err


def test_a_learning_rate_that_nothing_survives_is_remarked(windlass, run_file):
    answer = windlass("run", run_file, "train.learning_rate=3", "--dry-run", "--json")
    assert any("most models diverge" in one for one in answer.json["warnings"])


def test_fewer_steps_than_a_stopped_run_has_are_refused_before_anything_starts(windlass, run_file, ended):
    text = ended.history.read_text().replace('"finished"', '"failed"')
    ended.history.write_text("".join(line + "\n" for line in text.splitlines() if '"event":"failed"' not in line))
    answer = windlass("run", run_file, "train.steps=3")
    assert answer.code == 2
    assert "has trained 6 steps already, and 3 are asked for" in answer.err


def test_the_batch_of_a_stream_stays(windlass, run_file, ended, tmp_path):
    text = run_file.read_text().replace("corpus:austen", "hf:allenai/c4")
    run_file.write_text(text)
    saved = (
        ended.run_file.read_text().replace("corpus:austen", "hf:allenai/c4").replace("config: null", "config: en", 1)
    )
    ended.run_file.write_text(saved)
    answer = windlass("run", run_file, "train.global_batch=8", "train.steps=9", "--dry-run")
    assert answer.code == 2
    assert "cannot change in a run that reads a stream" in answer.err


def test_checkpoints_are_listed_with_their_validation_loss_and_the_best(windlass, ended):
    from windlass.checkpoint import CheckpointFolder, Manifest

    for step, loss in ((2, 1.0), (4, 3.0)):
        append_json_line(ended.metrics, {"kind": "validation", "step": step, "loss": loss})
        checkpoint = CheckpointFolder(ended.checkpoints).at(step)
        checkpoint.path.mkdir(parents=True)
        checkpoint.publish(Manifest(step, 128 * step, {}, model={}, order={}))
    text = windlass("ckpt", "ls", "small").out
    assert text.split()[:2] == ["STEP", "SIZE"]
    assert "1.0000 best" in text
    rows = windlass("ckpt", "ls", "small", "--json").json
    assert [(row["step"], row["validation_loss"], row["best"]) for row in rows] == [(2, 1.0, True), (4, 3.0, False)]


def test_a_sweep_of_nothing_is_shown_one_of_its_own_file(windlass, run_file):
    answer = windlass("sweep", run_file, "train.steps=4")
    assert answer.code == 2
    assert f"fix       windlass sweep {run_file} train.learning_rate=1e-4,3e-4" in answer.err


def test_the_cluster_after_the_colon_is_the_key_of_its_target(windlass, run_file):
    offline = ("--dry-run", "--offline", "resources.gpus_per_node=0", "--json")
    slurm = windlass("run", run_file, "--on", "slurm:login", *offline).json["run"]["target"]
    assert (slurm["kind"], slurm["host"]) == ("slurm", "login")
    image = "target.kubernetes.image=an/image"
    kubernetes = windlass("run", run_file, "--on", "kubernetes:other", image, *offline).json["run"]["target"]
    assert (kubernetes["kind"], kubernetes["kubernetes"]["context"]) == ("kubernetes", "other")


@pytest.mark.parametrize(
    "name", ["1234", "1e5", "yes", "null", "me@east #2", "arn:aws:eks:us-east-1:1:cluster/c", "[a]"]
)
def test_a_cluster_is_a_text_whatever_yaml_reads_in_its_name(windlass, run_file, name):
    words = ("--dry-run", "--offline", "resources.gpus_per_node=0", "target.kubernetes.image=an/image", "--json")
    target = windlass("run", run_file, "--on", f"kubernetes:{name}", *words).json["run"]["target"]
    assert target["kubernetes"]["context"] == name


@pytest.mark.parametrize(
    ("place", "what", "fix"),
    [
        ("local:here", "the target local takes no name after the colon", "--on local"),
        ("moon", "there is no target 'moon'", "--on local"),
        ("k8s:other", "there is no target 'k8s'", "--on kubernetes"),
        ("slrum:login", "there is no target 'slrum'", "--on slurm"),
    ],
)
@pytest.mark.parametrize("command", [("run", "--dry-run"), ("sweep", "train.learning_rate=1e-4,3e-4")])
def test_a_target_that_does_not_exist_is_named_with_the_one_meant(windlass, run_file, command, place, what, fix):
    answer = windlass(command[0], run_file, *command[1:], "--on", place)
    assert answer.code == 2
    assert what in answer.err
    assert f"fix       {fix}\n" in answer.err
