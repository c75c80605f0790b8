"""`ls`, `show`, `logs`, `stop` and `rm` on run folders of every kind: damaged, foreign, huge and many."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time

import pytest

from windlass.checkpoint import CheckpointFolder, Manifest
from windlass.checkpoint.ownership import hold
from windlass.common.files import append_json_line
from windlass.plan import resolve
from windlass.runfolder import RunFolder
from windlass.spec import load_run
from windlass.targets.launch import processes

GONE = {"pid": os.getpid(), "start_time": 1, "host": socket.gethostname()}


@pytest.fixture
def make(run_file, windlass):
    """A run folder as a finished run leaves it; `steps` of them written."""
    base = resolve(load_run(run_file))

    def made(name="small", *, steps=6, state="finished", code=0, began=1000.0):
        run = base.model_copy(update={"name": name})
        folder = RunFolder.of(run)
        folder.create(run)
        at(folder, began, "launched", attempt=1, argv=[])
        at(folder, began + 1, "started", attempt=1, world_size=2, step=0)
        lines = [json.dumps(step_record(step, steps, began + 1 + step)) for step in range(1, steps + 1)]
        folder.metrics.write_text("\n".join(lines) + "\n")
        if state:
            at(folder, began + 2 + steps, "exit", state=state, code=code, reason=None)
        (folder.path / "supervisor.json").write_text(json.dumps(GONE))
        folder.rank_log(0).write_text("2026-01-01T00:00:00 rank 0 INFO hello\n")
        return folder

    return made


def step_record(step, steps, when, **changes):
    number = step if isinstance(step, int) else 1
    facts = {"step": step, "steps": steps, "loss": 7.0 - number / steps, "grad_norm": 1.0, "learning_rate": 3e-4}
    facts |= {"tokens": 128 * number, "tokens_per_s": 100.0 * number, "tokens_per_s_per_gpu": 50.0, "mfu": None}
    facts |= {"step_s": 1.0, "data_s": 0.0, "checkpoint_s": 0.0, "memory_gib": 0.5, "epoch": 0.1, "attempt": 1}
    return {"kind": "step", **facts, "time": when, **changes}


def at(folder, when, event, **facts):
    append_json_line(folder.history, {"time": when, "event": event, **facts})


def states(windlass):
    answer = windlass("ls", "--json")
    assert answer.code == 0, answer
    return {row["name"]: row["state"] for row in answer.json}


def test_an_export_after_the_end_does_not_change_the_state(windlass, make, run_file):
    folder = make()
    folder.record("exported", path="export", step=6, dtype="bf16", kind="model")
    folder.record("pruned", steps=[2])
    assert states(windlass) == {"small": "finished"}
    shown = windlass("show", "small")
    assert "supervisor was killed" not in shown.out
    assert windlass("run", run_file).code == 0
    assert "is finished" in windlass("run", run_file).out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["supervisor.json", "history.jsonl", "metrics.jsonl", "run.yaml", "slurm.json"])
@pytest.mark.parametrize("content", [b"null", b"[]", b'{"pid": []}', b"\xff\xfe\x00", b"[" * 100_000, None])
def test_one_damaged_run_does_not_break_ls(windlass, make, name, content):
    make("fine")
    folder = make("hurt")
    path = folder.path / name
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    answer = windlass("ls")
    assert answer.code == 0, answer
    assert "unexpected" not in answer.err
    assert states(windlass)["fine"] == "finished"
    shown = windlass("show", "hurt")
    assert "unexpected" not in shown.err, shown


@pytest.mark.parametrize(
    "record",
    [
        {"event": "exit", "state": ["x"], "code": "no", "reason": {"a": 1}},
        {"event": "launched", "attempt": "many"},
        {"event": "restart", "attempt": None},
        {"event": "checkpoint", "step": "x", "seconds": "long"},
        {"event": "rank-died", "first": True},
        {"event": "submitted", "kind": 3},
        {"event": "leftovers-killed", "pids": 7},
        {"event": "only-local", "steps": 5},
        {"event": "exported", "path": {}},
        {"event": {"a": 1}, "time": "now"},
        {"kind": "step", "step": "x", "steps": None, "time": []},
        {"kind": "step", "step": 1e400, "steps": -1, "loss": "nan", "tokens_per_s": True, "attempt": {}},
        {"kind": "validation", "loss": "x"},
    ],
)
def test_odd_records_do_not_break_ls_and_show(windlass, make, record):
    folder = make()
    for path in (folder.history, folder.metrics):
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    for arguments in (("ls",), ("show", "small", "--curve"), ("show", "small", "--json", "--curve"), ("logs", "small")):
        answer = windlass(*arguments)
        assert answer.code == 0, answer
        assert "unexpected" not in answer.err


@pytest.mark.slow
def test_ls_of_two_thousand_runs_takes_a_second_or_two(windlass, make, tmp_path):
    folder = make("run-0000", steps=300)
    for number in range(1, 2000):
        copy = folder.path.with_name(f"run-{number:04d}")
        copy.mkdir()
        for name in ("run.yaml", "history.jsonl", "metrics.jsonl", "supervisor.json"):
            os.link(folder.path / name, copy / name)
    begin = time.process_time()
    assert len(states(windlass)) == 2000
    assert time.process_time() - begin < 4.0  # 15 s before; about 1 s on an idle machine


@pytest.mark.slow
def test_show_of_a_long_run_takes_little_memory_and_time(make, tmp_path):
    """A run of 200,000 steps with a restart; of 2 million it took 8.4 GB and half a minute, of these 840 MB."""
    folder = make(steps=1)
    begin = 1000.0
    template = json.dumps(step_record("STEP", 200_000, "TIME", loss=2.5, attempt="N"))
    template = template.replace('"STEP"', "%d").replace('"TIME"', "%d").replace('"N"', "%d").replace(": ", ":")
    template = template.replace(", ", ",") + "\n"  # as the trainer writes it
    with folder.metrics.open("w") as file:
        file.writelines(template % (step, 1, begin + step) for step in range(1, 150_001))
        file.writelines(template % (step, 2, begin + 30_000 + step) for step in range(125_001, 200_001))
    at(folder, begin, "restart", attempt=2, why="x")
    at(folder, begin, "exit", state="finished", code=0)

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (500 * 2**20, 500 * 2**20))

    program = (
        "import resource, sys; from windlass.cli.main import run_command\n"
        "code = run_command(['show', 'small', '--json', '--curve'])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr); sys.exit(code)"
    )
    words = [sys.executable, "-c", program]
    answer = subprocess.run(words, capture_output=True, text=True, preexec_fn=limited, check=False)
    assert answer.returncode == 0, answer.stderr
    shown = json.loads(answer.stdout)
    assert shown["summary"]["steps"] == 200_000
    assert shown["summary"]["steps_repeated"] == 25_000
    assert shown["summary"]["seconds_lost"] == pytest.approx(30_000.0)
    assert shown["curve"][-1][0] == 200_000
    assert [step for step, _ in shown["curve"]] == sorted({step for step, _ in shown["curve"]})
    assert 500 <= len(shown["curve"]) <= 10_000
    assert float(answer.stderr.split()[-1]) < 5.0


def test_speed_is_the_same_in_ls_and_show(windlass, make):
    make(steps=50)
    (row,) = windlass("ls", "--json").json
    shown = windlass("show", "small", "--json").json
    assert row["tokens_per_s"] == shown["summary"]["tokens_per_s"] == shown["tokens_per_s"]
    assert f"{row['tokens_per_s']:,.0f}" in windlass("ls").out
    assert f"{row['tokens_per_s']:,.0f}" in windlass("show", "small").out


def test_show_says_what_matters_first(windlass, make):
    """A kill, a restart and a validation are not pushed out by twenty saves."""
    folder = make(state=None, began=1000.0)
    at(folder, 1003.0, "rank-died", attempt=1, rank=1, signal="SIGKILL", code=-9, first=True)
    at(folder, 1004.0, "restart", attempt=2, why="rank 1 was killed by SIGKILL", checkpoint=None)
    at(folder, 1005.0, "launched", attempt=2)
    at(folder, 1006.0, "started", attempt=2, world_size=1, step=0)
    for step in range(1, 21):
        at(folder, 1006.0 + step, "checkpoint", step=step, seconds=0.1)
    at(folder, 4600.0, "exit", state="finished", code=0)
    text = windlass("show", "small").out
    assert "rank 1 was killed by SIGKILL" in text
    assert "restarting from the beginning: no checkpoint was saved (attempt 2)" in text
    assert "20 checkpoints saved, the newest of step 20" in text
    assert text.count("saved the checkpoint of step") <= 3
    assert "1 h 0 min" in text  # from the first launch to the end
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1000.0)) in text
    assert "llama-tiny" in text
    assert "0.0003" in text
    assert text.index("restarting") < text.index("checkpoints saved")
    assert "started on 1 rank\n" in text
    facts = windlass("show", "small", "--json").json
    assert (facts["started"], facts["seconds"]) == (1000.0, 3600.0)
    assert facts["model"] == "llama-tiny"
    assert facts["summary"]["learning_rate"] == 0.0003


def test_evaluations_are_shown_and_reported(windlass, make, tmp_path):
    folder = make()
    task = {"task": "arc_easy", "metric": "acc", "filter": None, "value": 0.25, "stderr": 0.0125}
    task |= {"higher_is_better": True, "shots": 0, "samples": 2376}
    record = {"name": "small", "step": 4, "time": 5.0, "limit": None, "results": [task]}
    newer = {**record, "time": 6.0, "results": [{**task, "value": 0.5}, {"task": "of another version"}, "odd"]}
    for line in (record, {"results": 3}, newer, {**record, "step": 6, "results": [{**task, "value": 0.75}]}):
        append_json_line(folder.evaluations, line)
    values = [
        (row["step"], row["task"], row["value"]) for row in windlass("show", "small", "--json").json["evaluations"]
    ]
    assert values == [(4, "arc_easy", 0.5), (6, "arc_easy", 0.75)]
    assert re.search(r"arc_easy +acc +0.7500 +± 0.0125 +6 +0 +2,376", windlass("show", "small").out)
    assert windlass("report", "small").code == 0
    page = (tmp_path / "small.html").read_text()
    assert "<th>arc_easy, acc</th><td>0.75 ± 0.0125 at step 6, 2,376 examples</td>" in page


def test_ls_sorts(windlass, make):
    make("b", steps=4, began=3000.0)
    make("a", steps=8, began=1000.0)
    make("c", steps=6, state="failed", code=1, began=2000.0)
    alive = {**GONE, "start_time": processes.start_time(os.getpid())}
    (make("d", steps=5, state=None, began=500.0).path / "supervisor.json").write_text(json.dumps(alive))

    def names(*options):
        return [row["name"] for row in windlass("ls", "--json", *options).json]

    assert names() == ["d", "b", "c", "a"]  # what runs, then the newest first
    assert names("--sort", "name") == ["a", "b", "c", "d"]
    assert names("--sort", "step") == ["a", "c", "d", "b"]
    assert names("--sort", "step", "--reverse") == ["b", "d", "c", "a"]
    assert names("--sort", "state")[0] == "c"
    assert windlass("ls", "--quiet", "--sort", "name").out.split() == ["a", "b", "c", "d"]


def test_ls_colours_on_a_terminal_only(windlass, make, monkeypatch):
    make("b", state="failed", code=1)
    assert "\x1b[" not in windlass("ls").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31mfailed" in windlass("ls").out
    monkeypatch.delenv("FORCE_COLOR")


def test_what_files_bring_is_not_markup(windlass, make):
    folder = make(state=None)
    at(
        folder,
        2000.0,
        "exit",
        state="failed",
        code=1,
        reason="rank 0: pip install 'windlass[train]' [/] [red]x\x1b[31m",
    )
    for arguments in (("ls",), ("show", "small")):
        answer = windlass(*arguments)
        assert answer.code == 0, answer
        assert "windlass[train]' [/] [red]x" in " ".join(answer.out.split()), answer.out
        assert "\x1b" not in answer.out


def test_doctor_names_the_extra(windlass, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = windlass("doctor")
    assert answer.code == 1
    assert "windlass[train]" in answer.out


def test_logs_of_launcher_and_supervisor(windlass, make):
    folder = make()
    (folder.logs / "launcher.log").write_text("2026-01-01T00:00:00 rank 0 INFO hello\nW1115 torchrun said this\n")
    (folder.logs / "supervisor.log").write_text("the supervisor said that\n")
    text = windlass("logs", "small").out
    assert text.count("hello") == 1
    assert "[launcher] W1115 torchrun said this" in text
    assert "[supervisor] the supervisor said that" in text
    assert windlass("logs", "small", "--json").json[-1] == {
        "rank": None,
        "text": "the supervisor said that",
        "source": "supervisor",
    }


TORCHRUN = """W1116 11:23:01.1 10 torch/distributed/run.py:793] *****************************************
W1116 11:23:01.1 10 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1
E1116 11:23:13.3 10 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 13)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/v/torch/distributed/launcher/api.py", line 386, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
windlass.trainer FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 13)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 13
============================================================
Traceback (most recent call last):
  File "/v/torch/distributed/run.py", line 12, in <module>
ImportError: cannot import name 'run'
"""


def test_what_torchrun_says_of_itself_is_left_out(windlass, make):
    folder = make()
    (folder.logs / "launcher.log").write_text(TORCHRUN)
    lines = [line.removeprefix("[launcher] ") for line in windlass("logs", "small").out.splitlines()]
    assert lines[-9:] == [
        TORCHRUN.splitlines()[2],
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : -9 (pid: 13)",
        "  traceback : Signal 9 (SIGKILL) received by PID 13",
        *TORCHRUN.splitlines()[-3:],
    ]


def test_the_last_lines_of_each_log(windlass, make):
    folder = make()
    folder.rank_log(0).write_text("".join(f"2026-01-01T00:00:{n:02d} rank 0 INFO line {n}\n" for n in range(30)))
    folder.rank_log(1).write_text("2026-01-01T00:00:20 rank 1 INFO other\n  its second line\n")
    lines = windlass("logs", "small", "--tail", 2).out.splitlines()
    assert [line.split()[-1] for line in lines] == ["28", "29", "other", "line"]
    assert windlass("logs", "small", "--tail", 0).out == ""
    lines = windlass("logs", "small", "--since", "2026-01-01T00:00:20").out.splitlines()
    assert len(lines) == 10 + 2
    assert windlass("logs", "small", "--since", "10m").out == ""
    assert len(windlass("logs", "small", "--since", "99999h", "--rank", 1).out.splitlines()) == 2
    assert windlass("logs", "small", "--since", "soon").code == 2
    assert "--rank 0 to 1" in windlass("logs", "small", "--rank", 7).err
    followed = windlass("logs", "small", "--follow", "--tail", 1, "--rank", 0).out
    assert followed == "2026-01-01T00:00:29 rank 0 INFO line 29\n"


def test_a_log_that_was_cut_off_is_read_on(make):
    from windlass.targets.launch.tail import Tail

    path = make().rank_log(0)
    tail = Tail(path)
    assert len(tail.lines()) == 1
    path.write_text("new\n")  # copytruncate, then one line
    assert tail.lines() == ["new"]


def test_rm_asks_and_refuses_what_lives(windlass, make, tmp_path):
    folder = make()
    answer = windlass("rm", "small")
    assert answer.code == 2
    assert "--yes" in answer.err
    assert folder.path.exists()
    alive = {**GONE, "start_time": processes.start_time(os.getpid())}
    (folder.path / "supervisor.json").write_text(json.dumps(alive))
    folder.history.write_text('{"event": "launched", "attempt": 1}\n')
    answer = windlass("rm", "small", "--yes")
    assert answer.code == 2
    assert "windlass stop small" in answer.err
    assert folder.path.exists()
    (folder.path / "supervisor.json").write_text(json.dumps(GONE))
    make("other")
    answer = windlass("rm", "small", "other", "--yes", "--json")
    assert answer.code == 0, answer
    assert [row["name"] for row in answer.json] == ["small", "other"]
    assert list((tmp_path / "runs").iterdir()) == []
    assert windlass("rm", "small", "--yes").code == 2


def test_rm_removes_runs_and_nothing_else(windlass, make, tmp_path, run_file):
    """A folder with a run.yaml of somebody's own is not a run; a link is not what it leads to."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.yaml").write_text(run_file.read_text())
    for name in ("project", str(project), ".", "../project", "runs/../project"):
        answer = windlass("rm", name, "--yes")
        assert answer.code == 2, name
    assert (project / "run.yaml").exists()
    folder = make()
    (folder.path.parent / "link").symlink_to(project)
    assert windlass("rm", "link", "--yes").code == 2
    assert (project / "run.yaml").exists()


def test_rm_refuses_ranks_that_were_started_by_hand(windlass, make):
    """Plain torchrun has no supervisor: that ranks live is known by their lock alone, however long they are silent."""
    folder = make(state=None)
    (folder.path / "supervisor.json").unlink()
    os.utime(folder.metrics, (0, 0))
    held = hold(folder.checkpoints)
    assert held is not None
    answer = windlass("rm", "small", "--yes")
    assert (answer.code, folder.run_file.exists()) == (2, True), answer
    assert "is under way" in answer.err
    os.close(held)
    assert windlass("rm", "small", "--yes").code == 0


def test_a_silent_run_says_so(windlass, make):
    folder = make(state=None)
    (folder.path / "supervisor.json").write_text(json.dumps({**GONE, "start_time": processes.start_time(os.getpid())}))
    long_ago = time.time() - 600
    os.utime(folder.metrics, (long_ago, long_ago))
    (row,) = windlass("ls", "--json").json
    assert (row["state"], row["reason"], row["eta"]) == ("running", "no step written for 10 min", None)


def test_show_says_running_for_of_what_runs_only(windlass, make):
    folder = make(state=None)  # its supervisor is gone, and wrote no end
    answer = windlass("show", folder.name)
    assert "running for" not in answer.out, answer.out
    shown = windlass("show", folder.name, "--json").json
    end = shown["history"][-1]
    assert (shown["state"], end["event"]) == ("failed", "exit")
    assert shown["seconds"] == end["time"] - shown["started"], "to its last sign of life"


def test_quiet(windlass, make):
    make()
    assert windlass("stop", "small", "--quiet").out == ""
    assert windlass("rm", "small", "--yes", "--quiet").out == ""


def complete(words, incomplete=""):
    environment = {**os.environ, "_WINDLASS_COMPLETE": "bash_complete"}
    line = " ".join(["windlass", *words, incomplete])
    environment |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) + 1)}
    command = [sys.executable, "-c", "from windlass.cli.main import main; main()"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return [line.partition(",")[2] for line in answer.stdout.splitlines()]


@pytest.mark.slow
def test_completion_knows_keys_presets_gpus_and_targets(make):
    make()
    assert "small" in complete(["rm"])
    assert "train.steps=" in complete(["run", "a.yaml"], "train.s")
    assert "model.preset=llama3.2-1b" in complete(["run", "a.yaml"], "model.preset=llama3")
    assert "data.format=chat" in complete(["plan", "a.yaml"], "data.format=c")
    assert "llama-tiny" in complete(["init", "--preset"], "llama-t")
    assert "H200" in complete(["plan", "a.yaml", "--gpu"], "H")
    assert {"local", "slurm", "kubernetes"} <= set(complete(["run", "a.yaml", "--on"]))
    # bash takes words apart at `=`
    assert "llama3.2-1b" in complete(["run", "a.yaml", "model.preset", "="], "llama3")


def test_a_branch_from_a_path_is_not_taken_for_the_run_of_that_name(windlass, make, run_file, tmp_path):
    """The trainer looks beside the new run: it would begin with the weights of another run."""
    make("base")
    elsewhere = tmp_path / "archive" / "base"
    shutil.copytree(make("base").path, elsewhere)
    for folder in (elsewhere, RunFolder.find("base").path):
        checkpoint = CheckpointFolder(folder / "checkpoints").at(4)
        checkpoint.path.mkdir(parents=True)
        checkpoint.publish(Manifest(step=4, tokens=1, files={}, model={}, order={}))
    answer = windlass("run", str(run_file), "--from", f"{elsewhere}@4", "--dry-run", "name=branch", "train.steps=9")
    assert answer.code == 2, answer
    assert "is not a run under" in answer.err
