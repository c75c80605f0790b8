"""What every rank runs: `torchrun -m windlass.trainer RUN.yaml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.common import own_code
from windlass.common.files import write_atomically
from windlass.data.checks import check_data
from windlass.errors import ExitCode, UserError
from windlass.plan import check, resolve
from windlass.runfolder import RunFolder, steps_of
from windlass.spec import Run, load_run
from windlass.trainer.callbacks.preemption import Preemption
from windlass.trainer.distributed.failures import OF_A_PEER, PeerLostError, class_of, described, may_retry
from windlass.trainer.distributed.faults import Faults
from windlass.trainer.distributed.peers import Lost, PeerWatch, abort_device_groups
from windlass.trainer.distributed.ranks import join_ranks, local_world_size
from windlass.trainer.loop import train
from windlass.trainer.preparation import prepare
from windlass.trainer.reporting import attempt_number, set_up_logging
from windlass.trainer.startup import clock, keep_freed_memory
from windlass.trainer.state import Attempt

log = logging.getLogger(__name__)


def main(preemption: Preemption, arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code of this rank."""
    parser = argparse.ArgumentParser(prog="windlass.trainer", description=__doc__)
    parser.add_argument("run_file", help="the run file, as written by hand or resolved by `windlass run`")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    clock.mark("imports")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folder: RunFolder | None = None
    watch = PeerWatch()
    try:
        saved = Path(options.run_file).name == "run.yaml"  # as launchers pass it: its paths are resolved already
        run = resolve(load_run(options.run_file, options.overrides, saved=saved))
        own_code.use_folder(run.code)
        check(run, world_size, local_world_size())
        check_data(run)
        folder = RunFolder.of(run)
        code = train_in(folder, run, preemption, watch)
        watch.close()
        return int(code)
    except UserError as error:
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:  # once per node: it may be this node alone that lacks a file
            print(error, file=sys.stderr)
        report_error(folder, rank, error, retry=False)
        watch.close(error.what)
        return int(error.exit_code)
    except KeyboardInterrupt:
        watch.close("interrupted")
        return int(ExitCode.INTERRUPTED)
    except BaseException as error:
        retry = may_retry(error)
        # A peer that died shows up here as a lost connection; the watch knows which one it was.
        lost = watch.who() if class_of(error) in OF_A_PEER else None
        log.exception("rank %d failed", rank)
        report_error(folder, rank, lost_error(lost, error) if lost else error, retry=retry)
        watch.close(str(described(error)["error"]))
        if dist.is_initialized():
            abort_device_groups()
        return int(ExitCode.RETRY if retry else ExitCode.FAILED)


def train_in(folder: RunFolder, run: Run, preemption: Preemption, watch: PeerWatch) -> ExitCode:
    """Everything that can be wrong with the input comes to light before the run folder is touched."""
    record_collectives(folder)
    ranks = join_ranks(run)
    clock.mark("joining the ranks")
    if ranks.device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # That alone would fill every new tensor with a number, in case somebody reads it before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        keep_freed_memory()
    faults = Faults(ranks.rank, folder.logs)
    watch.begin(
        ranks,
        limit_s=60 * run.parallel.timeout_minutes,
        where=lambda: faults.reached,
        on_lost=lambda lost: leave_for_lost(folder, ranks.rank, lost),
    )
    prepared = prepare(run, ranks)
    if not gc.isenabled():  # since __main__: transformers was imported by now, and weights come next
        gc.freeze()
        gc.enable()
    clock.mark("data and model files")
    open_folder(folder, ranks.rank)
    log.info("every rank takes %d × %d sequences a step", prepared.layout.num_micro, prepared.layout.micro)
    code = train(Attempt(run, prepared, folder, ranks, faults, preemption, watch))
    dist.barrier(group=ranks.host)
    if code == ExitCode.OK and run.checkpoint.export and ranks.is_first:
        from windlass.checkpoint.pruning import best_step
        from windlass.trainer.export import export_checkpoint

        best = best_step(folder) if run.checkpoint.keep_best else None
        export_checkpoint(folder, folder.export, step=best, merge=run.checkpoint.export == "merged")
    return code


def train_here(folder: RunFolder, run: Run) -> tuple[ExitCode, int]:
    """Train inside a program that goes on afterwards: how it ended, and after which step.

    Whatever goes wrong is raised, and left in the run folder as by any rank.
    """
    check_data(run)
    preemption, watch = Preemption(), PeerWatch()
    if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
        preemption.listen()  # in a notebook SIGTERM is not ours
    rank = int(os.environ.get("RANK", "0"))
    try:
        code = train_in(folder, run, preemption, watch)
    except Exception as error:
        report_error(folder, rank, error, retry=may_retry(error))
        raise
    finally:
        watch.close()
        _leave()
    return code, max(steps_of(folder), default=0)


def _leave() -> None:
    """Undo what the program would notice: process groups, and log lines that come twice in a second run."""
    if dist.is_initialized():
        dist.destroy_process_group()
    log = logging.getLogger("windlass")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def record_collectives(folder: RunFolder) -> None:
    """Let torch keep its last collectives, so that one which a rank missed can be named."""
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", str(folder.logs / "nccl-trace-rank-")),
    ):
        if OLDER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)


OLDER_NAMES = {  # before torch 2.12
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}


def leave_for_lost(folder: RunFolder, rank: int, lost: Lost) -> None:
    """End this rank from the watching thread: its main thread waits in a collective that the lost rank never joins."""
    log.error("rank %d leaves: %s", rank, lost)
    report_error(folder, rank, lost_error(lost, None), retry=True)
    abort_device_groups()
    leave(int(ExitCode.RETRY))


def lost_error(lost: Lost, seen: BaseException | None) -> PeerLostError:
    error = PeerLostError(f"{lost}\nthis rank saw {type(seen).__name__}: {seen}" if seen else str(lost))
    error.__cause__ = seen
    return error


def open_folder(folder: RunFolder, rank: int) -> None:
    """The run folder, made by whichever rank comes first."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    set_up_logging(folder, rank)
    faulthandler.enable(file=folder.rank_log(rank).open("a"))
    folder.rank_error(rank).unlink(missing_ok=True)


def report_error(folder: RunFolder | None, rank: int, error: BaseException, *, retry: bool) -> None:
    """Leave the error where launchers and `windlass show` find it. Without a run folder nothing is left behind."""
    if folder is None or not folder.logs.is_dir():
        return
    content: dict[str, Any] = (
        {**error.as_dict(), "class": class_of(error)}
        if isinstance(error, UserError)
        else {**described(error), "exit_code": int(ExitCode.RETRY if retry else ExitCode.FAILED)}
    )
    content |= {
        "rank": rank,
        "host": socket.gethostname(),
        "attempt": attempt_number(),
        "time": round(time.time(), 3),
        "type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "retry": retry,
    }
    try:
        write_atomically(folder.rank_error(rank), json.dumps(content, indent=1))
    except OSError as problem:  # the error itself may be a full disk
        log.error("%s could not be written: %s", folder.rank_error(rank), problem)


def run_and_exit(preemption: Preemption) -> None:
    """Leave without C++ destructors: gloo's threads abort the process when they are torn down at exit."""
    leave(main(preemption))


def leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
