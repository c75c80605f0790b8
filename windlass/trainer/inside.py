"""Train inside a program that goes on afterwards: a notebook, or a script of the user's own under torchrun."""

from __future__ import annotations

import logging
import os
import threading

import torch.distributed as dist

from windlass.data.checks import check_data
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.spec import Run
from windlass.trainer.callbacks.preemption import Preemption
from windlass.trainer.distributed.failures import may_retry
from windlass.trainer.distributed.peers import PeerWatch
from windlass.trainer.main import report_error, train_in


def train_here(folder: RunFolder, run: Run) -> tuple[ExitCode, int]:
    """How it ended, and after which step. Whatever goes wrong is raised, and left in the run folder as by any rank."""
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
    return code, _last_step(folder)


def _leave() -> None:
    """Undo what the program would notice: process groups, and log lines that come twice in a second run."""
    if dist.is_initialized():
        dist.destroy_process_group()
    log = logging.getLogger("windlass")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def _last_step(folder: RunFolder) -> int:
    from windlass.runfolder import steps_of

    return max(steps_of(folder), default=0)
