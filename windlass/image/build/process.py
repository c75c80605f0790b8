"""Run a container tool: its output line by line as it comes, and all of it kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    found = BUILDAH_STEP.match(line) or BUILDKIT_STEP.match(line)
    if not found:
        return None
    total = found["steps"]
    return Step(int(found["step"]), int(total) if total else None, found["text"].strip())


ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r(?!\n)")


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    exit_code: int
    output: str

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    def tail(self, lines: int = 5) -> str:
        return "\n".join([line for line in self.output.splitlines() if line.strip()][-lines:])


def plain(text: str) -> str:
    """Without colours and carriage returns, which are for terminals."""
    return ANSI.sub("", text)


def stream(
    command: Sequence[str],
    on_line: Callable[[str], None] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    inherit: Sequence[int] = (),
    log: Path | None = None,
) -> Outcome:
    """Run `command`; stdout and stderr come as one, line by line. A Ctrl-C ends the whole group, then goes on up.

    `environment` is added to ours; `inherit` are file descriptors that the command may read.
    """
    lines: list[str] = []
    with _start(command, subprocess.STDOUT, environment, inherit, subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            with open(log, "w") if log else open(os.devnull, "w") as file:
                for raw in process.stdout:
                    line = plain(raw).rstrip("\n")
                    lines.append(line)
                    file.write(line + "\n")
                    file.flush()
                    if on_line:
                        on_line(line)
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    return Outcome(code, "\n".join(lines))


def capture(
    command: Sequence[str],
    *,
    text_in: str | None = None,
    environment: Mapping[str, str] | None = None,
    inherit: Sequence[int] = (),
    timeout: float | None = None,
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, apart."""
    stdin = subprocess.DEVNULL if text_in is None else subprocess.PIPE
    with _start(command, subprocess.PIPE, environment, inherit, stdin) as process:
        try:
            out, err = process.communicate(text_in, timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = process.communicate()
            return 124, plain(out), plain(err) + f"\nended after {timeout:.0f} s"
        except BaseException:
            _end(process)
            raise
    return process.returncode, plain(out), plain(err)


def _start(
    command: Sequence[str], stderr: int, environment: Mapping[str, str] | None, inherit: Sequence[int], stdin: int
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(environment or {})},
            pass_fds=tuple(inherit),
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed", fix=f"apt-get install {command[0]}") from None


def _end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
