"""What follows when the ranks of all pods have ended: done, failed, or once more. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from windlass.errors import ExitCode
from windlass.targets.launch.decision import AttemptEnd, Done, RankDeath, Restart, RestartBudget, by_blame, decide

LEFT = 143  # as if by SIGTERM: every job kind answers it with a new pod
# What torchrun logs when pods could not reach each other or a port was taken: worth another start.
TROUBLE = re.compile(
    r"Rendezvous(Timeout|Connection|Closed)Error|DistNetworkError|DistStoreError|EADDRINUSE|Connection reset"
    r"|has not arrived"
)
NO_RENDEZVOUS = "the ranks could not meet"  # the trainer's words: an input error elsewhere, a lost pod here


@dataclass(frozen=True)
class NodeEnd:
    """How the ranks of one pod ended."""

    node: int
    code: int = 0
    deaths: Sequence[RankDeath] = ()
    errors: Sequence[Mapping[str, Any]] = ()
    trouble: bool = False
    leaving: bool = False  # the pod got a SIGTERM: it leaves
    lost: str | None = None  # why nothing came from it any more
    out_of_memory: str | None = None  # the pod's memory limit, where the kernel killed ranks that reached it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Again:
    """Start the ranks once more. A free start was saved for, or is nobody's fault."""

    why: str
    free: bool = False


def verdict(
    ends: Sequence[NodeEnd], events: Sequence[Mapping[str, Any]], budget: RestartBudget, *, export: bool = False
) -> Done | Again:
    """`events`: what rank 0 wrote down since the ranks were started."""
    happened = {str(one.get("event")) for one in events}
    if all(end.code == 0 and not end.lost for end in ends):
        return Done("finished", ExitCode.OK)
    errors = sorted((error for end in ends for error in end.errors), key=lambda one: float(one.get("time") or 0))
    hopeless = [one for one in errors if not one.get("retry", False) and one.get("error") != NO_RENDEZVOUS]
    if "finished" in happened:
        if not export or "exported" in happened:
            return Done("finished", ExitCode.OK)  # a pod that was lost after the last step
        why = f": {hopeless[0].get('error')}" if hopeless else ""
        return Done("failed", ExitCode.FAILED, f"trained to the end, but the export did not finish{why}")
    if hopeless:
        code = int(hopeless[0].get("exit_code") or ExitCode.FAILED)
        return Done("failed", code if code in (1, 2) else ExitCode.FAILED, str(hopeless[0].get("error")))
    leaving = [end.node for end in ends if end.leaving]
    saved = "preempted" in happened
    if len(leaving) == len(ends):
        if saved:
            return Done("preempted", ExitCode.PREEMPTED, "told to leave; saved first")
        return Done("stopped", ExitCode.INTERRUPTED, "told to leave, without a new checkpoint")
    if saved:
        return Again(f"{_nodes(leaving)} told to leave; saved first" if leaving else "saved to start anew", free=True)
    again = _why_again(ends, leaving)
    if again is not None:
        if budget.left > 0:
            return Again(again)
        reason = f"{again}; given up after {budget.used} restarts without a new checkpoint"
        return Done("failed", ExitCode.FAILED, reason)
    code = next((end.code for end in ends if end.code), 0)
    decided = decide(AttemptEnd(code, events, errors, [death for death, _ in deaths_of(ends)]), budget)
    if isinstance(decided, Restart):
        return Again(decided.why)
    if decided.reason:
        return Done(decided.state, decided.code, decided.reason.replace("; see logs/launcher.log", ""))
    return decided


def deaths_of(ends: Sequence[NodeEnd]) -> list[tuple[RankDeath, NodeEnd]]:
    """The ranks that died, with their pods: those that were killed before those that lost them."""
    deaths = [(death, end) for end in ends for death in end.deaths]
    return sorted(deaths, key=lambda pair: by_blame(pair[0]))


def _why_again(ends: Sequence[NodeEnd], leaving: Sequence[int]) -> str | None:
    """Reasons that no error file tells."""
    short = [end for end in ends if end.out_of_memory]
    if short:
        return f"node {short[0].node} ran out of memory: {short[0].out_of_memory}"
    lost = [end for end in ends if end.lost]
    if lost:
        return f"node {lost[0].node} was lost: {lost[0].lost}"
    if leaving:
        return f"{_nodes(leaving)} told to leave before a checkpoint"
    killed = any(death.code < 0 for end in ends for death in end.deaths)
    could_not_meet = any(error.get("error") == NO_RENDEZVOUS for end in ends for error in end.errors)
    if not killed and (could_not_meet or any(end.trouble for end in ends)):
        return "the pods did not meet"
    return None


def _nodes(nodes: Sequence[int]) -> str:
    return f"node {nodes[0]} was" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))} were"
