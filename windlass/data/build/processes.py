"""Tokenize units in processes of their own, several at once, and hand the results over in order."""

from __future__ import annotations

import json
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from windlass.common.files import sha256_of
from windlass.data.build.worker import Done, Job
from windlass.data.sources.reading import Unit
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import ExitCode, UserError


def tokenized(
    units: Sequence[tuple[int, Unit]],
    spool: Path,
    tokenizer: Tokenizer,
    *,
    workers: int,
    limit: int | None,
    digests: bool,
) -> Iterator[tuple[int, Unit, Path]]:
    """Each unit with the files its tokens are in, in order, a few of them being worked on ahead.

    Units that an earlier process finished are found in the spool and not worked on again.
    """
    workers = max(1, min(workers, len(units)))
    with ExitStack() as stack:
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(workers if units else 0):
            idle.put(stack.enter_context(Worker(tokenizer)))
        threads = ThreadPoolExecutor(workers, "windlass-tokenize")
        # Registered after the workers, so that waiting work is dropped before they are ended.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)

        def work(number: int, unit: Unit) -> Path:
            part = spool / f"{number:08d}"
            if finished(part):
                return part
            worker = idle.get()
            try:
                worker.run(Job(unit, part, limit, digests))
            finally:
                idle.put(worker)  # also after an error: a thread that waits here for ever would keep the program alive
            return part

        ahead: deque[tuple[int, Unit, Future[Path]]] = deque()
        waiting = iter(units)
        while True:
            while len(ahead) < 4 * workers and (following := next(waiting, None)):
                ahead.append((*following, threads.submit(work, *following)))
            if not ahead:
                return
            number, unit, future = ahead.popleft()
            yield number, unit, future.result()


def finished(part: Path) -> bool:
    """Whether a unit's files are there, each as its process wrote it."""
    try:
        done = Done(**json.loads(part.with_suffix(".done").read_text()))
        return all(sha256_of(part.with_suffix(f".{suffix}")) == expected for suffix, expected in done.sha256.items())
    except (OSError, ValueError, TypeError):
        return False


def remove_part(part: Path) -> None:
    for suffix in (".done", ".tokens", ".lengths", ".digests"):  # without .done it is no finished unit any more
        part.with_suffix(suffix).unlink(missing_ok=True)


class Worker:
    """A process of windlass.data.build.worker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Processes do the parallel work; threads inside each would only compete with them.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from windlass.data.build.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._send(replace(tokenizer))  # a fresh copy: without what is cached in this one

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: object) -> None:
        assert self._process.stdin
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def run(self, job: Job) -> Done:
        assert self._process.stdout
        self._send(job)
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        if isinstance(answer, dict):
            raise UserError.from_dict(answer)
        assert isinstance(answer, Done)
        return answer

    def _death(self) -> UserError:
        code = self._process.wait()
        killed = code == -9
        return UserError(
            f"a tokenizing process died with {'signal' if code < 0 else 'exit code'} {abs(code)}",
            cause="the machine may have run out of memory" if killed else "its own message is above",
            fix="the same command again goes on where it stopped; with --workers 1 it needs the least memory"
            if killed
            else None,
            exit_code=ExitCode.FAILED,
        )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
