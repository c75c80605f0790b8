"""Whatever stands in a run folder, the commands that read it list and show it, or say in words what is wrong."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.cli.main import run_command
from windlass.cli.runs.follow import describe_event
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import dump_run, parse_run
from windlass.targets.launch.decision import AttemptEnd, follow_up
from windlass.targets.launch.progress import recorded_end, seconds_left
from windlass.targets.launch.supervision import supervisor_of
from windlass.targets.local.state import status_of

FILES = ("supervisor.json", "history.jsonl", "metrics.jsonl", "stop.json", "request.json", "slurm.json")
FILES += ("logs/rank-0000.log", "logs/rank-0000.error.json", "logs/launcher.log", "logs/rank-x.log")
KEYS = [
    "event",
    "kind",
    "step",
    "steps",
    "time",
    "attempt",
    "state",
    "code",
    "reason",
    "loss",
    "tokens_per_s",
    "step_s",
]
KEYS += ["pid", "start_time", "host", "boot", "machine", "pids", "folder", "inode", "first", "signal", "error", "oom"]
KEYS += ["world_size", "tier", "seconds", "checkpoint", "path", "why", "by", "save_first", "rank", "retry", "exit_code"]
EVENTS = ["launched", "started", "resumed", "exit", "restart", "rank-died", "checkpoint", "preempted", "finished"]
EVENTS += ["exported", "gave-up", "stopped", "stop-requested", "leftovers-killed", "only-local", "submitted", "requeue"]
EVENTS += ["step", "validation", "killing", "node-lost", "upload-failed", "checkpoint-failed", "checkpoint-damaged"]

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(EVENTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)
RECORDS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8)
LIKELY = st.builds(lambda event, record: {**record, "event": event, "kind": event}, st.sampled_from(EVENTS), RECORDS)


def as_lines(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


CONTENTS = (
    st.binary(max_size=200)
    | st.lists(LIKELY | RECORDS, max_size=6).map(as_lines)
    | st.lists(LIKELY | RECORDS, min_size=1, max_size=6)
    .map(as_lines)
    .flatmap(lambda data: st.integers(0, len(data)).map(lambda cut: data[:cut]))
    | VALUES.map(lambda value: json.dumps(value).encode())
)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WINDLASS_RUNS", raising=False)
    return tmp_path / "runs"


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    contents=st.dictionaries(st.sampled_from(FILES), CONTENTS, max_size=5), damage=st.none() | st.binary(max_size=60)
)
def test_ls_and_show_read_anything(runs, capfd, contents, damage):
    shutil.rmtree(runs, ignore_errors=True)
    run = parse_run({"name": "r", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}})
    folder = RunFolder(runs / "r")
    folder.create(run)
    for name, content in contents.items():
        (folder.path / name).write_bytes(content)
    if damage is not None:
        text = dump_run(run).encode()
        folder.run_file.write_bytes(text[: len(damage) * 7] + damage + text[len(damage) * 7 :])
    for arguments in (
        ["ls"],
        ["ls", "--json"],
        ["show", "r", "--curve"],
        ["show", "r", "--json"],
        ["logs", "r", "-n", "5"],
    ):
        code = run_command(arguments)
        out, err = capfd.readouterr()
        assert "unexpected" not in err + out, (arguments, err, out, contents)
        if damage is None or arguments[0] == "ls":
            assert code == 0, (arguments, err, out, contents)


@given(st.lists(LIKELY | RECORDS, max_size=6))
def test_records_of_any_kind_are_judged(records):
    for record in records:
        text = describe_event(record)
        assert text is None or isinstance(text, str)
    seconds_left(records)
    follow_up(AttemptEnd(1, events=records, errors=records), records, 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FILES[:3]), CONTENTS, max_size=3))
def test_folders_of_any_kind_are_judged(tmp_path, contents):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir(exist_ok=True)
    folder.run_file.touch()
    for name in FILES[:3]:
        (tmp_path / name).unlink(missing_ok=True)
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    status_of(folder), recorded_end(folder), supervisor_of(folder), steps_of(folder), folder.errors(1)
