"""What a job's own controller does not do for its pods: take them off dead nodes, and keep its waits short.

A pod on a node whose kubelet is dead is deleted and never gone, and most jobs wait for it. Whoever looks at a run takes
it out, as far as they may: nothing in the cluster has the right to.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.targets.kubernetes.api.errors import RefusedError, UnreachableError
from windlass.targets.kubernetes.api.http import Api
from windlass.targets.kubernetes.jobfile import ClusterJob, object_path
from windlass.targets.kubernetes.watch.job_watch import JobSnapshot
from windlass.targets.kubernetes.watch.pods import IGNORED_FAILURES, Pod

LOOK_SECONDS = 5.0  # between two looks at the nodes of pods that are leaving
OVERDUE_SECONDS = 30.0  # after its grace period: without a look at its node, a pod that is still there is stuck
FEW_NODES = 8  # that are asked for one by one
TRACKING = "batch.kubernetes.io/job-tracking"  # a Job's hold on its pods until it has counted them


@dataclass
class Recovery:
    """Looks after the pods of one job. Safe to call at every look at the job."""

    api: Api
    job: ClusterJob
    trouble: str | None = None  # a pod that is stuck, and what keeps it from being taken out
    _looked: float = float("-inf")
    _removed: set[str] = field(default_factory=set)  # uids
    _reset: set[str] = field(default_factory=set)
    _may_not: set[str] = field(default_factory=set)  # verbs

    def tend(self, snapshot: JobSnapshot) -> list[Pod]:
        """Take out what is stuck; the pods that were."""
        job = snapshot.job
        if snapshot.trouble or job is None or job["metadata"].get("deletionTimestamp"):
            return []
        try:
            self._shorten_waits(snapshot.pods.values())
            leaving = [
                pod
                for pod in snapshot.now()
                if pod.deleting and pod.node and not pod.ended and pod.uid not in self._removed
            ]
            if not leaving:
                self.trouble = None
                return []
            if time.monotonic() - self._looked < LOOK_SECONDS:
                return []
            self._looked = time.monotonic()
            return [pod for pod in stuck_of(self.api, leaving) if self._take_out(pod)]
        except (RefusedError, UnreachableError):
            return []  # a server that restarts: the next look tries again

    def _take_out(self, pod: Pod) -> bool:
        path = f"{self.job.pods_path}/{pod.name}"
        try:
            self.api.delete(path, grace=0, uid=pod.uid)
            value = self.api.find(path)
            if value is not None and value["metadata"]["uid"] == pod.uid:
                kept = [finalizer for finalizer in value["metadata"].get("finalizers") or () if finalizer != TRACKING]
                self.api.patch(path, {"metadata": {"uid": pod.uid, "finalizers": kept or None}})
        except RefusedError as error:
            if error.code in (404, 409):  # gone, and another one of its name is there
                self._removed.add(pod.uid)
                return False
            if error.code != 403:
                raise
            self.trouble = (
                f"{pod.name} is stuck on {pod.node}, which does not answer, and {error.what}: "
                f'kubectl -n {self.job.namespace} patch pod {pod.name} -p \'{{"metadata":{{"finalizers":null}}}}\'; '
                f"kubectl -n {self.job.namespace} delete pod {pod.name} --force --grace-period=0"
            )
            return False
        self._removed.add(pod.uid)
        self.trouble = None
        return True

    def _shorten_waits(self, pods: Iterable[Pod]) -> None:
        """A Job doubles the wait before a new pod with every one that had to leave; one that runs makes up for them."""
        for pod in pods:
            if not (pod.running and pod.ignored_failures) or pod.uid in self._reset or "patch" in self._may_not:
                continue
            self._reset.add(pod.uid)
            try:
                change = {"uid": pod.uid, "annotations": {IGNORED_FAILURES: "0"}}
                self.api.patch(f"{self.job.pods_path}/{pod.name}", {"metadata": change})
            except RefusedError as error:
                if error.code == 403:
                    self._may_not.add("patch")
                elif error.code not in (404, 409):
                    raise


def stuck_of(api: Api, leaving: Sequence[Pod]) -> list[Pod]:
    """Those of the pods that are being deleted which nobody will end."""
    if not leaving:
        return []
    lost = lost_nodes(api, {pod.node for pod in leaving})
    if lost is None:
        now = time.time()
        return [pod for pod in leaving if pod.delete_by is not None and now > pod.delete_by + OVERDUE_SECONDS]
    return [pod for pod in leaving if pod.node in lost]


def lost_nodes(api: Api, names: Iterable[str]) -> set[str] | None:
    """Those of the nodes that are gone or whose kubelets are not heard of; None where this user may not look."""
    wanted = set(names)
    try:
        if len(wanted) <= FEW_NODES:
            nodes = {name: api.find(object_path("v1", "nodes", None, name)) for name in wanted}
        else:
            listed = {node["metadata"]["name"]: node for node in api.items("/api/v1/nodes")}
            nodes = {name: listed.get(name) for name in wanted}
    except RefusedError as error:
        if error.code == 403:
            return None
        raise
    return {name for name, node in nodes.items() if node is None or is_lost(node)}


def is_lost(node: Mapping[str, Any]) -> bool:
    """Whether nothing is heard of a node's kubelet. One that says it is not ready still ends its pods itself."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") == "Unknown" for condition in conditions)
