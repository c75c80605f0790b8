"""The real client, supervisor and torchrun around the stand-in trainer."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.targets.local.client import LocalTarget
from windlass.targets.protocol import JobStatus

STANDIN = Path(__file__).parent / "standin_trainer.py"


class Local:
    """The real client, supervisor and torchrun; only what the ranks run is replaced."""

    def __init__(self, machine, torchrun):
        self.target = LocalTarget(machine)
        self.torchrun = torchrun

    def submit(self, run, **plan):
        return self.target.submit(self.target.settle(run), self.request(run, **plan))

    def start(self, run, lock, **plan):
        """What `submit` does once it holds the lock."""
        from windlass.targets.local.client import start_supervisor

        start_supervisor(RunFolder.of(run), self.target.settle(run), self.request(run, **plan), lock)
        os.close(lock)

    def request(self, run, **plan):
        run = self.target.settle(run)
        request = self.target.render(run, self.target.gather(run))
        argv = [*request.argv[: request.argv.index("windlass.trainer") - 1], str(STANDIN), request.argv[-1]]
        if not self.torchrun:  # one rank that is its own launcher: what does not need torchrun need not wait for it
            argv = [sys.executable, str(STANDIN), request.argv[-1]]
        extra = {"STANDIN": json.dumps(plan)} | ({} if self.torchrun else {"RANK": "0", "WORLD_SIZE": "1"})
        return replace(request, argv=tuple(argv), environment={**request.environment, **extra})

    def wait(self, job, condition=None, seconds=600) -> JobStatus:
        """Until a condition holds, or else the run has ended. `seconds` is for a run that hangs: a start of torchrun
        alone takes a busy machine a minute.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = self.target.status(job)
            if condition(status) if condition else status.ended:
                return status
            time.sleep(0.05)
        log = (job.folder.logs / "launcher.log").read_text() if job.folder.logs.exists() else ""
        raise AssertionError(f"{status}\n{job.folder.history.read_text()}\n{log}")


def events(job, *names):
    return [record for record in read_json_lines(job.folder.history) if record["event"] in names or not names]
