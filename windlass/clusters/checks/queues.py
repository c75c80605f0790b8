"""Queues: Kueue's is there, active and covers what is asked; Volcano's is open, and its scheduler there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from windlass.clusters.needs import Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import VOLCANO, Refusal, Snapshot, condition_of, name_of
from windlass.common.quantities import parse_quantity, show_quantity
from windlass.targets.kubernetes.api.discovery import KUEUE
from windlass.targets.kubernetes.api.http import Object
from windlass.targets.kubernetes.manifests.capacity import COUNTED, requests

VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


def kueue(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if KUEUE not in snapshot.groups:
        if needs.queue:
            yield failed(
                f"the cluster has no Kueue, and the run names the queue {needs.queue}",
                evidence=f"{KUEUE} is not in /apis",
                fix="leave target.kubernetes.queue out",
            )
        return
    if isinstance(snapshot.local_queues, Refusal):
        yield skipped("Kueue's queues were not looked at", str(snapshot.local_queues))
        return
    names = [name_of(queue) for queue in snapshot.local_queues]
    if needs.queue is None:
        if names:
            yield passed(
                f"Kueue's queues in {snapshot.namespace}: {', '.join(names)}",
                fix=f"target.kubernetes.queue={names[0]}    sends a run through it",
            )
        return
    queue = _named(snapshot.local_queues, needs.queue)
    if queue is None:
        yield failed(
            f"there is no queue {needs.queue} in the namespace {snapshot.namespace}",
            evidence=f"queues there: {', '.join(names) or 'none'}",
            fix=f"target.kubernetes.queue={names[0]}" if names else "an administrator makes a LocalQueue",
        )
        return
    yield _active(queue, f"the queue {needs.queue}")
    yield from _cluster_queue(snapshot, needs, str((queue.get("spec") or {}).get("clusterQueue") or ""))


def _cluster_queue(snapshot: Snapshot, needs: Needs, name: str) -> Iterator[Result]:
    if isinstance(snapshot.cluster_queues, Refusal):
        yield skipped(f"the cluster queue {name} was not looked at", str(snapshot.cluster_queues))
        return
    value = _named(snapshot.cluster_queues, name)
    if value is None:
        yield failed(f"the queue leads to the cluster queue {name}, which is not there")
        return
    yield _active(value, f"the cluster queue {name}")
    quota: dict[str, float] = defaultdict(float)
    for group in (value.get("spec") or {}).get("resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            for resource in flavor.get("resources") or ():
                for key in ("nominalQuota", "borrowingLimit"):
                    quota[resource["name"]] += parse_quantity(resource.get(key) or "0")
    borrows = bool((value.get("spec") or {}).get("cohort") or (value.get("spec") or {}).get("cohortName"))
    asked = requests(needs.pod) if needs.pod else {}
    uncovered = sorted(key for key, amount in asked.items() if amount and key not in quota and key != COUNTED)
    if uncovered:
        yield warning(
            f"the cluster queue {name} has no quota for {', '.join(uncovered)}",
            evidence="Kueue never admits what asks for a resource that no flavour covers, unless its own configuration "
            "leaves that resource out (excludeResourcePrefixes)",
            fix=f"kubectl edit clusterqueue {name}    and add them to coveredResources and flavors",
        )
    for key, amount in asked.items():
        wanted = amount * needs.num_pods
        if key in quota and wanted > quota[key] + 1e-9:
            yield (warning if borrows else failed)(
                f"the cluster queue {name} can never give {show_quantity(key, wanted)} {key} by its own quota",
                evidence=f"nominal quota of all flavours, and what it may borrow: {show_quantity(key, quota[key])}",
                fix="fewer nodes, another queue, or a larger quota",
            )


def volcano(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    """Pods for Volcano's scheduler wait for ever where it is not there, and while their queue is closed."""
    pod = needs.pod or {"spec": {}}
    if pod["spec"].get("schedulerName") != "volcano":
        return
    if VOLCANO not in snapshot.groups:
        yield failed(
            "the run's pods are for Volcano's scheduler, and the cluster has no Volcano",
            evidence=f"schedulerName: volcano; {VOLCANO} is not in /apis",
            fix="leave target.kubernetes.scheduler and gang out",
        )
        return
    if isinstance(snapshot.volcano_queues, Refusal):
        yield skipped("Volcano's queues were not looked at", str(snapshot.volcano_queues))
        return
    name = ((pod.get("metadata") or {}).get("annotations") or {}).get(VOLCANO_QUEUE, "default")
    queue = _named(snapshot.volcano_queues, name)
    state = str(((queue or {}).get("status") or {}).get("state") or "Open")
    if queue is None or state != "Open":
        names = ", ".join(map(name_of, snapshot.volcano_queues))
        yield failed(
            f"Volcano's queue {name} is {'not there' if queue is None else state.lower()}",
            evidence=f"status.state: {state}" if queue else f"queues: {names or 'none'}",
            fix=f"target.kubernetes.annotations={{{VOLCANO_QUEUE}: OTHER}}    or open it",
        )
        return
    capability = (queue.get("spec") or {}).get("capability") or {}
    short = {key: amount * needs.num_pods for key, amount in requests(pod).items() if key in capability}
    short = {key: wanted for key, wanted in short.items() if wanted > parse_quantity(capability[key]) + 1e-9}
    for key, wanted in short.items():
        yield failed(
            f"Volcano's queue {name} can never give {show_quantity(key, wanted)} {key}",
            evidence=f"spec.capability: {capability[key]} {key}",
            fix="fewer nodes, another queue, or a larger capability",
        )
    if not short:
        yield passed(f"Volcano's queue {name} is open")


def _named(queues: Sequence[Object], name: str) -> Object | None:
    return next((queue for queue in queues if name_of(queue) == name), None)


def _active(value: Object, what: str) -> Result:
    active = condition_of(value, "Active")
    if active and active.get("status") != "True":
        return failed(f"{what} is not active", str(active.get("message") or active.get("reason")))
    pending = int((value.get("status") or {}).get("pendingWorkloads") or 0)
    return passed(f"{what} is active" + (f"; {pending} workloads wait in it" if pending else ""))
