"""The nodes: ready, schedulable, healthy by every account, and near each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from windlass.clusters.needs import EFA, GPU, Needs
from windlass.clusters.result import Result, failed, passed, skipped, warning
from windlass.clusters.snapshot import Refusal, Snapshot, condition_of, name_of
from windlass.targets.kubernetes.api.http import Object
from windlass.targets.kubernetes.manifests.pod import HYPERPOD_HEALTH, ZONE

MOST_NAMED = 5
# Conditions that are bad while they are False: KernelReady of the EKS node monitoring agent, EtcdIsVoter of k3s. Every
# other one is bad while it is True: the kubelet's pressures, node-problem-detector's, NVSentinel's.
GOOD_WHEN_TRUE = re.compile(r"((?<!Not)Ready|Healthy|Available|IsVoter)$")


def readiness(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    if isinstance(snapshot.nodes, Refusal):
        yield skipped("the nodes were not looked at", str(snapshot.nodes))
        return
    if not snapshot.nodes:
        yield warning(
            "the cluster has no nodes",
            evidence="GET /api/v1/nodes is empty",
            fix="a node group, or an autoscaler that makes nodes when pods wait (Karpenter, cluster-autoscaler)",
        )
        return
    down = [name_of(node) for node in snapshot.nodes if condition_of(node, "Ready").get("status") != "True"]
    cordoned = [name_of(node) for node in snapshot.nodes if (node.get("spec") or {}).get("unschedulable")]
    num_usable = len(snapshot.nodes) - len({*down, *cordoned})
    if down:
        yield (failed if not num_usable else warning)(
            f"{len(down)} of {len(snapshot.nodes)} nodes are not ready",
            evidence="\n".join(_why_down(node) for node in snapshot.nodes if name_of(node) in down[:MOST_NAMED]),
            fix=f"kubectl describe node {down[0]}",
        )
    if cordoned:
        yield (failed if not num_usable else warning)(
            f"{len(cordoned)} of {len(snapshot.nodes)} nodes are cordoned",
            evidence=f"spec.unschedulable: {_some(cordoned)}",
            fix=f"kubectl uncordon {cordoned[0]}",
        )
    if num_usable:
        yield passed(f"{num_usable} of {len(snapshot.nodes)} nodes are ready and schedulable")


def health(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    """What health agents say of nodes: conditions, and HyperPod's label."""
    if isinstance(snapshot.nodes, Refusal):
        return
    problems = {name_of(node): list(_problems(node)) for node in snapshot.nodes}
    sick = {name: reasons for name, reasons in problems.items() if reasons}
    if sick:
        first = next(iter(sick))
        yield warning(
            f"{len(sick)} of {len(snapshot.nodes)} nodes report a problem",
            evidence="\n".join(f"{name}: {'; '.join(reasons)}" for name, reasons in list(sick.items())[:MOST_NAMED]),
            fix=f"kubectl cordon {first}    keeps runs off it; kubectl describe node {first} says more",
        )
    elif snapshot.nodes:
        yield passed("no node reports a problem")


def zones(snapshot: Snapshot, needs: Needs) -> Iterator[Result]:
    """EFA does not cross availability zones, and traffic between them is slow and paid for."""
    if isinstance(snapshot.nodes, Refusal) or needs.num_pods < 2 or needs.pod is None:
        return
    rooms = [room for room in snapshot.rooms.values() if room.ready and room.schedulable and room.usable_by(needs.pod)]
    uses_efa = needs.asks(EFA)
    usable = [room for room in rooms if room.allocatable.get(GPU)] or rooms
    counts = Counter(room.labels.get(ZONE, "") for room in usable)
    if len(counts) > 1 and max(counts.values(), default=0) < needs.num_pods:
        yield (failed if uses_efa else warning)(
            f"no zone has the {needs.num_pods} nodes that the run needs",
            evidence=", ".join(f"{zone or 'no zone'}: {number} nodes" for zone, number in counts.most_common()),
            fix="a node group in one zone: EFA does not cross zones" if uses_efa else "a node group in one zone",
        )
    elif counts:
        yield passed(f"{max(counts.values())} usable nodes share a zone")


def _problems(node: Object) -> Iterator[str]:
    for condition in (node.get("status") or {}).get("conditions") or ():
        kind, status = condition.get("type"), condition.get("status")
        if kind == "Ready":
            continue
        if status == ("False" if GOOD_WHEN_TRUE.search(str(kind)) else "True"):
            message = " ".join(str(condition.get("message") or condition.get("reason") or "").split())
            yield f"{kind}: {message[:160]}"
    label = (node["metadata"].get("labels") or {}).get(HYPERPOD_HEALTH)
    if label and label != "Schedulable":
        yield f"{HYPERPOD_HEALTH}={label}"


def _why_down(node: Object) -> str:
    ready = condition_of(node, "Ready")
    if not ready:
        return f"{name_of(node)}: it never reported"
    return f"{name_of(node)}: Ready={ready.get('status')}: {ready.get('message') or ready.get('reason')}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
