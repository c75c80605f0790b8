"""The facts about a job that Slurm has now, for `windlass why`."""

from __future__ import annotations

from typing import Any

from windlass.targets.slurm.commands import Commands
from windlass.targets.slurm.state import SubmittedJob

FIELDS = (
    "JobID,JobName,State,ExitCode,DerivedExitCode,Reason,Submit,Start,End,Elapsed,Timelimit,NodeList,MaxRSS,ReqMem,Comment"
)  # fmt: skip


def collect(job: SubmittedJob) -> dict[str, Any]:
    """What the controller and the accounting say; a cluster without accounting has no sacct."""
    if job.number is None:
        return {}
    commands, facts = Commands(job.host), {}
    for name, command in (
        ("scontrol", ("scontrol", "show", "job", job.number)),
        ("sacct", ("sacct", "--parsable2", "--duplicates", "--jobs", job.number, f"--format={FIELDS}")),
    ):
        answer = commands.call(*command)
        if answer.code == 0 and answer.out.strip():
            facts[name] = answer.out
    return {"slurm": facts}
