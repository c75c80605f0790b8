"""Step times of the tiny presets on the CPU against a plain transformers loop: same model, batch and threads.

A shared machine is a quarter slower for half a minute now and then. So both run side by side and are stopped in turn,
every second or so: each pair of turns meets the same machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runs import trainer_command
from windlass.common.files import read_json_lines

PRESETS = ("llama-tiny", "llama3.2-tiny", "mistral-tiny", "mixtral-tiny")
BATCH, LENGTH, WARMUP = 8, 256, 4
PAIRS, STEPS_PER_TURN = 15, 10
PATIENCE_S = 120.0
FOREVER = 10**6  # steps: contestants are ended when enough was seen


@dataclass(frozen=True)
class Step:
    end: float  # seconds since the epoch
    seconds: float


class Contestant:
    """A loop in a process group of its own, which can be stopped and ended; what it says goes to a file."""

    def __init__(self, command: list[str], metrics: Path, said: Path, environment: dict[str, str]) -> None:
        self.metrics, self.said = metrics, said
        with said.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def steps(self) -> list[Step]:
        if self.process.poll() is not None:
            raise RuntimeError(
                f"{self.process.args} ended with {self.process.returncode}:\n{self.said.read_text()[-2000:]}"
            )
        return [Step(one["time"], one["step_s"]) for one in read_json_lines(self.metrics) if one.get("kind") == "step"]

    def warm_up(self) -> None:
        """Let it take its first steps, then stop it."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.steps()) < WARMUP:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args} took no {WARMUP} steps in {PATIENCE_S:.0f} s")
            time.sleep(0.1)
        os.killpg(self.process.pid, signal.SIGSTOP)

    def turn(self, seconds: float) -> float:
        """The median step while only this one runs, and nobody looks; what was stopped on its way does not count."""
        begin = time.time()
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(seconds)
        os.killpg(self.process.pid, signal.SIGSTOP)
        whole = [one.seconds for one in self.steps() if one.end - one.seconds > begin]
        if not whole:
            raise RuntimeError(f"{self.process.args} took no whole step in {seconds:.1f} s: is the machine busy?")
        return statistics.median(whole)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def plain_loop(preset: str, threads: int, metrics: Path) -> None:
    """The loop a user would write."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from windlass.catalog.models import presets

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    values = dict(presets()[preset].config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FOREVER)
    data = torch.utils.data.DataLoader(
        torch.randint(0, config.vocab_size, (100 * BATCH, LENGTH)), batch_size=BATCH, shuffle=True
    )
    with metrics.open("w") as file:
        began = time.perf_counter()
        while True:
            for tokens in data:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                loss.item()
                now = time.perf_counter()
                print(json.dumps({"kind": "step", "time": time.time(), "step_s": now - began}), file=file, flush=True)
                began = now


@contextlib.contextmanager
def contestants(folder: Path, preset: str, threads: int) -> Iterator[tuple[Contestant, Contestant]]:
    run = {
        "name": preset.replace(".", "-"),
        "model": {"preset": preset},
        "data": {"source": "corpus:austen", "sequence_length": LENGTH},
        "train": {"steps": FOREVER, "global_batch": BATCH, "precision": "fp32"},
        "checkpoint": {"every": FOREVER},
    }
    started: list[Contestant] = []
    try:
        found, command, environment = trainer_command(folder, run, threads=threads)
        started.append(Contestant(command, found.metrics, folder / "windlass.log", environment))
        started[-1].warm_up()  # alone: two at once take turns on the same cores by themselves, very slowly
        plain = folder / "plain.jsonl"
        command = [sys.executable, "-m", "benchmarks.training", preset, str(threads), str(plain)]
        started.append(Contestant(command, plain, folder / "plain.log", dict(os.environ)))
        started[-1].warm_up()
        yield started[0], started[1]
    finally:
        for one in started:
            one.end()


def compare(preset: str, threads: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="windlass-bench-") as name,
        contestants(Path(name), preset, threads) as (ours, theirs),
    ):
        seconds = STEPS_PER_TURN * max(one.steps()[-1].seconds for one in (ours, theirs))
        pairs = [(ours.turn(seconds), theirs.turn(seconds)) for _ in range(PAIRS)]
    ratios = sorted(plain / own for own, plain in pairs)
    tokens = BATCH * LENGTH
    return {
        "windlass_tokens_per_s": round(tokens / statistics.median(own for own, _ in pairs)),
        "plain_tokens_per_s": round(tokens / statistics.median(plain for _, plain in pairs)),
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(ratios[len(ratios) // 4], 3), round(ratios[-1 - len(ratios) // 4], 3)],
    }


def measure() -> dict[str, Any]:
    found = {preset: compare(preset, os.cpu_count() or 1) for preset in PRESETS}
    return {"lowest": min(one["ratio"] for one in found.values()), **found}


if __name__ == "__main__":
    plain_loop(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
