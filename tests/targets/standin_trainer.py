"""Stands in for the trainer under a real torchrun: writes the same records, and dies as $STANDIN says."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from windlass.common.files import append_json_line, read_json_lines
from windlass.errors import UserError
from windlass.runfolder import RunFolder
from windlass.spec import load_run

run = load_run(sys.argv[1])
folder = RunFolder.of(run)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["WINDLASS_ATTEMPT"])
plan = json.loads(os.environ.get("STANDIN", "{}"))
told = folder.path / f"told-{attempt}"


def on_sigterm(_signal, _frame):
    told.touch()


def say(text):
    with folder.rank_log(rank).open("a") as log:
        log.write(f"{text}\n")
    print(text, flush=True)


def step_of(peer):
    try:
        return int((folder.path / f"at-{attempt}-{peer}").read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


signal.signal(signal.SIGTERM, on_sigterm)
if plan.get("orphan"):  # as a rank whose torchrun is gone: nothing reaches it when its supervisor dies
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
saved = [record["step"] for record in read_json_lines(folder.history) if record["event"] == "checkpoint"]
first = max(saved, default=0)
if rank == 0:
    folder.record("resumed" if first else "started", attempt=attempt, world_size=world_size, step=first)
for step in range(first + 1, run.train.steps + 1):
    time.sleep(plan.get("pause", 0.02))
    if plan.get("kill") == [rank, step] and (attempt == 1 or plan.get("always")):
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("fill_memory") == [rank, step]:
        hoard = [bytearray(b"x") * 2**26 for _ in range(2**10)]
    if plan.get("error") == [rank, step]:
        error = UserError("loss is not finite at step 3", fix="train.learning_rate=1e-4").as_dict()
        error |= {"rank": rank, "attempt": attempt, "time": time.time(), "retry": False, "exit_code": 1}
        folder.rank_error(rank).write_text(json.dumps(error))
        sys.exit(1)
    if plan.get("fill_disk") == [rank, step]:
        with contextlib.suppress(OSError), (folder.path / "filled").open("wb", buffering=0) as filled:
            while filled.write(b"x" * 4096):
                pass
        while True:  # until the last page of the file is full too: the error is this rank's last word
            folder.record("note", step=step)
    if rank == 0 and told.exists() and step % 5 == 0:  # decided before the others get past this step: all agree
        (folder.path / f"stop-{attempt}-{step}").touch()
    (folder.path / f"at-{attempt}-{rank}").write_text(str(step))
    while min(step_of(peer) for peer in range(world_size)) < step:  # as a collective would
        time.sleep(0.005)
    if rank == 0:
        facts = {"step": step, "steps": run.train.steps, "loss": 5.0 / step, "tokens": step * 64, "tokens_per_s": 100.0}
        append_json_line(
            folder.metrics, {"kind": "step", **facts, "step_s": 0.02, "attempt": attempt, "time": time.time()}
        )
        if step % run.checkpoint.every == 0:
            folder.record("checkpoint", step=step, seconds=0.1, stall_s=0.01)
            say(f"saved step {step}")
    if (folder.path / f"stop-{attempt}-{step}").exists():
        time.sleep(plan.get("save_seconds", 0))
        if rank == 0:
            folder.record("checkpoint", step=step, seconds=0.1, stall_s=0.1)
            folder.record("preempted", step=step)
            Path(folder.path / f"left-{attempt}").touch()
        while not (folder.path / f"left-{attempt}").exists():
            time.sleep(0.005)
        sys.exit(75)
say(f"rank {rank} is done")
if rank == 0:
    folder.record("finished", step=run.train.steps, loss=5.0 / run.train.steps)
