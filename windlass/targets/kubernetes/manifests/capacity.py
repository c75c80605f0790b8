"""What the nodes have, what is in use and by whom: the numbers that say why a job waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.common.quantities import parse_quantity, show_quantity
from windlass.targets.kubernetes.manifests.cluster_facts import NodeFacts
from windlass.targets.kubernetes.manifests.labels import RUN_LABEL

Amounts = dict[str, float]
ENDED = ("Succeeded", "Failed")
COUNTED = "pods"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass
class NodeRoom:
    """One node: what it can give and what is given away."""

    name: str
    allocatable: Amounts
    ready: bool
    schedulable: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, Any]] = ()
    used: Amounts = field(default_factory=lambda: defaultdict(float))
    users: dict[str, Amounts] = field(default_factory=dict)  # by the name of a job or a pod

    def free(self, resource: str) -> float:
        return self.allocatable.get(resource, 0.0) - self.used.get(resource, 0.0)

    def usable_by(self, pod: Mapping[str, Any]) -> bool:
        """Whether the pod's selector, node affinity and tolerations let it on this node at all."""
        spec = pod.get("spec") or {}
        selector = spec.get("nodeSelector") or {}
        if any(self.labels.get(key) != value for key, value in selector.items()):
            return False
        required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED) or {}
        terms = required.get("nodeSelectorTerms") or ()
        if terms and not any(self._fits(term) for term in terms):
            return False
        tolerated = spec.get("tolerations") or ()
        return all(tolerates(taint, tolerated) for taint in self.taints if taint.get("effect") != "PreferNoSchedule")

    def _fits(self, term: Mapping[str, Any]) -> bool:
        """Whether a term of node affinity holds; Gt and Lt, which we do not write, are taken to."""
        fields = ((entry, {"metadata.name": self.name}) for entry in term.get("matchFields") or ())
        labels = ((entry, self.labels) for entry in term.get("matchExpressions") or ())
        return all(_matches(entry, values) for entry, values in (*fields, *labels))


def _matches(expression: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    value = values.get(expression["key"])
    wanted: Sequence[str] = expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return True


def node_room(node: Mapping[str, Any]) -> NodeRoom:
    facts = NodeFacts.of(node)
    amounts = {key: parse_quantity(value) for key, value in facts.allocatable.items()}
    return NodeRoom(facts.name, amounts, facts.ready, facts.schedulable, facts.labels, facts.taints)


def requests(pod: Mapping[str, Any]) -> Amounts:
    """What the scheduler counts for a pod: the sum of its containers, or its largest init container, and overhead."""
    spec = pod.get("spec") or {}
    total: Amounts = defaultdict(float)
    for container in spec.get("containers") or ():
        for key, amount in _requests(container).items():
            total[key] += amount
    for container in spec.get("initContainers") or ():
        for key, amount in _requests(container).items():
            total[key] = max(total[key], amount)
    for key, value in (spec.get("overhead") or {}).items():
        total[key] += parse_quantity(value)
    total[COUNTED] = 1.0
    return dict(total)


def charge(rooms: Mapping[str, NodeRoom], pods: Iterable[Mapping[str, Any]]) -> None:
    """Note on every node what its pods hold; pods that have ended hold nothing."""
    for pod in pods:
        room = rooms.get((pod.get("spec") or {}).get("nodeName") or "")
        if room is None or (pod.get("status") or {}).get("phase") in ENDED:
            continue
        mine = room.users.setdefault(_owner(pod), defaultdict(float))
        for key, amount in requests(pod).items():
            room.used[key] = room.used.get(key, 0.0) + amount
            mine[key] += amount


def why_not(pod: Mapping[str, Any], rooms: Sequence[NodeRoom], *, num_waiting: int) -> list[str]:
    """Sentences with numbers: for each resource that is short, what is asked, what is there, who holds the rest."""
    amounts = requests(pod)
    usable = [room for room in rooms if room.ready and room.schedulable and room.usable_by(pod)]
    reasons = []
    if len(usable) < len(rooms):
        reasons.append(f"{len(usable)} of {len(rooms)} nodes may take it{_because(pod, rooms)}")
    for key, amount in sorted(amounts.items()):
        if key == COUNTED or amount <= 0:
            continue
        fitting = [room for room in usable if room.free(key) >= amount - 1e-9]
        places = sum(int((room.free(key) + 1e-9) // amount) for room in fitting)
        if places >= num_waiting:
            continue
        largest = max((room.allocatable.get(key, 0.0) for room in usable), default=0.0)
        total = sum(room.allocatable.get(key, 0.0) for room in usable)
        used = sum(room.used.get(key, 0.0) for room in usable)
        asking = f"{show_quantity(key, amount)} asked" + (f" by each of {num_waiting} pods" if num_waiting > 1 else "")
        line = f"{key}: {asking}, {show_quantity(key, largest)} is the most one node has"
        if largest >= amount:
            line = f"{key}: {asking}, {show_quantity(key, total)} allocatable, {show_quantity(key, used)} in use"
            line += _held_by(key, usable)
        reasons.append(line)
    return reasons


def _held_by(key: str, rooms: Iterable[NodeRoom]) -> str:
    holders: Amounts = defaultdict(float)
    for room in rooms:
        for owner, amounts in room.users.items():
            holders[owner] += amounts.get(key, 0.0)
    top = sorted(((amount, owner) for owner, amount in holders.items() if amount > 0), reverse=True)[:3]
    return " by " + ", ".join(f"{owner} ({show_quantity(key, amount)})" for amount, owner in top) if top else ""


def _because(pod: Mapping[str, Any], rooms: Iterable[NodeRoom]) -> str:
    reasons: dict[str, int] = defaultdict(int)
    for room in rooms:
        if not room.ready:
            reasons["not ready"] += 1
        elif not room.schedulable:
            reasons["cordoned"] += 1
        elif not room.usable_by(pod):
            reasons["excluded by labels or taints"] += 1
    return ": " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()) if reasons else ""


def _requests(container: Mapping[str, Any]) -> Amounts:
    given = container.get("resources") or {}
    # where only a limit is given, the API server makes it the request too
    amounts = {**(given.get("limits") or {}), **(given.get("requests") or {})}
    return {key: parse_quantity(value) for key, value in amounts.items()}


def _owner(pod: Mapping[str, Any]) -> str:
    metadata = pod.get("metadata") or {}
    run = (metadata.get("labels") or {}).get(RUN_LABEL)
    return f"run {run}" if run else f"{metadata.get('namespace')}/{metadata.get('name')}"


def tolerates(taint: Mapping[str, Any], tolerations: Iterable[Mapping[str, Any]]) -> bool:
    for toleration in tolerations:
        if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
            continue
        if not toleration.get("key"):
            if toleration.get("operator") == "Exists":
                return True
            continue
        if toleration["key"] != taint.get("key"):
            continue
        if toleration.get("operator", "Equal") == "Exists" or toleration.get("value", "") == taint.get("value", ""):
            return True
    return False
