"""The simulator against reality: real faults, the time they cost, and what the simulator says of the same faults.

    python -m benchmarks.goodput_real --on local --faults 30    two ranks on this machine; ranks are killed
    python -m benchmarks.goodput_real --on box --faults 30      the tests' cluster (root); ranks and pods are killed

A run is hurt at random moments. The first quarter of the faults measures what one costs: detection, start, steps and
saves; that is written to inputs.json before the others come. The simulator then replays the moments of the others with
it; exit code 1 where the time lost differs by more than a quarter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from benchmarks.goodput_simulator import Job, Strategy, replay
from windlass.common.files import append_json_line, read_json_lines
from windlass.diagnose.decision import Policy
from windlass.goodput.accounting import Account, StepTime, account, read_metrics
from windlass.goodput.model import Cause, Tier
from windlass.runfolder import RunFolder
from windlass.targets.launch import processes

EVERY = 40  # steps between two checkpoints
TOLERANCE = 0.25
FAULTS, INPUTS = "faults.jsonl", "inputs.json"
PATIENCE_S = 600.0
ROOT = Path(__file__).parents[1]
TRAINING: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "data": {"source": "corpus:austen", "sequence_length": 32},
    "train": {"steps": 10_000_000, "global_batch": 6, "precision": "fp32"},
    "checkpoint": {"every": EVERY},
}
RESTARTS = 1000  # a fault may come before the first checkpoint
RANK_KILLED = Cause("killed rank", 1, "node_lost", "crash")
POD_KILLED = Cause("killed pod", 1, "node_lost", "silence", breaks_node=True, names_node=True)


class Place(Protocol):
    @property
    def kinds(self) -> Sequence[Cause]: ...
    def running(self, name: str) -> Any: ...  # a context: the run trains; its folder
    def hurt(self, folder: RunFolder, cause: Cause) -> None: ...


class Local:
    """Two ranks of this machine under the real supervisor."""

    kinds = (RANK_KILLED,)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "WINDLASS_RUNS": str(folder / "runs")}

    @contextmanager
    def running(self, name: str) -> Iterator[RunFolder]:
        file = self.folder / "real.yaml"
        resources = {"gpus_per_node": 0, "processes_per_node": 2, "threads_per_process": 1}
        file.write_text(yaml.safe_dump({**TRAINING, "resources": resources, "target": {"max_restarts": RESTARTS}}))
        self._windlass("run", file, f"name={name}", "--detach", "--yes")
        try:
            yield RunFolder(self.folder / "runs" / name)
        finally:
            self._windlass("stop", name, "--now")

    def hurt(self, folder: RunFolder, cause: Cause) -> None:
        ranks = [pid for pid in processes.processes_of(folder.path) if "RANK" in processes.environment(pid)]
        os.kill(max(ranks), signal.SIGKILL)

    def _windlass(self, *arguments: Any) -> None:
        command = [sys.executable, "-m", "windlass.cli.main", *map(str, arguments)]
        subprocess.run(command, env=self.environment, cwd=self.folder, check=True, capture_output=True)


class Box:
    """Two pods of the cluster that the tests start."""

    kinds = (RANK_KILLED, POD_KILLED)

    def __init__(self, folder: Path) -> None:
        from tests.cluster.bench import TRAINING as PODS
        from tests.cluster.bench import Bench
        from tests.cluster.box import host
        from tests.cluster.box.cluster import Cluster, Session
        from tests.cluster.box.layout import KUBECONFIG

        self.session = Session()
        self.session.start()
        self.cluster = Cluster(KUBECONFIG, box=True)
        self.folder, self.make_bench, self.kill_processes = folder, Bench, host.kill_pod
        self.sections = {**TRAINING, "resources": {**PODS["resources"], "nodes": 2}, "parallel": PODS["parallel"]}

    @contextmanager
    def running(self, name: str) -> Iterator[RunFolder]:
        with self.cluster.namespace() as namespace:
            self.bench = self.make_bench(self.cluster, namespace, self.folder / name)
            file = self.bench.write(self.folder / name / "real.yaml", **self.sections)
            options = (f"name={name}", f"target.max_restarts={RESTARTS}", "target.kubernetes.job=pytorchjob")
            with self.bench.following("run", file, *options, "target.kubernetes.max_pod_failures=1000"):
                yield self.bench.run_folder(name)
                self.bench.windlass("stop", name, "--now")

    def hurt(self, folder: RunFolder, cause: Cause) -> None:
        selector = f"windlass.dev/run={folder.name}"
        pods = self.cluster.get("pods", namespace=self.bench.namespace, selector=selector)["items"]
        metadata = max((pod["metadata"] for pod in pods), key=lambda pod: str(pod["name"]))
        pod = metadata["name"]
        if cause is POD_KILLED:
            # as with its node: a deletion alone begins with SIGTERM, and the ranks would save
            self.kill_processes(metadata["uid"])
            flags = ("--grace-period=0", "--force", "--wait=false")
            self.cluster.kubectl("delete", "pod", pod, "-n", self.bench.namespace, *flags)
            return
        # not RANK: Kubeflow's operator sets it for every process of the pod
        kill = "for p in /proc/[0-9]*; do grep -qz ^LOCAL_RANK= $p/environ && kill -9 ${p#/proc/} && exit; done"
        self.cluster.kubectl("exec", "-n", self.bench.namespace, pod, "--", "sh", "-c", kill)


@dataclass(frozen=True)
class Campaign:
    """A run and the faults that it met: each ends an attempt."""

    folder: RunFolder
    faults: Sequence[tuple[float, Cause]]  # when

    @property
    def steps(self) -> list[StepTime]:
        return [step for step in read_metrics(self.folder.metrics) if isinstance(step, StepTime)]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in read_json_lines(self.folder.history) if record.get("event") == name]

    def account(self) -> Account:
        return account(read_json_lines(self.folder.history), read_metrics(self.folder.metrics))

    def trained_before_each(self, step_s: float) -> list[tuple[float, Cause]]:
        """From the begin of an attempt's first step to the fault that ended it."""
        steps = self.steps
        begins = [0.0, *(when for when, _ in self.faults)]
        firsts = [next(step.time for step in steps if step.time > begin) for begin in begins[:-1]]
        return [
            (max(0.0, when - first + step_s), cause) for first, (when, cause) in zip(firsts, self.faults, strict=True)
        ]

    def costs(self) -> list[dict[str, float]]:
        """Seconds that each fault cost: noticed at the end of its attempt, made up for in the next one."""
        attempts = [attempt.parts for attempt in self.account().attempts]
        if len(attempts) <= len(self.faults):
            raise RuntimeError(f"{len(self.faults)} faults, {len(attempts)} attempts: one did not end its attempt")
        return [
            {
                "detection": before["detection"],
                "restart": after["restart"] + after["compile"],
                "repeated": after["repeated"],
            }
            for before, after in itertools.pairwise(attempts)
        ][: len(self.faults)]


def hurt_often(
    place: Place, kept: Path, calibrating: int, predicted: int, *, mean_s: float, draw: random.Random
) -> None:
    causes = [place.kinds[index % len(place.kinds)] for index in range(calibrating + predicted)]
    faults: list[tuple[float, Cause]] = []
    with place.running("real") as folder:
        campaign = Campaign(folder, faults)
        for number, cause in enumerate(causes):
            wait(lambda: trains_again(campaign), f"fault {number}: training")
            if number == calibrating:
                write_inputs(kept, measured_job(campaign))
            time.sleep(min(draw.expovariate(1 / mean_s), 4 * mean_s))
            faults.append((time.time(), cause))
            place.hurt(folder, cause)
            append_json_line(kept / FAULTS, {"time": faults[-1][0], "cause": cause.name, "run": str(folder.path)})
            print(f"fault {number + 1} of {len(causes)}: {cause.name}", flush=True)
        furthest = max(step.step for step in campaign.steps)
        wait(lambda: any(step.step > furthest for step in campaign.steps), "the end")


def trains_again(campaign: Campaign) -> bool:
    after = campaign.faults[-1][0] if campaign.faults else 0.0
    resumed = [record for name in ("started", "resumed") for record in campaign.events(name) if record["time"] > after]
    return bool(resumed) and any(step.time > resumed[-1]["time"] for step in campaign.steps)


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(0.2)


def measured_job(campaign: Campaign) -> Job:
    """What a fault costs where these happened."""
    costs, saves = campaign.costs(), campaign.events("checkpoint")

    def mean(cause: Cause, part: str) -> float:
        chosen = [cost[part] for cost, (_, kind) in zip(costs, campaign.faults, strict=True) if kind is cause]
        return statistics.fmean(chosen) if chosen else 0.0

    crash_s = mean(RANK_KILLED, "restart")
    tier = Tier(
        "shared",
        stall_s=statistics.fmean(save["stall_s"] for save in saves),
        write_s=statistics.fmean(save["seconds"] for save in saves),
        restore_s=0.0,  # within the start
        share=1.0,
    )
    return Job(
        gpus=8,
        causes=(RANK_KILLED, POD_KILLED),
        rate_per_gpu=0.0,
        step_s=mean_step_s(campaign),
        tiers=[tier],
        every={"shared": EVERY},
        detection_s={"crash": mean(RANK_KILLED, "detection"), "silence": mean(POD_KILLED, "detection")},
        start_s=max(0.0, crash_s - Policy().backoff_seconds),
        swap_s=max(0.0, mean(POD_KILLED, "restart") - crash_s),
    )


def mean_step_s(campaign: Campaign) -> float:
    """From one step to the next of the same attempt, saves left out."""
    begins = [record["time"] for name in ("started", "resumed") for record in campaign.events(name)]
    gaps = [
        after.time - before.time - after.stall_s
        for before, after in itertools.pairwise(campaign.steps)
        if after.step == before.step + 1 and not any(before.time < begin < after.time for begin in begins)
    ]
    return statistics.fmean(gaps)


def write_inputs(kept: Path, job: Job) -> None:
    """The prediction's inputs, on disk before what they predict has happened."""
    (kept / INPUTS).write_text(json.dumps(asdict(job), indent=2) + "\n")


def read_inputs(kept: Path) -> Job:
    value = json.loads((kept / INPUTS).read_text())
    tiers = [Tier(**tier) for tier in value.pop("tiers")]
    return Job(**{**value, "tiers": tiers, "causes": (RANK_KILLED, POD_KILLED)})


def predict(job: Job, campaign: Campaign) -> list[dict[str, float]]:
    # a pod that is lost is replaced at once, as by a spare
    strategy = Strategy("real", Policy(restarts=RESTARTS), spares=10**6)
    return [
        {
            "detection": lost["detection"],
            "restart": lost["restart"] + lost["waiting"],
            "repeated": lost["repeated"],
        }
        for lost in replay(job, strategy, campaign.trained_before_each(job.step_s))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["local", "box"], default="local")
    parser.add_argument("--faults", type=int, default=30, help="that are predicted; a third as many come beside them")
    parser.add_argument("--mean", type=float, default=8.0, help="mean seconds of training before a fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the run there")
    parser.add_argument("--report", action="store_true", help="of the faults so far that --folder holds")
    options = parser.parse_args()
    calibrating = options.faults // 3
    folder = options.folder or Path(tempfile.mkdtemp(prefix="windlass-goodput-"))
    if not options.report:
        folder.mkdir(parents=True, exist_ok=True)
        place: Place = Local(folder) if options.on == "local" else Box(folder)
        draw = random.Random(options.seed)
        hurt_often(place, folder, calibrating, options.faults, mean_s=options.mean, draw=draw)
    return report(folder, calibrating)


def report(folder: Path, calibrating: int) -> int:
    records = list(read_json_lines(folder / FAULTS))
    kinds = {cause.name: cause for cause in (RANK_KILLED, POD_KILLED)}
    faults = [(record["time"], kinds[record["cause"]]) for record in records]
    folder_of_run = RunFolder(Path(records[0]["run"]))
    attempts = Campaign(folder_of_run, []).account().attempts
    trained = sum(bool(attempt.parts["training"] or attempt.parts["repeated"]) for attempt in attempts)
    campaign = Campaign(folder_of_run, faults[: trained - 1])  # of one that was broken off, those that were made up for
    job = read_inputs(folder)
    predicted, measured = predict(job, campaign), campaign.costs()
    others = range(calibrating, len(campaign.faults))
    print(f"\n{len(others)} faults, {calibrating} before them to calibrate; seconds lost:")
    print(f"{'':<12}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    for part in ("detection", "restart", "repeated"):
        print_row(part, sum(predicted[index][part] for index in others), sum(measured[index][part] for index in others))
    whole = sum(sum(predicted[index].values()) for index in others)
    real = sum(sum(measured[index].values()) for index in others)
    print_row("all", whole, real)
    figures: dict[str, Any] = {"faults": len(others), "predicted_s": round(whole, 1), "measured_s": round(real, 1)}
    figures |= {"step_s": job.step_s, "start_s": job.start_s, "detection_s": dict(job.detection_s)}
    print(json.dumps(figures | {"goodput": campaign.account().goodput}))
    return 0 if abs(whole / real - 1) <= TOLERANCE else 1


def print_row(name: str, predicted: float, measured: float) -> None:
    ratio = f"{predicted / measured:.2f}" if measured else "–"
    print(f"{name:<12}{predicted:>12.1f}{measured:>12.1f}{ratio:>8}")


if __name__ == "__main__":
    sys.exit(main())
