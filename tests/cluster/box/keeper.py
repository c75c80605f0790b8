"""The process that removes the box when whoever started it is gone, however that came about.

It holds the machine's lock for as long as a box is up, and the reading end of a pipe. The pipe closes when its owner
ends, even by SIGKILL: then everything is removed. A byte in the pipe says that the box is to stay (`up`, for
developers); then only SIGTERM (`down`) ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box import build, host, machine
from tests.cluster.box.api import Api
from tests.cluster.box.layout import KUBECONFIG, LOCK, ROOT

REPOSITORY = Path(__file__).parents[3]
KEPT = ROOT / "kept"


@dataclass
class Hold:
    """The owner's side: as long as this is open, the box is."""

    process: subprocess.Popen[bytes]
    pipe: int

    def keep(self) -> None:
        KEPT.write_text(build.version_key())
        os.write(self.pipe, b"k")
        os.close(self.pipe)

    def release(self) -> None:
        """Remove the box, and wait for it."""
        os.close(self.pipe)
        if self.process.wait(timeout=180) != 0 or host.leftovers():
            raise host.BoxError(f"the box was not removed completely: {host.leftovers()}")


def start(seconds: float = 900) -> Hold:
    """Take the machine's lock (waiting for whoever has it) and have it kept."""
    lock = machine.take_lock(seconds)
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.box.keeper", str(reading)],
        pass_fds=(reading, lock),  # the lock lives as long as the keeper
        start_new_session=True,  # Ctrl-C is for the tests
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # it may outlive whoever reads ours
        stderr=subprocess.DEVNULL,
    )
    os.close(reading)
    LOCK.write_text(str(process.pid))
    os.close(lock)
    return Hold(process, writing)


def running() -> int | None:
    """The keeper's pid, if there is one."""
    try:
        pid = int(LOCK.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"tests.cluster.box.keeper" in command else None


def kept() -> bool:
    """Whether a box is up that stays. It must be of this version and alive, or nobody would know what was tested."""
    if running() is None or not KEPT.exists():
        return False
    end_it = "end it: python -m tests.cluster.box down"
    if KEPT.read_text() != build.version_key():
        raise host.BoxError(f"the box that is up was compiled from other versions; {end_it}")
    if not Api(KUBECONFIG).ready():
        raise host.BoxError(f"the box that is up does not answer at {KUBECONFIG}; {end_it}")
    return True


def stop() -> None:
    """End a box that was left running, and remove whatever is there."""
    pid = running()
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    lock = machine.take_lock(180)
    host.sweep()
    os.close(lock)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_remove()))
    if os.read(int(sys.argv[1]), 1) == b"k":
        while True:
            signal.pause()
    sys.exit(_remove())


def _remove() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    host.sweep()
    return 0


if __name__ == "__main__":
    main()
