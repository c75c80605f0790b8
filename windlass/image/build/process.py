"""Run a container tool: its output line by line as it comes, and all of it kept."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.errors import UserError

BUILDAH_STEP = re.compile(
    r"^(?:\[(?P<stage>\d+)/(?P<stages>\d+)\] )?STEP (?P<step>\d+)(?:/(?P<steps>\d+))?: (?P<text>.*)"
)
BUILDKIT_STEP = re.compile(r"^#\d+ \[(?:(?P<name>[\w.-]+) )?\s*(?P<step>\d+)/(?P<steps>\d+)\] (?P<text>.*)")


@dataclass(frozen=True)
class Step:
    """One instruction of the Dockerfile that is being worked on."""

    number: int
    total: int | None
    text: str

    def __str__(self) -> str:
        of = f"/{self.total}" if self.total else ""
        return f"step {self.number}{of}: {self.text}"


def step_of(line: str) -> Step | None:
    """The step that begins with this line of a log, of buildah, podman or BuildKit (--progress=plain)."""
    match = BUILDAH_STEP.match(line) or BUILDKIT_STEP.match(line)
    if not match:
        return None
    total = match["steps"]
    return Step(int(match["step"]), int(total) if total else None, match["text"].strip())


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r(?!\n)")


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    exit_code: int
    stdout: str
    stderr: str = ""

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0


def plain(text: str) -> str:
    """Without colours and carriage returns, which are for terminals."""
    return ANSI.sub("", text)


def last_lines(text: str, count: int = 5) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def stream(
    command: Sequence[str],
    on_line: Callable[[str], None] | None = None,
    *,
    inherit: Sequence[int] = (),
    log: Path | None = None,
) -> Outcome:
    """Run `command`; stdout and stderr come as one, line by line. `inherit`: file descriptors that it may read."""
    lines: list[str] = []
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "pass_fds": tuple(inherit)}
    with open(log or os.devnull, "w") as file, _running(command, **options) as process:
        assert process.stdout is not None
        for raw in process.stdout:
            line = plain(raw).rstrip("\n")
            lines.append(line)
            file.write(line + "\n")
            file.flush()
            if on_line:
                on_line(line)
        return Outcome(process.wait(), "\n".join(lines))


def capture(command: Sequence[str], *, text_in: str = "", timeout: float | None = None) -> Outcome:
    """Stdout and stderr apart; exit code 124 for a command that was ended after `timeout` seconds."""
    try:
        with _running(command, stderr=subprocess.PIPE, stdin=subprocess.PIPE) as process:
            out, error = process.communicate(text_in, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Outcome(124, "", f"ended after {timeout:.0f} s")
    return Outcome(process.returncode, plain(out), plain(error))


@contextlib.contextmanager
def _running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, which is ended where the block is left early, by Ctrl-C say."""
    try:
        started = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, start_new_session=True, text=True, errors="replace", **options
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed", fix=f"apt-get install {command[0]}") from None
    with started as process:
        try:
            yield process
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
