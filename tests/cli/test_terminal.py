"""What people see: a terminal of 80 columns, a file, and terminals without colours."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from windlass.cli.output import has_styles
from windlass.common.files import append_json_line
from windlass.plan import resolve
from windlass.runfolder import RunFolder
from windlass.spec import load_run

LONG = "qwen-fine-tune-of-the-second-corpus-with-lr-3e-5"
ESCAPE = "\x1b"
NOT_COLOURED = [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}]
CHATS = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Emma."}]}] * 5
COMMANDS = [
    "init other.yaml",
    "init --list",
    "plan small.yaml",
    "plan small.yaml train.learning_rate=3",
    "run small.yaml name=small",
    "run small.yaml name=small train.learning_rate=1e-5 --fresh",
    "ls",
    "show small",
    f"show {LONG}",
    f"compare small {LONG}",
    f"ckpt ls {LONG}",
    "data inspect chats.jsonl --format chat --tokenizer tiny --samples 0",
    "data inspect small.yaml",
    "show nothing-of-this-name",
]


@pytest.fixture
def folder(tmp_path, monkeypatch, run_file):
    """Two runs with long names, long reasons and large numbers."""
    monkeypatch.chdir(tmp_path)
    for name in ("WINDLASS_RUNS", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    base = resolve(load_run(run_file))
    for name, state in (("small", "finished"), (LONG, "failed")):
        run = base.model_copy(update={"name": name})
        made = RunFolder.of(run)
        made.create(run)
        made.record("launched", attempt=1)
        made.record("started", attempt=1, world_size=2)
        for step in (999_999, 1_000_000):
            record = {"kind": "step", "step": step, "steps": 1_000_000, "loss": 2.3456, "step_s": 1.0, "time": 1.0}
            append_json_line(made.metrics, {**record, "tokens_per_s": 123456.0, "tokens": 10**12, "attempt": 1})
        reason = "rank 1 was killed by the kernel, which had no memory left: 31.2 of 31.4 GiB were in use by its ranks"
        made.record("gave-up", why=reason)
        made.record("exit", state=state, code=0 if state == "finished" else 1, reason=reason)
        (made.path / "supervisor.json").write_text(json.dumps({"pid": 1, "start_time": 1, "host": "x", "boot": "y"}))
        (made.path / "checkpoints" / "step-1000000").mkdir(parents=True)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return tmp_path


def environment(**changes):
    return {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path), **changes}


def on_terminal(*words, columns=80, **changes):
    """What a command writes to a terminal of this width, both streams together."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=environment(**changes))
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux says so when the last one who had the terminal is gone
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    process.wait(timeout=60)
    return b"".join(parts).decode().replace("\r\n", "\n")


# Many commands in one process: most of the time of a command is its start.
TYPING = """
import sys
from windlass.cli.main import run_command
for command in sys.argv[1:]:
    run_command(command.split())
    sys.stderr.flush()
    print("\\x04", flush=True)
"""


def in_terminal(*commands, **options):
    """What each of these commands writes to a terminal, and that of the only one."""
    outputs = on_terminal(sys.executable, "-c", TYPING, *commands, **options).split("\x04\n")[:-1]
    return outputs if len(commands) > 1 else outputs[0]


def piped(*commands, **changes):
    """The same in a file."""
    answer = subprocess.run(
        [sys.executable, "-c", TYPING, *commands],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**changes),
        timeout=120,
        check=True,
    )
    outputs = answer.stdout.split("\x04\n")[:-1]
    return outputs if len(commands) > 1 else outputs[0]


def words(text):
    """What a reader reads, without what changes from second to second."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    return {word for word in plain.split() if not re.search(r"^[\d.]+$|^\d+:|───|windlass-\w+\.traceback", word)}


def is_copied(line):
    """Commands, paths and names stay whole, whatever the width."""
    return line.lstrip().startswith(("fix", "windlass")) or any(len(word) > 30 for word in line.split())


@pytest.mark.slow
def test_every_command_is_readable_at_80_columns(folder):
    """Nothing is cut: every word that stands in a file stands on the terminal, and no line is wider than it is."""
    in_file = piped(*COMMANDS)
    (folder / "other.yaml").unlink()
    for command, wide, narrow in zip(COMMANDS, in_file, in_terminal(*COMMANDS, NO_COLOR="1"), strict=True):
        assert "Traceback" not in narrow
        missing = words(wide) - words(narrow)
        assert not missing, f"{command}: {missing}\n{narrow}"
        assert "…" not in narrow.replace("s3://…", ""), narrow
        wider = [line for line in narrow.splitlines() if len(line.rstrip()) > 80]
        assert all(is_copied(line) for line in wider), f"{command}: {wider}"


def test_a_file_gets_one_line_for_each_row(folder):
    rows, shown = (text.splitlines() for text in piped("ls", f"show {LONG}"))
    assert rows[0].split()[0] == "NAME"
    (row,) = [line for line in rows if line.startswith(LONG)]
    assert "1000000/1000000" in row
    assert "2.3456" in row
    assert "123,456" in row
    assert any(line.startswith("reason") and line.endswith("in use by its ranks") for line in shown)
    assert not any(line != line.rstrip() for line in [*rows, *shown])


@pytest.mark.slow
def test_columns_are_what_the_user_says(folder):
    show = f"show {LONG}"
    told = piped(show, COLUMNS="60")
    assert max(len(line) for line in told.splitlines() if not is_copied(line)) <= 60
    assert words(told) == words(piped(show)) == words(piped(show, COLUMNS="nonsense"))
    on_wide = in_terminal(show, columns=80, COLUMNS="200", NO_COLOR="1")
    assert any(line.endswith("in use by its ranks") and line.startswith("reason") for line in on_wide.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("setting", NOT_COLOURED, ids=str)
def test_no_escape_at_all(folder, setting):
    assert ESCAPE in in_terminal("ls"), "a terminal gets colours, or this test shows nothing"
    assert ESCAPE not in "".join(in_terminal("ls", "plan small.yaml", "show small", **setting))


def test_colours_can_be_forced(folder, monkeypatch):
    assert ESCAPE in piped("ls", FORCE_COLOR="1")
    for settings, styles in (({}, False), ({"CLICOLOR_FORCE": "1"}, True), ({"CLICOLOR_FORCE": "0"}, False)):
        with monkeypatch.context() as changed:
            for name, value in settings.items():
                changed.setenv(name, value)
            assert has_styles() == styles
            changed.setenv("NO_COLOR", "1")
            assert not has_styles()


FOLLOWING = """
from windlass.cli.runs.follow import reporter
news = reporter(1_000_000, as_json=False)
for step in (1, 500_000, 1_000_000):
    record = {"step": step, "steps": 1_000_000, "loss": 2.3456, "tokens_per_s": 123456.0, "seconds_left": 7800.0}
    news.step(record)
    if step == 500_000:
        news.report("rank 0 was killed by SIGKILL", {})
news.close()
"""


@pytest.mark.parametrize("setting", [{}, *NOT_COLOURED], ids=str)
def test_progress_is_readable(folder, setting):
    seen = on_terminal(sys.executable, "-c", FOLLOWING, **setting)
    assert "rank 0 was killed by SIGKILL" in seen
    assert "1000000/1000000" in seen
    assert "loss 2.3456" in seen
    assert "123,456 tok/s" in seen
    assert "…" not in seen
    if setting:
        assert ESCAPE not in seen
        for line in re.split(r"[\r\n]", seen):
            assert len(line) <= 80
        assert [line for line in seen.split("\n") if line.rstrip().endswith("rank 0 was killed by SIGKILL")]
