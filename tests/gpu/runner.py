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

from tests.gpu.cases import EQUAL, FP32, SAME, STEPS, Case, with_models
from tests.gpu.machine import backend, environment, free_port, side_by_side, why_not
from windlass.checkpoint import CheckpointFolder
from windlass.runfolder import RunFolder, read_json_lines, steps_of

GROUPS = (1, 2, 4)
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
    difference: float | None = None
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        verdict = "skipped" if self.ok is None else "ok" if self.ok else "FAILED"
        number = "" if self.difference is None else f"{self.difference:.1e}"
        return self.case, self.ranks, verdict, number, self.says


@dataclass
class Rig:
    """Where everything of one test run lies."""

    root: Path
    only: Sequence[str] = ()  # cases by name; none: all
    jobs: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {size: [] for size in GROUPS})

    def __post_init__(self) -> None:
        for name in ("runs", "done", "cache", "logs", "files"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.corpus = self.root / "corpus.jsonl"
        draw = random.Random(7)
        lines = [json.dumps({"text": " ".join(draw.choices(TEXT.split(), k=draw.randint(20, 90)))}) for _ in range(300)]
        self.corpus.write_text("\n".join(lines) + "\n")

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / "runs" / name)

    def losses(self, name: str) -> dict[int, float]:
        return {step: float(one["loss"]) for step, one in sorted(steps_of(self.folder(name)).items())}

    def curve(self, name: str) -> list[float]:
        """Losses and gradient norms of every step."""
        steps = [one for _, one in sorted(steps_of(self.folder(name)).items())]
        return [float(one[key]) for key in ("loss", "grad_norm") for one in steps]

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
    ) -> None:
        """A run for the group of so many ranks; `after`: a job and its ranks that must have ended before."""
        local_size = local if local and local < ranks else ranks
        self.jobs[ranks].append(
            {
                "name": job or run["name"],
                "run_file": str(self.write(run, job)),
                "done": str(self.root / "done"),
                "after": str(self.root / "done" / f"{after[0]}.{after[1] - 1}") if after else None,
                "planted": planted,
                "environment": self.variables(faults, attempt)
                | {"MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(local_size)},
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
            rig.add(ranks, run, local=case.local_world_size, planted=case.planted)
    plain = by_name["full-fp32"]
    rig.add(2, plain.run(rig.corpus, 2, name="nan"), faults="nan:rank=1,step=3")
    for saved_on, _ in RESUMES:
        run = plain.run(rig.corpus, saved_on, name=f"resume-from-{saved_on}")
        rig.add(saved_on, run, faults=f"term:rank={saved_on - 1},step=4")
    for saved_on, resumed_on in RESUMES:
        run = plain.run(rig.corpus, resumed_on, name=f"resume-from-{saved_on}")
        after = (run["name"], saved_on)
        rig.add(resumed_on, run, job=f"{run['name']}-on-{resumed_on}", attempt=2, after=after)


def run_groups(rig: Rig, sizes: Sequence[int], limit_s: float) -> None:
    """All groups at once; a group that a case ended is started again for the cases after it."""
    end = time.monotonic() + limit_s
    tries = dict.fromkeys(sizes, 0)
    groups = {size: start_group(rig, size, 0) for size in sizes}
    while groups and time.monotonic() < end:
        for size, processes in list(groups.items()):
            codes = [process.poll() for process in processes]
            if any(code is None for code in codes):
                if any(code not in (None, 0) for code in codes):
                    _end(processes, patience_s=20)
                continue
            del groups[size]
            tries[size] += 1
            if any(codes) and tries[size] < 4:
                give_up_on_first_unfinished(rig, size)
                groups[size] = start_group(rig, size, tries[size])
        time.sleep(0.1)
    for processes in groups.values():
        _end(processes, patience_s=0)


def start_group(rig: Rig, size: int, attempt: int) -> list[subprocess.Popen[bytes]]:
    plan_file = rig.root / f"plan-{size}.json"
    for job in rig.jobs[size]:
        job["environment"]["MASTER_PORT"] = str(free_port())
    plan_file.write_text(json.dumps(rig.jobs[size]))
    command = [sys.executable, "-m", "tests.gpu.worker", str(plan_file)]
    processes = []
    for rank in range(size):
        log = (rig.root / "logs" / f"group-{size}-rank-{rank}-{attempt}.txt").open("wb")
        one = environment(rank, size, 0)
        processes.append(subprocess.Popen(command, env=one, stdout=log, stderr=log))
    return processes


def give_up_on_first_unfinished(rig: Rig, size: int) -> None:
    for job in rig.jobs[size]:
        marks = [rig.root / "done" / f"{job['name']}.{rank}" for rank in range(size)]
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


def furthest(mine: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; infinite where steps are missing or not finite."""
    if len(mine) != len(reference) or not reference or not all(map(math.isfinite, [*mine, *reference])):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(mine, reference, strict=True))


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


def _compared(rig: Rig, case: Case, ranks: int, reference: Sequence[float], says: str) -> Row:
    outcome = rig.outcome(f"{case.name}-{ranks}", ranks)
    seconds = max((one.get("seconds") or 0.0 for one in outcome), default=None)
    codes = [one["code"] for one in outcome]
    if any(code != 0 for code in codes) or len(reference) != 2 * STEPS:
        why = f"exit codes {codes}, {len(reference) // 2} steps of the reference"
        return Row(case.name, str(ranks), False, why, seconds=seconds)
    difference = furthest(rig.curve(f"{case.name}-{ranks}"), reference)
    if case.planted:
        found = difference > case.tolerance and math.isfinite(difference)
        says = f"a wrong scale is seen, above {case.tolerance:.0e}"
        return Row(case.name, str(ranks), found, says, difference, seconds)
    below = f"{says}, below {case.tolerance:.0e}"
    return Row(case.name, str(ranks), difference < case.tolerance, below, difference, seconds)


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
        difference = furthest(rig.curve(name), reference)
        ok = saved and resumed == [0] * resumed_on and difference < FP32
        says = f"as undisturbed, below {FP32:.0e}" if resumed == [0] * resumed_on else f"exit codes {resumed}"
        rows.append(Row("save and resume", f"{saved_on} → {resumed_on}", ok, says, difference))
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
    difference = furthest(rig.curve(name), rig.curve("full-fp32-1"))
    ok = codes == [0, 0] and difference < FP32 and [tier for _, tier in resumed] == ["memory"]
    rows.append(Row(f"memory tier, {says}", "2", ok, f"exit codes {codes}, resumed from {resumed}", difference))
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
    obstacle = why_not(max(GROUPS))
    if obstacle:
        return [Row(name, "", None, obstacle) for name in names()]
    rig = Rig(root, only)
    with side_by_side(root / "mps", max(GROUPS)) as how:
        print(how, flush=True)
        make_pretrained(rig)
        plan(rig)
        began = time.monotonic()
        run_groups(rig, GROUPS, GROUP_LIMIT_S)
        print(f"groups of {', '.join(map(str, GROUPS))} ranks: {time.monotonic() - began:.0f} s", flush=True)
        rows = [*equality_rows(rig), *resume_rows(rig), nan_row(rig)]
        for row in rows:
            print(" | ".join(row.cells()), flush=True)
        if not only_equal:
            rows += _hurt(rig, how)
    if not only_equal and "MPS" in how:
        without = killed_row(rig, "killed-without-mps", "taking turns")
        print("\n".join(" | ".join(row.cells()) for row in without), flush=True)
        rows += without
    return rows


def _hurt(rig: Rig, how: str) -> list[Row]:
    rows: list[Row] = []
    steps: tuple[Callable[[], list[Row]], ...] = (
        lambda: [stopped_row(rig)],
        lambda: killed_row(rig, "killed", "processes"),
        lambda: [torchrun_row(rig)],
    )
    for step in steps:
        made = step()
        print("\n".join(" | ".join(row.cells()) for row in made), flush=True)
        rows += made
    return rows


def table(rows: Sequence[Row]) -> str:
    head = ("case", "ranks", "", "largest difference", "what was seen")
    lines = [head, tuple("---" for _ in head), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
