"""Whether numbers stay right where training is fast: loss curves held against a plain fp32 loop and each other.

`python -m benchmarks.gpu.curves`. Every curve is the real trainer in a process of its own, on the same tokens, from the
same first weights; those are made here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.contestants.own import reason
from benchmarks.gpu.curves_cases import GPU, GROUPS, TINY, Case, Group, Size
from benchmarks.gpu.curves_start import packed_shards, write_start
from benchmarks.gpu.curves_verdicts import Outcome, Row, judge, table
from benchmarks.gpu.machine import describe, gpu_state
from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder, steps_of
from windlass.trainer.distributed.faults import VARIABLE as FAULTS

ROOT = Path(__file__).resolve().parents[2]
KILLED_AT = 10  # the step whose checkpoint has just become complete
# What a launcher says about ranks: these runs are worlds of one, each with a port of its own.
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FAULTS)


@dataclass(frozen=True)
class Plan:
    """What is run, in this order, and what for."""

    size: Size
    on_gpu: bool
    groups: tuple[Group, ...]

    def cases(self) -> list[tuple[Case, int]]:
        """With the steps of each."""
        return [(case, group.steps(self.size)) for group in self.groups for case in group.cases]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    begin = time.monotonic()
    on_gpu = has_gpu()
    size = TINY if options.tiny or not on_gpu else GPU
    plan = Plan(replace(size, steps=options.steps or size.steps), on_gpu, chosen(options.only, options.names))
    before = gpu_state()
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="windlass-curves-") as folder:
        workshop = Workshop(Path(folder), plan, deadline=begin + options.time_limit, options=options)
        pool = ThreadPoolExecutor(workshop.at_once)
        try:
            running = {pool.submit(workshop.outcome, case, steps): case for case, steps in plan.cases()}
            for done in as_completed(running):
                outcomes[running[done].name] = result(done)
                rows = verdicts(plan, outcomes)
                tell(running[done].name, rows, time.monotonic() - begin)
                if options.out:
                    write_results(options.out, rows, plan, before)
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C reaches the trainers too; nothing is begun after it
    rows = verdicts(plan, outcomes)
    print(f"{plan.size.title}, {plan.size.steps} steps; {describe(before)}; {time.monotonic() - begin:.0f} s in all\n")
    print(table(rows), flush=True)
    return 0 if all(row.good for row in rows) else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [case.name for group in GROUPS for case in group.cases]
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.curves", description=__doc__)
    parser.add_argument("--only", choices=[group.name for group in GROUPS])
    parser.add_argument("--names", help=f"some of {','.join(names)}; what they are compared with is run too")
    parser.add_argument("--steps", type=int, help="of a curve")
    parser.add_argument("--tiny", action="store_true", help="the sizes of a machine without a GPU")
    parser.add_argument("--at-once", type=int, help="runs at the same time; 4 on a GPU, else 1")
    parser.add_argument("--time-limit", type=float, default=520.0, help="seconds; what has not begun by then is a row")
    parser.add_argument("--run-limit", type=float, default=180.0, help="seconds of one process")
    parser.add_argument("--out", type=Path, help="write all numbers here as JSON, after every row")
    parser.add_argument("--logs", type=Path, help="keep what each run said in this folder")
    options = parser.parse_args(arguments)
    there = [case.name for group in GROUPS if options.only in (None, group.name) for case in group.cases]
    if unknown := set((options.names or there[0]).split(",")) - set(there):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(there)}")
    return options


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def chosen(only: str | None, names: str | None) -> tuple[Group, ...]:
    """The groups, with the cases that are asked for and those they are compared with."""
    groups = [group for group in GROUPS if only in (None, group.name)]
    if not names:
        return tuple(groups)
    wanted = set(names.split(","))
    cases = {case.name: case for group in groups for case in group.cases}
    waiting = list(wanted & cases.keys())
    while waiting:
        case = cases[waiting.pop()]
        needed = {*case.peers, *([case.against] if case.against else [])} - wanted
        wanted |= needed
        waiting += needed
    return tuple(Group(group.name, tuple(case for case in group.cases if case.name in wanted)) for group in groups)


class Workshop:
    """Runs cases, each in a process of its own."""

    def __init__(self, folder: Path, plan: Plan, *, deadline: float, options: argparse.Namespace) -> None:
        self.folder, self.plan, self.deadline = folder.resolve(), plan, deadline
        self.run_limit: float = options.run_limit
        self.at_once: int = options.at_once or (4 if plan.on_gpu else 1)
        self.logs = options.logs or self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.start = write_start(self.folder / "start", plan.size)

    def outcome(self, case: Case, steps: int) -> Outcome:
        if case.gpu_only and not self.plan.on_gpu:
            return Outcome(skipped=f"only on CUDA: {case.gpu_only}")
        begin = time.monotonic()
        if begin > self.deadline:
            return Outcome(error="not started: the time is over")
        try:
            losses, norms = zip(*self.numbers(case, steps), strict=True)
            outcome = Outcome(losses=losses, norms=norms)
        except (RuntimeError, OSError, ValueError) as error:
            outcome = Outcome(error=str(error))
        return replace(outcome, seconds=time.monotonic() - begin)

    def numbers(self, case: Case, steps: int) -> list[tuple[float, float]]:
        """(loss, gradient norm) of every step."""
        run_file = self.folder / f"{case.name}.yaml"  # its name is the run's
        start = dict(self.start)
        if case.packed:
            source = packed_shards(Path(start["data"]["source"]))
            start["data"] = start["data"] | {"source": str(source), "document_mask": True}
        run_file.write_text(yaml.safe_dump(start | run_values(self.plan.size, steps)))
        if case.kind == "plain":
            out = self.folder / f"{case.name}.json"
            self.call(case.name, "benchmarks.gpu.curves_reference", str(run_file), f"--out={out}")
            return [(loss, norm) for loss, norm in json.loads(out.read_text())]
        trainer = ["windlass.trainer", str(run_file), *(self.plan.size.fast if case.fast else ()), *case.overrides]
        run_folder = RunFolder(self.folder / "runs" / case.name)
        if case.kind == "killed":
            fault = f"kill:step={KILLED_AT},point=save.published"
            self.call(case.name, *trainer, expected=-9, environment={FAULTS: fault})
        self.call(case.name, *trainer, environment={"WINDLASS_ATTEMPT": "2"} if case.kind == "killed" else {})
        if case.kind == "killed":
            check_resumed(run_folder)
        records = steps_of(run_folder)
        if sorted(records) != list(range(1, steps + 1)):
            raise RuntimeError(f"metrics.jsonl has {len(records)} of {steps} steps")
        return [(records[step]["loss"], records[step]["grad_norm"]) for step in sorted(records)]

    def call(self, name: str, *module: str, expected: int = 0, environment: dict[str, str] | None = None) -> None:
        """Run a module to its end; RuntimeError with its last error line if that is not the end expected."""
        log = self.logs / f"{name}.log"
        with log.open("a") as file:
            said_before = file.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                env=self.environment() | (environment or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(timeout=self.run_limit)
                end = f"exit code {code}"
            except subprocess.TimeoutExpired:
                process.kill()
                code, end = process.wait(), f"stopped after {self.run_limit:.0f} s"
        if code != expected or "stopped" in end:
            said = log.read_bytes()[said_before:].decode(errors="replace")
            raise RuntimeError(f"{end}: {reason(said.splitlines(keepends=True))}")

    def environment(self) -> dict[str, str]:
        cache = Path(tempfile.gettempdir()) / "windlass-bench-gpu" / "inductor"  # the one of benchmarks.gpu
        threads = max(1, (os.cpu_count() or 1) // self.at_once)
        inherited = {key: value for key, value in os.environ.items() if key not in OF_LAUNCHERS}
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            # The defaults are a thread and a compiler per core, for each of the runs that go on at the same time.
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "WINDLASS_RUNS": str(self.folder / "runs"),
            "WINDLASS_CACHE": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }


def run_values(size: Size, steps: int) -> dict[str, Any]:
    """All but the model and the data. Explicit where the plain loop does it too."""
    return {
        "train": {
            "steps": steps,
            "global_batch": size.batch,
            "micro_batch": size.batch,
            "learning_rate": size.learning_rate,
            "schedule": "cosine",
            "warmup_steps": max(1, steps // 10),
            "weight_decay": 1.0,  # ten times the usual: 200 steps would hardly show it
            "beta1": 0.9,
            "beta2": 0.95,
            "grad_clip": 1.0,
        },
        "checkpoint": {"every": 10 * steps, "at_end": False},
    }


def check_resumed(folder: RunFolder) -> None:
    """A run that began anew would have the right losses too."""
    resumed = [record["step"] for record in read_json_lines(folder.history) if record["event"] == "resumed"]
    if resumed != [KILLED_AT]:
        raise RuntimeError(f"it should have gone on from step {KILLED_AT}, and did from {resumed or 'none'}")


def result(done: Future[Outcome]) -> Outcome:
    error = done.exception()
    return Outcome(error=f"{type(error).__name__}: {error}") if error else done.result()


def verdicts(plan: Plan, outcomes: dict[str, Outcome]) -> list[Row]:
    """Of what is done so far, in the order of the plan."""
    return [judge(case, outcomes) for case, _ in plan.cases() if case.name in outcomes]


def tell(name: str, rows: Sequence[Row], seconds: float) -> None:
    row = next(row for row in rows if row.name == name)
    end = f"loss {row.losses[0]:.4f} → {row.losses[-1]:.4f}" if row.losses else f"{row.verdict}: {row.why}"
    print(f"{seconds:5.0f} s  {name}: {end}, {row.seconds:.0f} s", file=sys.stderr, flush=True)


def write_results(path: Path, rows: Sequence[Row], plan: Plan, before: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = {"title": plan.size.title, "steps": plan.size.steps, "config": plan.size.config()}
    path.write_text(json.dumps({"gpu": before, "size": size, "rows": [row.as_dict() for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
