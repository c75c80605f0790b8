"""Locks between processes: waited for, given back by whatever ends their holder."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

from windlass.common.locks import FileLock, locked

HOLDER = """
import sys, time
from pathlib import Path
from windlass.common.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
lock.acquire(shared=sys.argv[2] == "shared")
print("held", flush=True)
time.sleep(600)
"""


def test_a_lock_is_held_until_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path), "exclusive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with locked(path, patience_s=0) as mine:
            assert not mine
        with locked(path, patience_s=0.2) as mine:
            assert not mine
        holder.send_signal(signal.SIGKILL)
        with locked(path) as mine:
            assert mine


def test_shared_locks_keep_out_exclusive_ones_only(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock", create=False)
    assert first.acquire(shared=True)
    assert second.acquire(shared=True, patience_s=0)
    assert not second.acquire(patience_s=0)
    first.release()
    assert second.acquire(patience_s=0)
    assert not first.acquire(shared=True, patience_s=0)


def test_a_lock_that_nobody_refers_to_is_given_back_unless_it_was_detached(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path)
    assert lock.acquire()
    del lock
    gc.collect()
    lock = FileLock(path)
    assert lock.acquire(patience_s=0)
    handle = lock.detach()
    del lock
    gc.collect()
    with locked(path, patience_s=0) as mine:
        assert not mine
    os.close(handle)
    with locked(path, patience_s=0) as mine:
        assert mine
