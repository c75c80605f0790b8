"""Edits of a run that answer a verdict. Pure: a verdict, the run and the facts in; keys and their new values out.

An edit changes how a run is computed or what it asks of a cluster, never what it computes: not its data, its image, its
model or its global batch. Fewer sequences at once means more accumulated, and recomputing gives the same activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from windlass.common.quantities import parse_quantity
from windlass.diagnose.decision import Remedy
from windlass.diagnose.facts import Facts, Node
from windlass.diagnose.verdict import Verdict
from windlass.spec import Run

KEPT = ("data.", "image.", "model.", "target.kubernetes.image", "train.global_batch")
SHARE = 0.9  # of what a node can give: the rest is for its daemons
MEMORY, CPU, EFA = "memory", "cpu", "vpc.amazonaws.com/efa"


def remedy_for(verdict: Verdict, run: Run, facts: Facts) -> Remedy | None:
    """The edit that answers a verdict; None where there is none, or only a person can choose it."""
    match verdict.name:
        case "cuda_oom" | "cuda_oom_fragmentation":
            return _less_at_once(run)
        case "cpu_memory_request":
            return _what_nodes_have(facts)
        case "host_oom" if run.target.kind == "kubernetes":
            return _more_memory(run, facts)
        case "efa_unavailable":
            return _as_many_interfaces(facts)
        case "shm" if run.target.kind == "kubernetes":
            return _more_shared_memory(run)
    return None


def may_edit(keys: Iterable[str]) -> bool:
    """Whether these keys are an edit's to change."""
    return not any(key.startswith(kept) for key in keys for kept in KEPT)


def _less_at_once(run: Run) -> Remedy | None:
    micro = run.train.micro_batch or 1
    if micro > 1:
        half = max(size for size in range(1, micro // 2 + 1) if micro % size == 0)
        why = f"a micro-batch of {half} instead of {micro}, the rest accumulated: the losses stay the same"
        return Remedy({"train.micro_batch": half}, why)
    if run.parallel.activation_checkpointing != "full":
        why = "activations are recomputed: slower, with the same losses"
        return Remedy({"parallel.activation_checkpointing": "full"}, why)
    return None


def _what_nodes_have(facts: Facts) -> Remedy | None:
    """Only for what no node could give though it were empty; nodes in use by others are waited for."""
    edit: dict[str, Any] = {}
    amounts = []
    for resource in (MEMORY, CPU):
        requested = max((amount(pod.requests.get(resource)) for pod in facts.pods), default=0.0)
        most = _most(facts.nodes, resource)
        if requested > most > 0:
            edit[f"target.kubernetes.{resource}"] = new = _written(resource, SHARE * most)
            amounts.append(f"{resource} {new}, of the {_written(resource, most)} that the largest node has")
    return Remedy(edit, f"each pod asks for {' and '.join(amounts)}") if edit else None


def _more_memory(run: Run, facts: Facts) -> Remedy | None:
    before, most = amount(run.target.kubernetes.memory), SHARE * _most(facts.nodes, MEMORY)
    if not before or most <= before:
        return None
    new = _written(MEMORY, min(2 * before, most))
    return Remedy({"target.kubernetes.memory": new}, f"each pod gets {new} instead of {run.target.kubernetes.memory}")


def _as_many_interfaces(facts: Facts) -> Remedy | None:
    have = int(_most(facts.nodes, EFA))
    if not have:  # the plugin is missing, or the nodes are others: training over TCP is nobody's wish
        return None
    return Remedy({"target.kubernetes.efa": have}, f"each pod asks for {have} EFA interfaces, as the nodes have")


def _more_shared_memory(run: Run) -> Remedy | None:
    before = amount(run.target.kubernetes.shm)
    if not before:
        return None
    new = _written(MEMORY, 2 * before)
    return Remedy({"target.kubernetes.shm": new}, f"/dev/shm gets {new} instead of {run.target.kubernetes.shm}")


def _most(nodes: Iterable[Node], resource: str) -> float:
    return max((amount(node.allocatable.get(resource)) for node in nodes), default=0.0)


def amount(quantity: str | None) -> float:
    """A quantity of Kubernetes as a number; 0 of what is none."""
    try:
        return parse_quantity(quantity or "0")
    except ValueError:
        return 0.0


def _written(resource: str, number: float) -> str:
    return f"{int(number * 1000)}m" if resource == CPU else f"{int(number / 2**20)}Mi"


def edited(values: Mapping[str, Any], edit: Mapping[str, Any]) -> dict[str, list[Any]]:
    """An edit with what the run said before, key by key, as history.jsonl keeps it: [before, after]."""
    return {key: [_at(values, key), new] for key, new in edit.items()}


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
