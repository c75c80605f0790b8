"""`windlass run` with the real trainer, and what it refuses before anything is created."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.commands import run_forked
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of

BAD_INPUTS = {
    "unknown key": (["train.stepz=3"], "did you mean train.steps?"),
    "unknown section": (["trian.steps=3"], "did you mean train?"),
    "value of the wrong type": (["train.steps=many"], "train.steps"),
    "unknown preset": (["model.preset=llama-tinny"], "no model preset 'llama-tinny'"),
    "sequence longer than the model's": (["data.sequence_length=4096"], "longer than the model's maximum of 1024"),
    "heads not divisible": (["model.config.num_attention_heads=5"], "not divisible"),
    "missing data": (["data.source=no/such/*.jsonl"], "no/such"),
    "missing model folder": (["model.preset=null", "model.path=./no-model"], "no-model"),
    "unknown corpus": (["data.source=corpus:austin"], "austin"),
    "GPU where there is none": (["resources.gpus_per_node=8", "resources.processes_per_node=null"], "GPU"),
    "more than one machine": (["resources.nodes=2"], "one machine"),
    "batch smaller than the ranks": (["train.global_batch=1"], "global batch"),
    "unknown target": (["target.kind=moon"], "target.kind"),
    "not an override": (["fast"], "not of the form"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_message_and_leaves_nothing(windlass, run_file, tmp_path, case, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    overrides, words = BAD_INPUTS[case]
    before = sorted(tmp_path.rglob("*"))
    answer = windlass("run", run_file, *overrides)
    assert answer.code == 2, answer
    assert words in answer.err
    assert answer.err.count("error: ") == 1
    assert "Traceback" not in answer.err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_dataset_is_bad_input(windlass, run_file, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    answer = windlass("run", run_file, "data.source=empty.jsonl")
    assert answer.code == 2, answer
    assert "empty.jsonl" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_is_bad_input(windlass, run_file, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answer = windlass("run", run_file, f"target.port={other.getsockname()[1]}")
    assert answer.code == 2
    assert "is taken" in answer.err
    assert not (tmp_path / "runs").exists()


def test_too_little_space_is_bad_input(windlass, run_file, tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.targets.launch.machine.free_bytes", lambda _path: 1000)
    answer = windlass("run", run_file)
    assert answer.code == 2
    assert "free" in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_missing_run_file_is_bad_input(windlass, run_file):
    answer = windlass("run", "smal.yaml")
    assert answer.code == 2
    assert "the same command with small.yaml" in answer.err


def command(*arguments):
    return [sys.executable, "-m", "windlass.cli.main", *map(str, arguments)]


@pytest.fixture
def really(tmp_path, monkeypatch):
    """`windlass` as a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)

    def run(*arguments):
        return run_forked(arguments, cwd=tmp_path, env=os.environ, timeout=240)

    return run


@pytest.mark.train
@pytest.mark.slow
def test_a_run_survives_a_kill_grows_and_stops(really, run_file, tmp_path):
    first = really("run", run_file, "--inject", "kill:rank=1,step=4", "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert (result["state"], result["step"], result["attempt"]) == ("finished", 6, 2)
    assert result["summary"]["restarts"] == 1
    folder = RunFolder(tmp_path / "runs" / "small")
    died = next(one for one in read_json_lines(folder.history) if one["event"] == "rank-died")
    assert (died["rank"], died["signal"]) == (1, "SIGKILL")
    assert sorted(steps_of(folder)) == [1, 2, 3, 4, 5, 6]

    exported = really("ckpt", "export", "small")  # what comes after the end does not change how it ended
    assert exported.returncode == 0, exported
    assert json.loads(really("show", "small", "--json").stdout)["state"] == "finished"
    again = really("run", run_file)
    assert again.returncode == 0
    assert "is finished" in again.stdout

    stopped = really("run", run_file, "train.steps=9", "--inject", "term:rank=0,step=8")
    assert stopped.returncode == 75, stopped
    assert "resumed from the checkpoint of step 6" in stopped.stdout
    assert "goes on from the last checkpoint" in stopped.stderr
    shown = json.loads(really("show", "small", "--json").stdout)
    assert (shown["state"], shown["exit_code"]) == ("preempted", 75)


@pytest.mark.train
@pytest.mark.slow
def test_detach_attach_interrupt_and_stop(really, run_file, tmp_path):
    started = really("run", run_file, "train.steps=100000", "--detach", "--json")
    assert started.returncode == 0, started
    try:
        follower = subprocess.Popen(
            command("run", run_file, "train.steps=100000"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        assert any(line.startswith("step ") for line in follower.stdout)  # waits for the first one
        follower.send_signal(signal.SIGINT)
        _, told = follower.communicate(timeout=120)
        assert follower.returncode == 130
        assert "windlass logs small --follow" in told
        assert "windlass stop small" in told
        assert json.loads(really("ls", "--json").stdout)[0]["state"] == "running"
        refused = really("run", run_file, "--fresh", "--yes")
        assert refused.returncode == 2
        assert "already running" in refused.stderr
    finally:
        stopped = really("stop", "small", "--json")
    result = json.loads(stopped.stdout)
    assert (stopped.returncode, result["was"], result["state"], result["exit_code"]) == (0, "running", "stopped", 75)
    saved = [
        one["step"] for one in read_json_lines(tmp_path / "runs/small/history.jsonl") if one["event"] == "checkpoint"
    ]
    assert max(saved) >= result["step"]
