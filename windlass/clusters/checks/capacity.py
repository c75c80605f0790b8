"""Room: what the run's pods ask for against what nodes have free, and what quotas leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from windlass.clusters.needs import EFA, Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot
from windlass.common.quantities import parse_quantity, show_quantity
from windlass.targets.kubernetes.api.http import Object
from windlass.targets.kubernetes.manifests.capacity import requests, why_not
from windlass.targets.kubernetes.manifests.cluster_facts import GROUPS, PLURALS

DEVICES = ("nvidia.com/", "amd.com/", "rdma/", EFA)  # how the names of devices begin that training uses


def free_devices(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    refusal = next((part for part in (snapshot.nodes, snapshot.pods) if isinstance(part, Refusal)), None)
    if refusal is not None:
        yield skipped("what is free on the nodes was not counted", str(refusal))
        return
    rooms = list(snapshot.rooms.values())
    if needs.pod is None:
        for resource in sorted({key for room in rooms for key in room.allocatable if key.startswith(DEVICES)}):
            total = sum(room.allocatable.get(resource, 0.0) for room in rooms)
            if total:
                free = sum(max(0.0, room.free(resource)) for room in rooms if room.ready and room.schedulable)
                yield passed(f"{free:g} of {total:g} {resource} are free")
        return
    asked = requests(needs.pod)
    usable = [room for room in rooms if room.ready and room.schedulable and room.usable_by(needs.pod)]
    # as many pods as fit a node by its scarcest resource; spread and affinity are the scheduler's business
    slots = [min(int(room.free(key) / amount + 1e-9) for key, amount in asked.items() if amount) for room in usable]
    num_fitting = sum(max(0, slot) for slot in slots)
    wanted = ", ".join(
        f"{show_quantity(key, amount)} {key}" for key, amount in asked.items() if amount and key != "pods"
    )
    if needs.num_pods <= num_fitting < needs.num_pods + needs.num_spares:
        yield warning(
            f"all {needs.num_pods} pods fit now, and {num_fitting - needs.num_pods} of {needs.num_spares} spare ones",
            evidence=f"a pod asks for {wanted}",
            fix=f"more nodes, or target.kubernetes.spares={num_fitting - needs.num_pods}",
        )
        return
    if num_fitting >= needs.num_pods:
        yield passed(f"all {needs.num_pods} pods fit now ({wanted or 'no requests'} each)")
        return
    could_ever = sum(
        max(0, min(int(room.allocatable.get(key, 0.0) / amount + 1e-9) for key, amount in asked.items() if amount))
        for room in usable
    )
    grows = _grows(snapshot)
    reasons = why_not(needs.pod, rooms, num_waiting=needs.num_pods - num_fitting)
    reasons += [f"{grows} may make more nodes"] if grows else []
    yield (warning if could_ever >= needs.num_pods or grows else failed)(
        f"{num_fitting} of {needs.num_pods} pods fit now"
        + ("" if could_ever >= needs.num_pods else f", and {could_ever} would on empty nodes"),
        evidence="\n".join([f"a pod asks for {wanted}", *reasons]),
        fix="wait until others finish" if could_ever >= needs.num_pods else "more nodes, or fewer: resources.nodes=N",
    )


def quotas(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if isinstance(snapshot.quotas, Refusal):
        yield skipped("the namespace's quotas were not looked at", str(snapshot.quotas))
        return
    asked = _counted(needs)
    for quota in snapshot.quotas:
        if needs.pod and not all(_is_within(scope, needs.pod) for scope in _scopes(quota)):
            continue
        name, is_full = quota["metadata"]["name"], False
        hard, used = ((quota.get("status") or {}).get(key) or {} for key in ("hard", "used"))
        for key, limit in hard.items():
            resource = key.removeprefix("requests.").removeprefix("limits.")
            total = parse_quantity(limit)
            free = total - parse_quantity(used.get(key, "0"))
            wanted = asked.get(key, 0.0)
            if wanted > free + 1e-9:
                is_full = True
                yield (failed if wanted > total + 1e-9 else warning)(
                    f"the quota {name} leaves {show_quantity(resource, max(0.0, free))} {resource}, "
                    f"and the run asks for {show_quantity(resource, wanted)}",
                    evidence=f"{key}: {used.get(key, '0')} of {limit} used in the namespace {snapshot.namespace}",
                    fix=f"kubectl -n {snapshot.namespace} edit quota {name}    or wait, or ask for less",
                )
        if not is_full:
            yield passed(f"the quota {name} has room")
    if not snapshot.quotas:
        yield passed(f"the namespace {snapshot.namespace} has no quota")


def _grows(snapshot: Snapshot) -> str | None:
    """Who makes nodes when pods wait, where somebody does."""
    if "karpenter.sh" in snapshot.groups:
        return "Karpenter"
    deployments = () if isinstance(snapshot.deployments, Refusal) else snapshot.deployments
    names = [str(value["metadata"]["name"]) for value in deployments]
    return next((name for name in names if "cluster-autoscaler" in name), None)


def _counted(needs: Needs) -> dict[str, float]:
    """What quotas count of the whole run, by the names that they have for it."""
    if needs.pod is None:
        return {}
    limits = [
        {"resources": {"limits": (container.get("resources") or {}).get("limits")}}
        for container in needs.pod["spec"]["containers"]
    ]
    asked = {key: amount * needs.num_pods for key, amount in requests(needs.pod).items()}
    limited = {key: amount * needs.num_pods for key, amount in requests({"spec": {"containers": limits}}).items()}
    return {
        **asked,
        **{f"requests.{key}": amount for key, amount in asked.items()},
        **{f"limits.{key}": amount for key, amount in limited.items()},
        "count/pods": float(needs.num_pods),
        **({f"count/{PLURALS[needs.kind]}.{GROUPS[needs.kind]}": 1.0} if needs.kind else {}),
    }


def _scopes(quota: Object) -> Iterator[Mapping[str, Any]]:
    spec = quota.get("spec") or {}
    yield from ({"scopeName": name} for name in spec.get("scopes") or ())
    yield from (spec.get("scopeSelector") or {}).get("matchExpressions") or ()


def _is_within(scope: Mapping[str, Any], pod: Object) -> bool:
    """Whether a quota's scope takes in such pods, which ask for something and have no deadline."""
    if scope.get("scopeName") != "PriorityClass":
        return scope.get("scopeName") in ("NotTerminating", "NotBestEffort")
    own, values = pod["spec"].get("priorityClassName"), scope.get("values") or ()
    operators = {"In": own in values, "NotIn": own not in values, "DoesNotExist": own is None}
    return operators.get(str(scope.get("operator")), own is not None)
