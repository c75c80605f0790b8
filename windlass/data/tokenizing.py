"""Tokenize sources into a folder of shards with several processes; the same bytes whatever their number."""

from __future__ import annotations

import fcntl
import os
import pickle
import queue
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.reading import Unit, units_of
from windlass.data.shards import DTYPES, Index, dtype_for
from windlass.data.sources import INDEX_NAME, FileSource, HubSource
from windlass.data.tokenizer import Tokenizer
from windlass.data.worker import LENGTH_DTYPE, Done, Job
from windlass.data.writing import ShardWriter
from windlass.errors import ExitCode, UserError

SHARD_TOKENS = 100_000_000
Progress = Callable[[int, int], None]


def tokenize(
    sources: Sequence[FileSource | HubSource],
    out: Path,
    tokenizer: Tokenizer,
    *,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    limit: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Write the shards of all documents of the sources to `out`, which appears when it is complete."""
    tokenizer.require_eos()
    require_free(out, overwrite)
    units = units_of(sources)
    total = sum(piece.size for unit in units for piece in unit)
    report = progress or (lambda done, total: None)
    report(0, total)
    with temporary_beside(out) as folder:
        spool = folder / "spool"
        spool.mkdir()
        writer = ShardWriter(folder, tokenizer, shard_tokens=shard_tokens)
        done = 0
        for unit, part in tokenized(units, spool, tokenizer, workers or cores(), limit):
            append(writer, part, DTYPES[dtype_for(tokenizer.vocab_size)], limit)
            done += sum(piece.size for piece in unit)
            report(done, total)
            if limit is not None and writer.num_documents >= limit:
                break
        if not writer.num_documents:
            names = ", ".join(source.name for source in sources)
            raise UserError(f"{names} holds no text", cause="every file is empty, or every document in them")
        shutil.rmtree(spool)
        index = writer.finish()
        publish(folder, out, overwrite)
    report(total, total)
    return index


def append(writer: ShardWriter, part: Path, dtype: np.dtype[Any], limit: int | None) -> None:
    """Move a tokenized unit from the spool into the shards."""
    lengths = np.fromfile(part.with_suffix(".lengths"), dtype=LENGTH_DTYPE)
    if limit is not None:
        lengths = lengths[: limit - writer.num_documents]
    if len(lengths):
        tokens = np.memmap(part.with_suffix(".tokens"), dtype=dtype, mode="r", shape=(int(lengths.sum()),))
        writer.append(tokens, lengths)
    part.with_suffix(".lengths").unlink()
    part.with_suffix(".tokens").unlink()


def tokenized(
    units: Sequence[Unit], spool: Path, tokenizer: Tokenizer, workers: int, limit: int | None
) -> Iterator[tuple[Unit, Path]]:
    """Each unit with the files its tokens are in, in order, a few of them being worked on ahead."""
    workers = max(1, min(workers, len(units)))
    with ExitStack() as stack:
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(workers):
            idle.put(stack.enter_context(Worker(tokenizer)))
        threads = ThreadPoolExecutor(workers, "windlass-tokenize")
        # Registered after the workers, so that waiting work is dropped before they are ended.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)

        def work(number: int, unit: Unit) -> Path:
            worker = idle.get()
            part = spool / f"{number:08d}"
            try:
                worker.run(Job(unit, part, limit))
            finally:
                idle.put(worker)  # also after an error: a thread that waits here for ever would keep the program alive
            return part

        ahead: deque[tuple[Unit, Future[Path]]] = deque()
        waiting = iter(enumerate(units))
        while True:
            while len(ahead) < 4 * workers and (following := next(waiting, None)):
                ahead.append((following[1], threads.submit(work, *following)))
            if not ahead:
                return
            unit, future = ahead.popleft()
            yield unit, future.result()


class Worker:
    """A process of windlass.data.worker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Processes do the parallel work; threads inside each would only compete with them.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from windlass.data.worker import main; main()"],
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
            fix="windlass data tokenize … --workers 1" if killed else None,
            exit_code=ExitCode.FAILED,
        )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_free(out: Path, overwrite: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{out} exists", fix="another -o FOLDER, or --overwrite")
    if not (out / INDEX_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not a folder of token shards, so it is not overwritten", fix="another -o FOLDER")


@contextmanager
def temporary_beside(out: Path) -> Iterator[Path]:
    """A folder for work in progress next to `out`; those of runs that were killed are removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for stale in out.parent.glob(f".{out.name}.*.tmp"):
        remove_if_abandoned(stale)
    folder = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir()
    except OSError as error:
        raise UserError(f"{out.parent} cannot be written to", evidence=str(error)) from None
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        except OSError as error:
            if error.errno is None:
                raise
            raise UserError(f"{out} cannot be written", evidence=str(error), exit_code=ExitCode.FAILED) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_if_abandoned(folder: Path) -> None:
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        pass  # its owner is about to make the lock, or has just removed the folder
    except BlockingIOError:
        pass  # its owner is at work


def publish(folder: Path, out: Path, overwrite: bool) -> None:
    (folder / "lock").unlink()
    former = folder.with_suffix(".old")
    if overwrite and out.exists():
        out.rename(former)
    folder.rename(out)
    shutil.rmtree(former, ignore_errors=True)
