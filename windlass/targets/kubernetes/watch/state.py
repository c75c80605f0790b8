"""Where a job stands: its own records first, the cluster's word where they are silent. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.common.files import read_json_lines
from windlass.errors import ExitCode
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.watch.job_watch import JobSnapshot
from windlass.targets.kubernetes.watch.pods import HELD_BACK, Pod, newest_by_node, phases
from windlass.targets.launch.progress import BEGINNINGS, end_by_ranks, newest_attempt, newest_since, with_progress
from windlass.targets.launch.tail import newest_steps
from windlass.targets.protocol import JobStatus

# What operators call the same thing: Job and TrainJob, PyTorchJob, HyperPod's.
FINISHED = ("Complete", "Completed", "Succeeded")
FAILED = ("Failed",)
SUSPENDED = "Suspended"
TRAINING = ("started", "resumed")
FOR_GOOD = ("finished", "failed")  # ends of a run that no new pod changes; told to leave, it goes on in the next one

OUT_OF_MEMORY = "OOMKilled"
# How a container ended, where the run itself could not write it down.
ENDS = {
    "OOMKilled": "its memory limit was reached: loaders, whole state dicts and /dev/shm count as memory; "
    "target.kubernetes.memory=AMOUNT gives it more",
    "Evicted": "its node was short of something and put it out",
    "DeadlineExceeded": "it came to its deadline",
    "NodeLost": "its node was lost",
    "ContainerCannotRun": "its container could not be started",
}


@dataclass(frozen=True)
class Condition:
    """The condition of a job object that says it is over."""

    finished: bool
    reason: str
    message: str


def end_of(job: Mapping[str, Any] | None) -> Condition | None:
    for condition in _conditions(job):
        if condition.get("status") == "True" and condition.get("type") in (*FINISHED, *FAILED):
            return Condition(
                condition["type"] in FINISHED, str(condition.get("reason") or ""), str(condition.get("message") or "")
            )
    return None


def suspended_by(job: Mapping[str, Any] | None) -> str | None:
    """Why a job is held back as a whole, by Kueue say."""
    for condition in _conditions(job):
        if condition.get("type") == SUSPENDED and condition.get("status") == "True":
            return str(condition.get("message") or condition.get("reason") or "suspended")
    return None


def status_of(
    folder: RunFolder, snapshot: JobSnapshot, *, num_pods: int, explain: Callable[[], str] | None = None
) -> JobStatus:
    """The status of a run by its records and its cluster; `explain` says why a job that waits does."""
    history = list(read_json_lines(folder.history))
    facts = _facts(snapshot, history, num_pods, explain or (lambda: "pods are starting"))
    return with_steps_of_this_attempt(
        with_progress(JobStatus(**facts, attempt=newest_attempt(history)), folder), folder, history
    )


def with_steps_of_this_attempt(status: JobStatus, folder: RunFolder, history: Sequence[Mapping[str, Any]]) -> JobStatus:
    """A run that went back to a checkpoint stands there until it logs a step: those of the attempt before are lost."""
    begun = next((record for record in reversed(history) if record.get("event") in TRAINING), None)
    if begun is None or status.step is None or begun.get("event") != "resumed" or begun.get("step") is None:
        return status
    last = next(iter(newest_steps(folder.metrics, 1)), None)
    if last is None or int(last.get("attempt") or 0) >= int(begun.get("attempt") or 0):
        return status
    return replace(status, step=min(status.step, int(begun["step"])), loss=None, tokens_per_s=None, eta=None)


def bare_status(job: Mapping[str, Any]) -> JobStatus:
    """What the job object alone tells."""
    end = end_of(job)
    if end is not None:
        code = ExitCode.OK if end.finished else ExitCode.FAILED
        return JobStatus("finished" if end.finished else "failed", reason=end.message or None, exit_code=int(code))
    held = suspended_by(job)
    active = (job.get("status") or {}).get("active") or any(
        condition.get("type") == "Running" and condition.get("status") == "True" for condition in _conditions(job)
    )
    return JobStatus(
        "running" if active and not held else "waiting", reason=f"it is held back: {held}" if held else None
    )


def _facts(
    snapshot: JobSnapshot, history: Sequence[Mapping[str, Any]], num_pods: int, explain: Callable[[], str]
) -> dict[str, Any]:
    end = end_of(snapshot.job)
    if end is not None and end.finished:
        return {"state": "finished", "exit_code": int(ExitCode.OK)}
    if end is not None:
        return {"state": "failed", "exit_code": int(ExitCode.FAILED), "reason": _why_failed(end, snapshot, history)}
    if snapshot.job is None and snapshot.trouble is None:
        left = [pod for pod in snapshot.now() if not pod.ended]
        if not left:
            return _gone(history)
        return {"state": "running" if _is_training(history) else "waiting", "reason": f"it leaves: {phases(left)}"}
    if snapshot.job is not None and snapshot.job["metadata"].get("deletionTimestamp"):
        return {"state": "waiting", "reason": f"it is being deleted: {phases(snapshot.now()) or 'no pods left'}"}
    if snapshot.trouble:
        return {"state": "running" if _is_training(history) else "waiting", "reason": snapshot.trouble}
    newest = newest_by_node(snapshot.now())
    # the end that the run has recorded, which the job's object has yet to follow
    last = newest_since(history, ("exit",), (*BEGINNINGS, *TRAINING))
    if last is not None and last["state"] in FOR_GOOD:
        if newest and not any(pod.running and not pod.deleting for pod in newest.values()):
            # a job that waits for a pod on a lost node, or for room, may wait for ever: nothing is left to do in it
            reason = last.get("reason")
            if last["state"] == "failed":
                reason = _with_memory(str(reason or "failed"), snapshot)
            return {"state": last["state"], "exit_code": last["code"], "reason": reason}
        return {"state": "running", "reason": "its pods are leaving"}
    if last is not None:  # told to leave: the job object lives on, and replaces the pods that left
        return {"state": "waiting", "reason": f"{last.get('reason')}; its job makes a new pod: {explain()}"}
    running = [pod for pod in newest.values() if pod.running and not pod.deleting]
    if running and _is_training(history):
        missing = num_pods - len(running)
        return {"state": "running", "reason": f"{missing} of {num_pods} pods are missing" if missing > 0 else None}
    return {"state": "waiting", "reason": explain()}


def _is_training(history: Sequence[Mapping[str, Any]]) -> bool:
    return newest_since(history, TRAINING, BEGINNINGS) is not None


def _gone(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    end = end_by_ranks(history, ("submitted", *TRAINING))
    if end is not None and end["state"] == "finished":
        return end
    stopped = {"state": "stopped", "exit_code": int(ExitCode.INTERRUPTED)}
    return {**(end or stopped), "reason": "the job is no longer in the cluster: it was deleted"}


def _why_failed(end: Condition, snapshot: JobSnapshot, history: Sequence[Mapping[str, Any]]) -> str:
    recorded = [str(record["why"]) for record in history if record.get("event") == "gave-up" and record.get("why")]
    why = recorded[-1] if recorded else f"{end.reason}: {end.message}" if end.message else end.reason
    ended = sorted((pod for pod in snapshot.now() if pod.phase == "Failed"), key=lambda pod: pod.ended_at or 0.0)
    if ended and not recorded and ended[0].reason != OUT_OF_MEMORY:
        why += f"; {how_it_ended(ended[0])}"
    return _with_memory(why, snapshot)


def _with_memory(why: str, snapshot: JobSnapshot) -> str:
    """Why a run failed, and that a pod of it ran out of memory: the run itself sees only that something was killed."""
    ended = [pod for pod in snapshot.now() if pod.reason == OUT_OF_MEMORY]
    newest = max(ended, key=lambda pod: pod.ended_at or 0.0, default=None)
    return f"{why}; {how_it_ended(newest)}" if newest is not None else why


def how_it_ended(pod: Pod) -> str:
    text = ENDS.get(pod.reason) or HELD_BACK.get(pod.reason) or ""
    code = f" with code {pod.exit_code}" if pod.exit_code is not None else ""
    reason = f" ({pod.reason})" if pod.reason not in ("", "Error") else ""
    return f"{pod.name} ended{code}{reason}" + (f": {text}" if text else f": {pod.message}" if pod.message else "")


def _conditions(job: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return ((job or {}).get("status") or {}).get("conditions") or ()
