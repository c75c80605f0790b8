"""Run every case and say how far apart the numbers are: groups of 1, 2 and 4 ranks at once, then ranks are hurt."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.gpu.cases import EQUAL, FP32, SAME, STEPS, Case, Tolerance, with_models
from tests.gpu.machine import backend, environment, free_port, side_by_side, why_not
from windlass.checkpoint import CheckpointFolder
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of

GROUPS = ("1", "2", "4", "4 fresh")  # of so many ranks; "fresh" for cases that need new processes
MOST_RANKS = 4
LEAVE_WITHIN_S = 30.0
GROUP_LIMIT_S = 300.0
RESUMES = ((4, 2), (2, 1), (1, 4))  # saved on so many ranks, resumed on so many
TEXT = "the quick brown fox jumps over lazy dogs while many ships sail into harbours of gold under pale moons"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    ranks: str
    ok: bool | None  # None: skipped
    says: str
    differences: tuple[float, float] | None = None  # of losses, of gradient norms
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        verdict = "skipped" if self.ok is None else "ok" if self.ok else "FAILED"
        numbers = [f"{one:.1e}" for one in self.differences] if self.differences else ["", ""]
        return self.case, self.ranks, verdict, *numbers, self.says


@dataclass
class Rig:
    """Where everything of one test run lies."""

    root: Path
    only: Sequence[str] = ()  # cases by name; none: all
    jobs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {group: [] for group in GROUPS})

    def __post_init__(self) -> None:
        for name in ("runs", "done", "cache", "logs", "files"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.corpus = self.root / "corpus.jsonl"
        draw = random.Random(7)
        lines = [json.dumps({"text": " ".join(draw.choices(TEXT.split(), k=draw.randint(20, 90)))}) for _ in range(300)]
        self.corpus.write_text("\n".join(lines) + "\n")

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / "runs" / name)

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Loss and gradient norm of every step."""
        return [(float(one["loss"]), float(one["grad_norm"])) for _, one in sorted(steps_of(self.folder(name)).items())]

    def variables(self, faults: str = "", attempt: int = 1) -> dict[str, str]:
        return {
            "WINDLASS_RUNS": str(self.root / "runs"),
            "WINDLASS_CACHE": str(self.root / "cache"),
            "WINDLASS_FAULTS": faults,
            "WINDLASS_ATTEMPT": str(attempt),
        }

    def write(self, run: dict[str, Any], file: str | None = None) -> Path:
        path = self.root / "files" / f"{file or run['name']}.yaml"
        path.write_text(yaml.safe_dump(with_models(run, self.root / "pretrained")))
        return path

    def add(
        self,
        ranks: int,
        run: dict[str, Any],
        *,
        job: str | None = None,
        faults: str = "",
        attempt: int = 1,
        after: tuple[str, int] | None = None,
        local: int | None = None,
        planted: bool = False,
        fresh: bool = False,
    ) -> None:
        """A run for the group of so many ranks; `after`: a job and its ranks that must have ended before."""
        local_size = local if local and local < ranks else ranks
        self.jobs[f"{ranks} fresh" if fresh else str(ranks)].append(
            {
                "name": job or run["name"],
                "run_file": str(self.write(run, job)),
                "done": str(self.root / "done"),
                "after": str(self.root / "done" / f"{after[0]}.{after[1] - 1}") if after else None,
                "planted": planted,
                "environment": self.variables(faults, attempt) | {"LOCAL_WORLD_SIZE": str(local_size)},
            }
        )

    def outcome(self, job: str, ranks: int) -> list[dict[str, Any]]:
        paths = [self.root / "done" / f"{job}.{rank}" for rank in range(ranks)]
        return [json.loads(path.read_text()) if path.exists() else {"code": None} for path in paths]


def chosen(rig: Rig) -> list[Case]:
    return [case for case in EQUAL if not rig.only or case.name in rig.only]


def plan(rig: Rig) -> None:
    """Everything that ends by itself, in the order in which each group does it."""
    by_name = {case.name: case for case in EQUAL}
    for case in chosen(rig):
        for ranks in case.ranks:
            run = case.run(rig.corpus, ranks)
            fresh = case.fresh and ranks == MOST_RANKS
            rig.add(ranks, run, local=case.local_world_size, planted=case.planted, fresh=fresh)
    plain = by_name["full-fp32"]
    rig.add(2, plain.run(rig.corpus, 2, name="nan"), faults="nan:rank=1,step=3")
    for saved_on, _ in RESUMES:
        run = plain.run(rig.corpus, saved_on, name=f"resume-from-{saved_on}")
        rig.add(saved_on, run, faults=f"term:rank={saved_on - 1},step=4")
    for saved_on, resumed_on in RESUMES:
        run = plain.run(rig.corpus, resumed_on, name=f"resume-from-{saved_on}")
        after = (run["name"], saved_on)
        rig.add(resumed_on, run, job=f"{run['name']}-on-{resumed_on}", attempt=2, after=after)


def run_groups(rig: Rig, limit_s: float) -> None:
    """All groups at once; a group that a case ended is started again for the cases after it."""
    end = time.monotonic() + limit_s
    tries = dict.fromkeys(GROUPS, 0)
    groups = {group: start_group(rig, group, 0) for group in GROUPS if rig.jobs[group]}
    while groups and time.monotonic() < end:
        for group, processes in list(groups.items()):
            codes = [process.poll() for process in processes]
            if any(code is None for code in codes):
                if any(code not in (None, 0) for code in codes):
                    _end(processes, patience_s=20)
                continue
            del groups[group]
            tries[group] += 1
            if any(codes) and tries[group] < 4:
                give_up_on_first_unfinished(rig, group)
                groups[group] = start_group(rig, group, tries[group])
        time.sleep(0.1)
    for processes in groups.values():
        _end(processes, patience_s=0)


def start_group(rig: Rig, group: str, attempt: int) -> list[subprocess.Popen[bytes]]:
    size = int(group.split()[0])
    plan_file = rig.root / f"plan-{group.replace(' ', '-')}-{attempt}.json"
    plan_file.write_text(json.dumps(rig.jobs[group]))
    command = [sys.executable, "-m", "tests.gpu.worker", str(plan_file)]
    processes = []
    for rank in range(size):
        log = (rig.root / "logs" / f"group-{group.replace(' ', '-')}-rank-{rank}-{attempt}.txt").open("wb")
        one = environment(rank, size, 0)
        processes.append(subprocess.Popen(command, env=one, stdout=log, stderr=log))
    return processes


def give_up_on_first_unfinished(rig: Rig, group: str) -> None:
    for job in rig.jobs[group]:
        marks = [rig.root / "done" / f"{job['name']}.{rank}" for rank in range(int(group.split()[0]))]
        if not all(mark.exists() for mark in marks):
            for mark in marks:
                mark.write_text(json.dumps({"code": None, "why": "the group ended in this case"}))
            return


def _end(processes: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    end = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


Curve = Sequence[tuple[float, float]]
MISSING = (math.inf, math.inf)


def furthest(mine: Curve, reference: Curve) -> tuple[float, float]:
    """The largest relative differences of losses and of gradient norms; infinite where steps are missing."""
    numbers = [number for step in (*mine, *reference) for number in step]
    if len(mine) != len(reference) or not reference or not all(map(math.isfinite, numbers)):
        return MISSING
    pairs = list(zip(mine, reference, strict=True))
    loss, norm = (max(abs(a[kind] - b[kind]) / max(abs(b[kind]), 1e-12) for a, b in pairs) for kind in (0, 1))
    return loss, norm


def within(differences: tuple[float, float], tolerance: Tolerance) -> bool:
    return all(one < limit for one, limit in zip(differences, tolerance, strict=True))


def equality_rows(rig: Rig) -> list[Row]:
    rows = []
    for case in chosen(rig):
        first, *others = case.ranks
        reference = rig.curve(f"{case.name}-{first}")
        same = dict(SAME).get(case.name)
        if same:
            rows.append(_compared(rig, case, first, rig.curve(f"{same}-{first}"), f"as {same} on {first}"))
        rows += [_compared(rig, case, ranks, reference, f"as on {first}") for ranks in others]
    return rows


def _compared(rig: Rig, case: Case, ranks: int, reference: Curve, says: str) -> Row:
    outcome = rig.outcome(f"{case.name}-{ranks}", ranks)
    seconds = max((one.get("seconds") or 0.0 for one in outcome), default=None)
    codes = [one["code"] for one in outcome]
    if any(code != 0 for code in codes) or len(reference) != STEPS:
        why = f"exit codes {codes}, {len(reference)} steps of the reference"
        return Row(case.name, str(ranks), False, why, seconds=seconds)
    differences = furthest(rig.curve(f"{case.name}-{ranks}"), reference)
    limits = f"{case.tolerance[0]:.0e} and {case.tolerance[1]:.0e}"
    if case.planted:
        found = differences != MISSING and not within(differences, case.tolerance)
        return Row(case.name, str(ranks), found, f"a wrong scale is seen, above {limits}", differences, seconds)
    equal = within(differences, case.tolerance)
    return Row(case.name, str(ranks), equal, f"{says}, below {limits}", differences, seconds)


def resume_rows(rig: Rig) -> list[Row]:
    rows = []
    reference = rig.curve("full-fp32-1")
    for saved_on, resumed_on in RESUMES:
        name = f"resume-from-{saved_on}"
        codes = [one["code"] for one in rig.outcome(name, saved_on)]
        resumed = [one["code"] for one in rig.outcome(f"{name}-on-{resumed_on}", resumed_on)]
        stopped = [one["step"] for one in read_json_lines(rig.folder(name).history) if one["event"] == "preempted"]
        saved = codes == [75] * saved_on and stopped == [3]
        rows.append(Row("sigterm", str(saved_on), saved, f"exit codes {codes}, saved at step {stopped}"))
        differences = furthest(rig.curve(name), reference)
        ok = saved and resumed == [0] * resumed_on and within(differences, FP32)
        says = "as undisturbed on 1" if resumed == [0] * resumed_on else f"exit codes {resumed}"
        rows.append(Row("save and resume", f"{saved_on} → {resumed_on}", ok, says, differences))
    return rows


def nan_row(rig: Rig) -> Row:
    codes = [one["code"] for one in rig.outcome("nan", 2)]
    errors = [_error(rig.folder("nan"), rank) for rank in (0, 1)]
    kept = [one.step for one in CheckpointFolder(rig.folder("nan").checkpoints).complete()]
    named = all("rank 1" in str(error.get("evidence")) and "step 3" in str(error.get("error")) for error in errors)
    ok = codes == [1, 1] and named and kept == [2]
    return Row("nan", "2", ok, f"exit codes {codes}, rank and step named: {named}, step {kept} kept")


def _error(folder: RunFolder, rank: int) -> dict[str, Any]:
    try:
        return dict(json.loads(folder.rank_error(rank).read_text()))
    except (OSError, ValueError):
        return {}


def start_ranks(rig: Rig, run: dict[str, Any], ranks: int, *, faults: str, attempt: int = 1) -> list[Any]:
    """Ranks as processes of their own, as no launcher."""
    run_file, port = rig.write(run), free_port()
    processes = []
    for rank in range(ranks):
        log = (rig.root / "logs" / f"{run['name']}-rank-{rank}-{attempt}.txt").open("wb")
        one = environment(rank, ranks, port) | rig.variables(faults, attempt)
        command = [sys.executable, "-m", "windlass.trainer", str(run_file)]
        processes.append(subprocess.Popen(command, env=one, stdout=log, stderr=log))
    return processes


def hurt_run(rig: Rig, name: str, **more: Any) -> dict[str, Any]:
    return EQUAL[0].run(rig.corpus, 2, name=name, **more)


def seconds_to_leave(processes: Sequence[Any], since: Callable[[], float | None]) -> float:
    """How long after the blow the last of these left by itself; infinite where it did not."""
    end = time.monotonic() + 150
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        blow = since()
        if blow is not None and time.time() > blow + LEAVE_WITHIN_S + 60:
            break
        time.sleep(0.05)
    left, blow = time.time(), since()
    stayed = any(process.poll() is None for process in processes)
    return math.inf if stayed or blow is None else left - blow


def mark(rig: Rig, name: str, rank: int) -> Callable[[], float | None]:
    """When a fault of this rank fired."""
    path = rig.folder(name).logs / f".fault-0-{rank}"
    return lambda: path.stat().st_mtime if path.exists() else None


def killed_row(rig: Rig, name: str, says: str) -> list[Row]:
    """kill -9 while the other waits for it on the device; then on from the memory tier's pinned copies."""
    memory = {"checkpoint": {"every": 1000, "memory_every": 1, "memory_path": str(rig.root / "memory")}}
    run = hurt_run(rig, name, **memory)
    first, second = start_ranks(rig, run, 2, faults="kill:rank=1,step=4,point=step.loss")
    took = seconds_to_leave([first], mark(rig, name, 1))
    code = first.poll()
    _end([first, second], patience_s=0)
    error = _error(rig.folder(name), 0)
    named = str(error.get("error", "")).startswith("rank 1 on ")
    ok = took < LEAVE_WITHIN_S and [code, second.poll()] == [75, -signal.SIGKILL] and named and bool(error.get("retry"))
    rows = [Row(f"kill -9, {says}", "2", ok, f"the other left after {took:.1f} s with {code}; {error.get('error')}")]
    again = start_ranks(rig, run, 2, faults="", attempt=2)
    end = time.monotonic() + 120
    while any(process.poll() is None for process in again) and time.monotonic() < end:
        time.sleep(0.1)
    codes = [process.poll() for process in again]
    _end(again, patience_s=0)
    history = read_json_lines(rig.folder(name).history)
    resumed = [(one["step"], one["tier"]) for one in history if one["event"] == "resumed"]
    differences = furthest(rig.curve(name), rig.curve("full-fp32-1"))
    ok = codes == [0, 0] and within(differences, FP32) and [tier for _, tier in resumed] == ["memory"]
    rows.append(Row(f"memory tier, {says}", "2", ok, f"exit codes {codes}, resumed from {resumed}", differences))
    return rows


def torchrun_row(rig: Rig) -> Row:
    name = "killed-under-torchrun"
    run_file = rig.write(hurt_run(rig, name))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "windlass.trainer", str(run_file)]
    one = environment(0, 2, 0) | rig.variables("kill:rank=1,step=4,point=step.loss")
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        one.pop(variable)
    log = (rig.root / "logs" / f"{name}.txt").open("wb")
    launcher = subprocess.Popen(command, env=one, stdout=log, stderr=log)
    took = seconds_to_leave([launcher], mark(rig, name, 1))
    _end([launcher], patience_s=0)
    error = _error(rig.folder(name), 0)
    named = str(error.get("error", "")).startswith("rank 1 on ")
    ok = took < LEAVE_WITHIN_S and bool(error.get("retry")) and named
    return Row("kill -9, torchrun", "2", ok, f"all gone after {took:.1f} s; {error.get('error')}")


def stopped_row(rig: Rig) -> Row:
    name = "stopped"
    run = hurt_run(rig, name, **{"parallel.timeout_minutes": 0.3})
    first, second = start_ranks(rig, run, 2, faults="stop:rank=1,step=4,point=step.loss")
    took = seconds_to_leave([first], mark(rig, name, 1))
    code = first.poll()
    second.kill()
    _end([first, second], patience_s=0)
    error = str(_error(rig.folder(name), 0).get("error", ""))
    ok = (
        took < LEAVE_WITHIN_S + 10
        and code == 75
        and error.startswith("rank 1 on ")
        and f"it missed {backend()}:" in error
    )
    return Row("sigstop", "2", ok, f"the other left after {took:.1f} s with {code}; {error}")


def make_pretrained(rig: Rig) -> None:
    """A small model with weights, for LoRA; in a process of its own, so that this one never holds a GPU."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.gpu.pretrained", str(rig.root / "pretrained")]
    subprocess.run(command, env=hidden, check=True)


def names() -> list[str]:
    """Every case, whether it can run here or not."""
    return [
        *(case.name for case in EQUAL),
        *("sigterm", "save and resume", "nan", "sigstop", "kill -9, processes", "kill -9, torchrun", "memory tier"),
    ]


def run_all(root: Path, *, only_equal: bool = False, only: Sequence[str] = ()) -> list[Row]:
    """Every row of the table; without what the tests need, one skipped row per case that says why."""
    obstacle = why_not(MOST_RANKS)
    if obstacle:
        return [Row(name, "", None, obstacle) for name in names()]
    rig = Rig(root, only)
    with side_by_side(root / "mps", MOST_RANKS) as how:
        print(how, flush=True)
        make_pretrained(rig)
        plan(rig)
        began = time.monotonic()
        run_groups(rig, GROUP_LIMIT_S)
        print(f"groups of {', '.join(GROUPS)} ranks: {time.monotonic() - began:.0f} s", flush=True)
        rows = [*equality_rows(rig), *resume_rows(rig), nan_row(rig)]
        for row in rows:
            print(" | ".join(row.cells()), flush=True)
        if not only_equal:
            rows += _hurt(rig)
    if "MPS" in how and not only_equal:
        without = killed_row(rig, "killed-without-mps", "taking turns")
        print("\n".join(" | ".join(row.cells()) for row in without), flush=True)
        rows += without
    return rows


def _hurt(rig: Rig) -> list[Row]:
    rows: list[Row] = []
    blows: dict[str, Callable[[], list[Row]]] = {
        "sigstop": lambda: [stopped_row(rig)],
        "kill": lambda: killed_row(rig, "killed", "processes"),
        "torchrun": lambda: [torchrun_row(rig)],
    }
    for name, blow in blows.items():
        if rig.only and name not in rig.only:
            continue
        made = blow()
        print("\n".join(" | ".join(row.cells()) for row in made), flush=True)
        rows += made
    return rows


def table(rows: Sequence[Row]) -> str:
    head = ("case", "ranks", "", "loss differs by", "gradient norm by", "what was seen")
    lines = [head, tuple("---" for _ in head), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
