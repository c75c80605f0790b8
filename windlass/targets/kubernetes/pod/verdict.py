"""What follows when the ranks of all pods have ended: done, failed, or once more. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from windlass.errors import ExitCode
from windlass.targets.launch.decision import AttemptEnd, Done, History, RankDeath, by_blame, judge, once_more

if TYPE_CHECKING:
    from windlass.diagnose.decision import Decision

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


def verdict(
    ends: Sequence[NodeEnd], events: History, history: History, max_restarts: int, *, export: bool = False
) -> Done | Decision:
    """`events`: what rank 0 wrote down since the ranks were started; `history`: all of it."""
    from windlass.diagnose.decision import Decision

    end = merged(ends, events)
    if all(end.code == 0 and not end.lost for end in ends):
        return Done("finished", ExitCode.OK)
    final = end.final_errors
    if end.has("finished"):
        if not export or end.has("exported"):
            return Done("finished", ExitCode.OK)  # a pod that was lost after the last step
        why = f": {final[0].get('error')}" if final else ""
        return Done("failed", ExitCode.FAILED, f"trained to the end, but the export did not finish{why}")
    saved = end.has("preempted") and not final
    if all(node.leaving for node in ends) and not final:
        if saved:
            return Done("preempted", ExitCode.PREEMPTED, "told to leave; saved first")
        return Done("stopped", ExitCode.INTERRUPTED, "told to leave, without a new checkpoint")
    if saved:
        return Decision(
            "retry", "preempted", f"{end.leaving} told to leave; saved first" if end.leaving else "saved to start anew"
        )
    code = int(final[0].get("exit_code") or ExitCode.FAILED) if final else ExitCode.FAILED
    return once_more(judge(end), history, max_restarts, code=code if code in (1, 2) else ExitCode.FAILED)


def merged(ends: Sequence[NodeEnd], events: History) -> AttemptEnd:
    """The ends of all pods as one."""
    errors = sorted((error for end in ends for error in end.errors), key=lambda error: float(error.get("time") or 0))
    missed = [error for error in errors if error.get("error") == NO_RENDEZVOUS]
    short = next((end for end in ends if end.out_of_memory), None)
    lost = next((end for end in ends if end.lost), None)
    leaving = [end.node for end in ends if end.leaving]
    return AttemptEnd(
        launcher_code=next((end.code for end in ends if end.code), 0),
        events=events,
        errors=[error for error in errors if error not in missed],
        deaths=[death for death, _ in deaths_of(ends)],
        out_of_memory=f"node {short.node} ran out of memory: {short.out_of_memory}" if short else None,
        lost=f"node {lost.node} was lost: {lost.lost}" if lost else None,
        leaving=_nodes(leaving) if leaving else None,
        apart="the pods did not meet" if missed or any(end.trouble for end in ends) else None,
    )


def deaths_of(ends: Sequence[NodeEnd]) -> list[tuple[RankDeath, NodeEnd]]:
    """The ranks that died, with their pods: those that were killed before those that lost them."""
    deaths = [(death, end) for end in ends for death in end.deaths]
    return sorted(deaths, key=lambda pair: by_blame(pair[0]))


def _nodes(nodes: Sequence[int]) -> str:
    return f"node {nodes[0]} was" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))} were"
