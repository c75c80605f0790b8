"""What every rank runs: `torchrun -m windlass.trainer RUN.yaml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.data.checks import check_data
from windlass.errors import ExitCode, UserError
from windlass.plan import check, resolve
from windlass.runfolder import RunFolder, write_atomically
from windlass.spec import Run, load_run
from windlass.trainer.faults import Faults
from windlass.trainer.host_memory import keep_freed_memory
from windlass.trainer.loop import train
from windlass.trainer.preemption import Preemption
from windlass.trainer.preparation import prepare
from windlass.trainer.ranks import join_ranks
from windlass.trainer.reporting import attempt_number, set_up_logging
from windlass.trainer.start_clock import clock

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
    try:
        run = resolve(load_run(options.run_file, options.overrides))
        check(run, world_size)
        check_data(run)
        folder = RunFolder.of(run)
        return int(train_in(folder, run, preemption))
    except UserError as error:
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:  # once per node: it may be this node alone that lacks a file
            print(error, file=sys.stderr)
        report_error(folder, rank, error, retry=False)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BaseException as error:
        # A peer that died shows up here as a lost connection: worth another attempt from the last checkpoint.
        retry = isinstance(error, dist.DistError) or _lost_a_peer(error)
        log.exception("rank %d failed", rank)
        report_error(folder, rank, error, retry=retry)
        return int(ExitCode.FAILED)


def train_in(folder: RunFolder, run: Run, preemption: Preemption) -> ExitCode:
    """Everything that can be wrong with the input comes to light before the run folder is touched."""
    ranks = join_ranks(run)
    clock.mark("joining the ranks")
    if ranks.device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # That alone would fill every new tensor with a number, in case somebody reads it before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        keep_freed_memory()
    faults = Faults(ranks.rank, folder.logs)
    prepared = prepare(run, ranks)
    clock.mark("data and model files")
    open_folder(folder, ranks.rank)
    code = train(run, prepared, folder, ranks, faults, preemption)
    dist.barrier(group=ranks.host)
    if code == ExitCode.OK and run.checkpoint.export and ranks.is_first:
        from windlass.trainer.export import export_checkpoint
        from windlass.trainer.judging import best_step

        best = best_step(folder) if run.checkpoint.keep_best else None
        export_checkpoint(folder, folder.export, step=best, merge=run.checkpoint.export == "merged")
    return code


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
    described: dict[str, Any] = (
        error.as_dict()
        if isinstance(error, UserError)
        else {
            "error": f"{type(error).__name__}: {error}",
            "evidence": None,
            "cause": None,
            "fix": None,
            "exit_code": int(ExitCode.FAILED),
        }
    )
    described |= {
        "rank": rank,
        "host": socket.gethostname(),
        "attempt": attempt_number(),
        "time": round(time.time(), 3),
        "traceback": "".join(traceback.format_exception(error)),
        "retry": retry,
    }
    try:
        write_atomically(folder.rank_error(rank), json.dumps(described, indent=1))
    except OSError as problem:  # the error itself may be a full disk
        log.error("%s could not be written: %s", folder.rank_error(rank), problem)


def _lost_a_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("connection closed", "connection reset", "gloo", "nccl", "timed out", "broken pipe")
    )


def run_and_exit(preemption: Preemption) -> None:
    """Leave without C++ destructors: gloo's threads abort the process when they are torn down at exit."""
    code = main(preemption)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
