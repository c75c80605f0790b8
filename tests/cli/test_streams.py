"""Where the output goes must not change what a command does: no terminal, no room, nobody who reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.common.files import append_json_line
from windlass.plan import resolve
from windlass.runfolder import RunFolder
from windlass.spec import load_run

COMMAND = f"{sys.executable} -m windlass.cli.main"


@pytest.fixture
def shell(tmp_path, monkeypatch, run_file):
    """A shell in a folder with one finished run, whose output is what terminals cannot always show."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)
    run = resolve(load_run(run_file))
    folder = RunFolder.of(run)
    folder.create(run)
    folder.record("launched", attempt=1)
    folder.record("started", attempt=1, world_size=2)
    for step in range(1, 7):
        record = {"kind": "step", "step": step, "steps": 6, "loss": 2.0, "step_s": 1.0, "time": 1.0}
        append_json_line(folder.metrics, record)
    folder.record("exit", state="finished", code=0, reason="naïve – 日本 \ud800")
    (folder.path / "supervisor.json").write_text(json.dumps({"pid": 1, "start_time": 1, "host": "x", "boot": "y"}))

    def run_in_shell(line, **environment):
        line = line.replace("windlass", COMMAND)
        words = ["bash", "-c", f"set -o pipefail; {line}"]
        answer = subprocess.run(words, capture_output=True, env={**os.environ, **environment}, timeout=120, check=False)
        assert b"Traceback" not in answer.stderr, answer
        assert b"Exception" not in answer.stderr, answer
        assert b"unexpected" not in answer.stderr, answer
        return answer

    return run_in_shell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "encoding"),
    [
        *((arguments, "ascii") for arguments in ("ls", "show small --curve", "run small.yaml", "plan small.yaml")),
        *(("show small --curve", encoding) for encoding in ("latin-1", "utf-8")),
    ],
)
def test_any_encoding(shell, encoding, arguments):
    answer = shell(f"windlass {arguments}", PYTHONIOENCODING=encoding)
    assert answer.returncode == 0, answer
    answer.stdout.decode(encoding)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["ls", "show small --curve", "run small.yaml"])
def test_nobody_reads(shell, arguments):
    assert shell(f"windlass {arguments} >&- 2>&- <&-").returncode == 0
    answer = shell(f"windlass {arguments} | head -c 1")
    assert answer.returncode == 0, answer


@pytest.mark.parametrize("arguments", ["ls", "ls --json", "--help", "logs small"])
def test_no_room_for_the_output_is_an_error_in_words(shell, arguments):
    RunFolder(Path("runs/small")).rank_log(0).write_text("hello\n")
    answer = shell(f"windlass {arguments} > /dev/full")
    assert answer.returncode == 1, answer
    assert b"the output could not be written" in answer.stderr
    assert b"No space left on device" in answer.stderr


@pytest.mark.slow
def test_a_run_returns_its_own_code_wherever_its_output_goes(shell):
    assert shell("windlass run small.yaml > /dev/full").returncode == 0
    assert shell("windlass run small.yaml > /dev/full 2>&1").returncode == 0
    assert shell("windlass run small.yaml train.stepz=3 2> /dev/full").returncode == 2


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk")
def test_a_disk_that_cannot_be_written_is_told_in_words(shell, tmp_path):
    mount = "mount -t tmpfs -o size=1M none disk && cp -r runs disk/ && mount -o remount,ro disk"
    line = f"mkdir disk && unshare -m sh -c '{mount} && WINDLASS_RUNS=disk/runs {COMMAND} rm small --yes'"
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    if "permission denied" in answer.stderr.lower() or "unshare" in answer.stderr:
        pytest.skip(answer.stderr)
    assert answer.returncode == 1, answer
    assert "Read-only file system" in answer.stderr
    assert "unexpected" not in answer.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_named_where_a_run_has_fallen_silent(shell, tmp_path):
    """The trainer goes on and keeps its lines until there is room; `ls` must not look as if all were well."""
    program = (
        "import json, os, time; from pathlib import Path; from windlass.targets.launch.processes import start_time\n"
        "alive = {'pid': os.getppid(), 'start_time': start_time(os.getppid()), 'host': os.uname().nodename}\n"
        "run = Path('disk/runs/small'); (run / 'supervisor.json').write_text(json.dumps(alive))\n"
        '(run / \'history.jsonl\').write_text(\'{"event": "launched", "attempt": 1}\\n{"event": "started"}\\n\')\n'
        "os.utime(run / 'metrics.jsonl', (time.time() - 600,) * 2)\n"
    )
    (tmp_path / "make_live.py").write_text(program)
    inside = "mount -t tmpfs -o size=256k none disk && cp -r runs disk/ && PYTHON make_live.py && "
    inside += "(cat /dev/zero > disk/filler 2>/dev/null; true) && WINDLASS_RUNS=disk/runs COMMAND ls --json"
    inside = inside.replace("PYTHON", sys.executable).replace("COMMAND", COMMAND)
    line = f"mkdir disk && unshare -m sh -c '{inside}'"
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    if "permission denied" in answer.stderr.lower() or "unshare" in answer.stderr:
        pytest.skip(answer.stderr)
    (row,) = json.loads(answer.stdout)
    assert row["state"] == "running", row
    assert row["reason"] == "the disk of disk/runs/small is full: no step written for 10 min"
