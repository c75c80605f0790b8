"""The facts about a job that Slurm has now, for `windlass why`: its records, its nodes and what it printed."""

from __future__ import annotations

import re
from typing import Any

from windlass.errors import UserError
from windlass.targets.slurm.commands import Commands

FIELDS = (
    "JobID,JobName,State,ExitCode,DerivedExitCode,Reason,Submit,Start,End,Elapsed,Timelimit,NodeList,MaxRSS,ReqMem"
    ",Comment,SystemComment,ReqTRES"
)
MOST_BYTES = 400_000  # of an output file: its end


def collect(commands: Commands, number: str) -> dict[str, Any]:
    """What the controller and the accounting say; a cluster without accounting has no sacct."""
    records = {
        "scontrol": _answer(commands, "scontrol", "show", "job", number),
        "sacct": _answer(commands, "sacct", "--parsable2", "--duplicates", "--jobs", number, f"--format={FIELDS}"),
    }
    return {"slurm": {name: text for name, text in records.items() if text}}


def collect_named(commands: Commands, number: str) -> dict[str, Any]:
    """The same of a job that anybody submitted, with the files that its script wrote where they can be read."""
    facts = collect(commands, number)
    rows = facts["slurm"].get("sacct", "").splitlines()[1:]
    if not facts["slurm"].get("scontrol") and not rows:
        raise UserError(f"Slurm knows no job {number}", fix="sacct --user $USER lists yours")
    paths = re.findall(r"^ +Std(?:Out|Err)=(/\S+)", facts["slurm"].get("scontrol", ""), re.MULTILINE)
    logs = {
        path.rpartition("/")[2]: _answer(commands, "tail", "-c", str(MOST_BYTES), path) for path in dict.fromkeys(paths)
    }
    return {**facts, "target": "slurm", "logs": {name: text for name, text in logs.items() if text}}


def _answer(commands: Commands, *command: str) -> str:
    answer = commands.call(*command)
    return answer.out if answer.code == 0 and answer.out.strip() else ""
