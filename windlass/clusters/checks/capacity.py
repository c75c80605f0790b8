"""Room: what the run's pods ask for against what nodes have free, and what quotas leave."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.clusters.needs import EFA, GPU, Needs
from windlass.clusters.result import Result
from windlass.clusters.snapshot import Refusal, Snapshot
from windlass.targets.kubernetes.manifests.capacity import requests, why_not
from windlass.targets.kubernetes.manifests.cluster_facts import parse_quantity, show_quantity


def free_devices(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    refusal = next((part for part in (snapshot.nodes, snapshot.pods) if isinstance(part, Refusal)), None)
    if refusal is not None:
        yield Result("capacity", "skip", "what is free on the nodes was not counted", str(refusal))
        return
    rooms = list(snapshot.rooms.values())
    if needs.pod is None:
        for resource in (GPU, EFA):
            total = sum(room.allocatable.get(resource, 0.0) for room in rooms)
            if total:
                free = sum(max(0.0, room.free(resource)) for room in rooms if room.ready and room.schedulable)
                yield Result("capacity", "pass", f"{free:g} of {total:g} {resource} are free")
        return
    asked = requests(needs.pod)
    usable = [room for room in rooms if room.ready and room.schedulable and room.usable_by(needs.pod)]
    # as many pods as fit a node by its scarcest resource; spread and affinity are the scheduler's business
    slots = [min(int(room.free(key) / amount + 1e-9) for key, amount in asked.items() if amount) for room in usable]
    num_fitting = sum(max(0, slot) for slot in slots)
    wanted = ", ".join(
        f"{show_quantity(key, amount)} {key}" for key, amount in asked.items() if amount and key != "pods"
    )
    if num_fitting >= needs.num_pods:
        yield Result("capacity", "pass", f"all {needs.num_pods} pods fit now ({wanted or 'no requests'} each)")
        return
    could_ever = sum(
        max(0, min(int(room.allocatable.get(key, 0.0) / amount + 1e-9) for key, amount in asked.items() if amount))
        for room in usable
    )
    reasons = why_not(needs.pod, rooms, num_waiting=needs.num_pods - num_fitting)
    yield Result(
        "capacity",
        "warn" if could_ever >= needs.num_pods else "fail",
        f"{num_fitting} of {needs.num_pods} pods fit now"
        + ("" if could_ever >= needs.num_pods else f", and {could_ever} would on empty nodes"),
        evidence="\n".join([f"a pod asks for {wanted}", *reasons]),
        fix="wait until others finish" if could_ever >= needs.num_pods else "more nodes, or fewer: resources.nodes=N",
    )


def quotas(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if isinstance(snapshot.quotas, Refusal):
        yield Result("quota", "skip", "the namespace's quotas were not looked at", str(snapshot.quotas))
        return
    asked = requests(needs.pod) if needs.pod else {}
    for quota in snapshot.quotas:
        name, is_full = quota["metadata"]["name"], False
        hard, used = ((quota.get("status") or {}).get(key) or {} for key in ("hard", "used"))
        for key, limit in hard.items():
            resource = key.removeprefix("requests.")
            total = parse_quantity(limit)
            free = total - parse_quantity(used.get(key, "0"))
            wanted = asked.get(resource, 0.0) * needs.num_pods
            if wanted > free + 1e-9:
                is_full = True
                yield Result(
                    "quota",
                    "fail" if wanted > total + 1e-9 else "warn",
                    f"the quota {name} leaves {show_quantity(resource, max(0.0, free))} {resource}, "
                    f"and the run asks for {show_quantity(resource, wanted)}",
                    evidence=f"{key}: {used.get(key, '0')} of {limit} used in the namespace {snapshot.namespace}",
                    fix=f"kubectl -n {snapshot.namespace} edit quota {name}    or wait, or ask for less",
                )
        if not is_full:
            yield Result("quota", "pass", f"the quota {name} has room")
    if not snapshot.quotas:
        yield Result("quota", "pass", f"the namespace {snapshot.namespace} has no quota")
