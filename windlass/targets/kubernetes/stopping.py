"""Take a job out of its cluster, with everything that belongs to it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from windlass.errors import ExitCode, UserError
from windlass.targets.kubernetes.api.errors import RefusedError, if_allowed
from windlass.targets.kubernetes.api.http import Api, Object
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.watch.pods import pod_of
from windlass.targets.kubernetes.watch.recovery import stuck_of

END_SECONDS = 90.0  # beside the grace period, for kubelets and controllers to do their part
KILL_SECONDS = 1  # of grace where nothing shall be saved
FORCE_SECONDS = 5.0  # between two looks at which nodes are lost
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.5, 3.0
OWN_KINDS = ("configmaps", "secrets", "services")


def remove(api: Api, job: ClusterJob, *, name: str, grace: float, save_first: bool) -> None:
    """Delete the job and wait until nothing of it is there; its pods get SIGTERM and their grace period first.

    Not in the foreground: Trainer's webhook lets no TrainJob be changed, by the garbage collector neither, whose
    runtime is gone, and it goes first.
    """
    api.delete(job.path)
    if not save_first:
        _end_pods(api, job, grace=KILL_SECONDS)
    patience = grace if save_first else KILL_SECONDS
    overdue, deadline = time.monotonic() + patience, time.monotonic() + patience + END_SECONDS
    wait = POLL_SECONDS
    while left := list(remains(api, job)):
        if time.monotonic() > overdue:
            overdue = time.monotonic() + FORCE_SECONDS
            _force_out(api, job)
        if time.monotonic() > deadline:
            raise UserError(
                f"the run {name} has not left the cluster",
                evidence=f"still there: {', '.join(left[:5])}",
                fix=f"windlass stop {name} --now",
                exit_code=ExitCode.FAILED,
            )
        time.sleep(wait)
        wait = min(1.5 * wait, LONGEST_POLL_SECONDS)


def remains(api: Api, job: ClusterJob) -> Iterator[str]:
    """What is left of a job, its own object first; objects that the job does not own (yet) are deleted here."""
    value = api.find(job.path)
    if value is not None and value["metadata"]["uid"] == job.uid:
        yield f"{job.plural}/{job.object_name}"
    pods = _some_pod(api, job)
    yield from pods
    if value is not None or pods:
        return  # they may still need what belongs to the job
    for plural in OWN_KINDS:
        path = object_path("v1", plural, job.namespace)
        # whoever may not list a kind has made none of it
        labelled: list[Object] | None = if_allowed(list, api.items(path, labelSelector=job.layout.selector))
        for dependent in labelled or ():
            api.delete(f"{path}/{dependent['metadata']['name']}")
            yield f"{plural}/{dependent['metadata']['name']}"


def _pods(api: Api, job: ClusterJob) -> Iterator[Object]:
    return api.items(job.pods_path, labelSelector=job.layout.selector)


def _some_pod(api: Api, job: ClusterJob) -> list[str]:
    """One of the job's pods and how many more there are: a thousand need not be listed to know that some are left."""
    page = api.get(job.pods_path, labelSelector=job.layout.selector, limit=1)
    names = [f"pods/{pod['metadata']['name']}" for pod in page.get("items") or ()]
    more = (page.get("metadata") or {}).get("remainingItemCount")
    return [*names[:1], *([f"{more} more pods"] if more else [])]


def _end_pods(api: Api, job: ClusterJob, *, grace: int) -> None:
    try:
        api.delete_all(job.pods_path, job.layout.selector, grace=grace)
        return
    except RefusedError as error:
        if error.code != 403:  # not everybody who may delete pods may delete many at once
            raise
    for pod in _pods(api, job):
        api.delete(f"{job.pods_path}/{pod['metadata']['name']}", grace=grace)


def _force_out(api: Api, job: ClusterJob) -> None:
    """Pods on a node that does not answer stay for ever unless somebody says that they are gone."""
    values = [value for value in _pods(api, job) if value["metadata"].get("deletionTimestamp")]
    leaving = [pod_of(value, job.layout) for value in values]
    for pod in stuck_of(api, [pod for pod in leaving if pod.node]):
        api.delete(f"{job.pods_path}/{pod.name}", grace=0, uid=pod.uid)
