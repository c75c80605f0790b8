"""Which job a run folder belongs to, and where it stands: its own records first, Slurm's word where they are silent."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, InstanceOf
from pydantic.dataclasses import dataclass

from windlass.common.files import read_json_lines, write_atomically
from windlass.common.locks import locked
from windlass.errors import ExitCode, UserError
from windlass.runfolder import RunFolder
from windlass.targets.launch.machine import full_disk
from windlass.targets.launch.progress import end_by_ranks, newest_attempt, with_progress
from windlass.targets.launch.supervision import LOCK_FILE
from windlass.targets.protocol import JobStatus, State
from windlass.targets.slurm.queue import JOB_NUMBER, QueuedJob
from windlass.targets.slurm.reasons import ENDS, explain

JOB_FILE = "slurm.json"
ON_NODES = frozenset(
    ("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
)
IN_QUEUE = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
ENDED_AS: Mapping[str, tuple[State, ExitCode]] = {
    "CANCELLED": ("stopped", ExitCode.INTERRUPTED),
    "PREEMPTED": ("preempted", ExitCode.PREEMPTED),
    "COMPLETED": ("finished", ExitCode.OK),
}


@dataclass(frozen=True, config={"strict": True})
class SubmittedJob:
    """The job that a run folder belongs to. No other job may start ranks in it.

    The record is written before sbatch is called, with a submission that the job carries in its comment: an accepted
    job whose number never arrived is found again by it. What a record holds becomes arguments of scancel and ssh, so
    its form is checked: a ValueError where windlass never wrote it.
    """

    number: Annotated[str, Field(pattern=rf"^{JOB_NUMBER.pattern}$")] | None
    """`12`, or `12_3` in an array; None: what sbatch answered is not known."""
    host: Annotated[str, Field(pattern=r"^[^-]")] | None = None  # the login node it went through
    submission: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    index: int | None = None  # in an array
    folder: InstanceOf[str] | None = None  # where the run folder was then, in any encoding; a copy of it has no job

    def as_dict(self) -> dict[str, Any]:
        names = {"submission": self.submission, "index": self.index, "folder": self.folder}
        return {"job": self.number, "host": self.host, **{key: part for key, part in names.items() if part is not None}}

    @classmethod
    def parse(cls, value: Any) -> SubmittedJob:
        if not isinstance(value, dict) or (value.get("job") is None and value.get("submission") is None):
            raise ValueError("neither a job nor a submission")
        return cls(*(value.get(key) for key in ("job", "host", "submission", "index", "folder")))

    @classmethod
    def of(cls, folder: RunFolder) -> SubmittedJob | None:
        """The record of a folder; where it is damaged or gone, what the history says about the same."""
        try:
            return cls.parse(json.loads((folder.path / JOB_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            return cls._from_history(folder)

    @classmethod
    def _from_history(cls, folder: RunFolder) -> SubmittedJob | None:
        refused: list[Any] = []
        for record in reversed(_history(folder)):
            if record.get("event") == "not-submitted":
                refused.append(record.get("submission"))
            if record.get("event") not in ("submitting", "submitted") or record.get("submission") in refused:
                continue
            with contextlib.suppress(ValueError):
                return cls.parse(record)
        return None

    def write(self, folder: RunFolder) -> None:
        write_atomically(folder.path / JOB_FILE, json.dumps(self.as_dict()) + "\n")

    def confirm(self, folder: RunFolder, number: str) -> SubmittedJob:
        """The record with the job's number, written down."""
        confirmed = replace(self, number=number)
        confirmed.write(folder)
        folder.record("submitted", **confirmed.as_dict())
        return confirmed

    def belongs_to(self, folder: RunFolder) -> bool:
        """Whether the job runs in this folder, not in the one that this is a copy of."""
        if self.folder is None or not os.path.isdir(self.folder):
            return True
        try:
            return os.path.samefile(self.folder, folder.path)
        except OSError:
            return True


def lock(folder: RunFolder, *, patience: float) -> contextlib.AbstractContextManager[bool]:
    """Hold the folder's lock; False where somebody else still has it after `patience` seconds."""
    return locked(folder.path / LOCK_FILE, patience_s=patience)


def _history(folder: RunFolder) -> list[dict[str, Any]]:
    try:
        return list(read_json_lines(folder.history))
    except OSError as error:
        raise UserError(f"{folder.history} cannot be read", evidence=str(error), exit_code=ExitCode.FAILED) from None


def status_of(folder: RunFolder, job: SubmittedJob, queued: QueuedJob | None) -> JobStatus:
    """The status of a run that has not written down its own end."""
    history = _history(folder)
    facts = _facts(folder, str(job.number), queued, history)
    return with_progress(JobStatus(**facts, attempt=newest_attempt(history)), folder)


def status_without_slurm(folder: RunFolder, job: SubmittedJob, why: UserError) -> JobStatus:
    """The status by the run's own records alone, while Slurm does not answer."""
    history = _history(folder)
    training = _is_training(history, str(job.number))
    evidence = f": {why.evidence.splitlines()[-1]}" if why.evidence else ""
    reason = f"{why.what}{evidence}; this is what the run itself wrote down"
    return with_progress(
        JobStatus("running" if training else "waiting", reason=reason, attempt=newest_attempt(history)), folder
    )


def status_of_copy(folder: RunFolder, job: SubmittedJob) -> JobStatus:
    reason = f"a copy of {job.folder}, where job {job.number} belongs; `windlass run` goes on from the last checkpoint"
    status = JobStatus(
        "stopped", exit_code=int(ExitCode.INTERRUPTED), reason=reason, attempt=newest_attempt(_history(folder))
    )
    return with_progress(status, folder)


def status_of_unconfirmed(why: UserError | None) -> JobStatus:
    if why is not None:
        return JobStatus("waiting", reason=f"it is not known whether Slurm took the job: {why.what}")
    return JobStatus("waiting", reason="Slurm did not take the job; `windlass run` submits it again")


def _facts(folder: RunFolder, number: str, queued: QueuedJob | None, history: list[dict[str, Any]]) -> dict[str, Any]:
    if queued is None:
        return _forgotten(number, history)
    if queued.state in IN_QUEUE:
        return {"state": "waiting", "reason": explain(queued.reason, job=number, name=folder.name)}
    if queued.state in ON_NODES:
        training = _is_training(history, number)
        return {"state": "running" if training else "waiting", "reason": None if training else "ranks are starting"}
    state, code = ENDED_AS.get(queued.state, ("failed", ExitCode.FAILED))
    why = ENDS.get(queued.state, f"Slurm says: {queued.state}")
    if queued.reason not in ("None", ""):
        why += f" ({queued.reason})"
    if queued.exit_code:
        why += f" with code {queued.exit_code}"
    if state == "failed":
        if full := full_disk(folder.path):
            why += f"; {full}"
        why += f"; see logs/slurm-{number}.out"
    return {"state": state, "exit_code": int(code), "reason": why}


def _is_training(history: Sequence[Mapping[str, Any]], number: str) -> bool:
    launches = [index for index, record in enumerate(history) if record.get("event") == "launched"]
    mine = launches and history[launches[-1]].get("job") == number
    since = history[launches[-1] :] if mine else []
    return any(record.get("event") in ("started", "resumed") for record in since)


def _forgotten(number: str, history: list[dict[str, Any]]) -> dict[str, Any]:
    if end := end_by_ranks(history, ("submitted", "launched")):
        return end | ({"reason": "saved and left"} if end["state"] == "preempted" else {})
    reason = f"Slurm no longer knows job {number}; `windlass run` goes on from the last checkpoint"
    return {"state": "failed", "exit_code": int(ExitCode.FAILED), "reason": reason}
