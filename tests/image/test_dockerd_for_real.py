"""The docker daemon of these tests takes nothing with it and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.image import dockerd
from tests.image.conftest import REPOSITORY

pytestmark = pytest.mark.image

SESSION = """\
import sys
from pathlib import Path
from tests.image.dockerd import DockerDaemon
daemon = DockerDaemon(Path(sys.argv[1]))
daemon.start()
sys.stdin.readline()
daemon.stop()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_daemon_that_is_stopped_or_whose_session_is_killed_is_gone(killed, tmp_path):
    if os.getuid() != 0 or dockerd.why_not():
        pytest.skip(dockerd.why_not() or "it needs root")
    before = sights()
    folder = tmp_path / "d"
    command = [sys.executable, "-c", SESSION, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True) as session:
        try:
            wait(lambda: "API listen on" in log(folder))
            assert processes(folder)
            assert f"{dockerd.BRIDGE}{session.pid}" in os.listdir("/sys/class/net")
            assert mounts(folder) == [], "its mounts are its own"
            if killed:
                session.send_signal(signal.SIGKILL)
            else:
                session.communicate("\n", timeout=90)
                assert not folder.exists()
        finally:
            session.kill()
            session.wait()
    wait(lambda: not processes(folder))
    dockerd._sweep()  # as the next start does
    assert f"{dockerd.BRIDGE}{session.pid}" not in os.listdir("/sys/class/net")
    assert dockerd._groups(f"{dockerd.GROUP}{session.pid}") == []
    assert sights() == before


def sights() -> dict[str, object]:
    """What a docker of the machine has of its own."""
    places = (Path("/etc/docker"), Path("/run/docker"), Path("/run/docker.sock"))
    return {str(place): sorted(map(str, place.rglob("*"))) if place.exists() else None for place in places}


def log(folder: Path) -> str:
    path = folder / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def processes(folder: Path) -> list[int]:
    """Those whose command line names the folder, without the session itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(os.fsencode(folder) + b"/" in word for word in words):
            found.append(int(path.parent.name))
    return found


def mounts(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]


def wait(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
