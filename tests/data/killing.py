"""Run something in a process of its own and kill it with SIGKILL at its n-th step, again and again until it is done.

A step is anything the process does to files or asks of an object store, so that every moment between two of them is a
moment at which it can die.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forking import context

EVENTS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"})


@dataclass
class Campaign:
    kills: int = 0
    attempts: int = 0


def killed_until_done(
    work: Callable[..., None], arguments: tuple[Any, ...], under: Path, *, seed: int, longest: int, most: int = 400
) -> Campaign:
    """Start `work(*arguments)` until it ends by itself; every start but the last dies at a step drawn by the seed."""
    draw = random.Random(seed)
    campaign = Campaign()
    while campaign.attempts < most:
        campaign.attempts += 1
        # Early steps more often than late ones: those are what a resumed process goes through.
        step = draw.randint(1, draw.choice([longest // 8 + 1, longest]))
        process = context.Process(target=be_killed, args=(work, arguments, str(under), step, dict(os.environ)))
        process.start()
        process.join(120)
        assert process.exitcode is not None, "it hangs"
        if process.exitcode == 0:
            return campaign
        assert process.exitcode == -signal.SIGKILL, f"seed {seed}, step {step}: exit code {process.exitcode}"
        campaign.kills += 1
    raise AssertionError(f"not done after {most} attempts, seed {seed}")


def num_steps(work: Callable[..., None], arguments: tuple[Any, ...], under: Path) -> int:
    """How many steps an undisturbed run takes."""
    there, here = context.Pipe()
    process = context.Process(target=be_killed, args=(work, arguments, str(under), 1 << 60, dict(os.environ), here))
    process.start()
    here.close()
    steps = there.recv()
    process.join(120)
    assert process.exitcode == 0
    return int(steps)


def be_killed(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    under: str,
    step: int,
    environment: dict[str, str],
    counted: Any = None,
) -> None:
    os.environ.update(environment)
    steps = 0
    lock = threading.Lock()

    def take_step() -> None:
        nonlocal steps
        with lock:
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, details: tuple[Any, ...]) -> None:
        path = details[0] if event in EVENTS and details else None
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(under):
            take_step()

    sys.addaudithook(hear)
    count_requests(take_step)
    from windlass.errors import UserError

    try:
        work(*arguments)
    except UserError as error:
        # Killed when nothing was left to do but to remove what says so: then the result is simply there.
        if not ("exists" in error.what or "already" in error.what):
            traceback.print_exc()
            os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if counted is not None:
        counted.send(steps)
    os._exit(0)


def count_requests(take_step: Callable[[], None]) -> None:
    """Before and after everything that is asked of an object store."""
    from windlass.store.s3 import S3Store

    plain = S3Store._retried

    def noticed(self: S3Store, action: Callable[[], Any]) -> Any:
        take_step()
        answer = plain(self, action)
        take_step()
        return answer

    S3Store._retried = noticed  # type: ignore[method-assign, assignment]
