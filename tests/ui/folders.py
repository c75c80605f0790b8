"""Run folders as a long run would leave them, written in seconds."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from windlass.runfolder import RunFolder
from windlass.spec import dump_run, load_run

BEGAN = 1_790_000_000.0
RUN_FILE = """\
name: {name}
model: {{preset: llama-tiny}}
data: {{source: 'corpus:austen', sequence_length: 32}}
train: {{steps: {steps}, global_batch: 4, precision: fp32, learning_rate: {rate}}}
resources: {{gpus_per_node: 0, processes_per_node: 2}}
"""


def write_run(
    root: Path, name: str, *, steps: int = 100, ranks: int = 2, rate: float = 3e-4, slow_rank: int | None = None
) -> RunFolder:
    """A finished run of one attempt, with a save every tenth of it."""
    folder = RunFolder(root / name)
    folder.logs.mkdir(parents=True)
    source = root / f"{name}.yaml"
    source.write_text(RUN_FILE.format(name=name, steps=steps, rate=rate))
    folder.run_file.write_text(dump_run(load_run(source)))
    source.unlink()
    write_metrics(folder, steps, ranks, slow_rank, rate)
    saves = range(max(1, steps // 10), steps + 1, max(1, steps // 10))
    events = [{"time": BEGAN, "event": "launched", "attempt": 1}]
    events += [{"time": BEGAN + 1, "event": "started", "attempt": 1, "world_size": ranks, "step": 0}]
    events += [{"time": BEGAN + step, "event": "checkpoint", "step": step, "seconds": 1.0} for step in saves]
    events += [{"time": BEGAN + steps, "event": "finished", "step": steps, "loss": 2.0}]
    events += [{"time": BEGAN + steps + 1, "event": "exit", "state": "finished", "code": 0, "reason": None}]
    write_lines(folder.history, events)
    for rank in range(ranks):
        line = f"2026-09-21T14:13:{rank % 60:02d} rank {rank} INFO ready on node-{rank // 8}\n"
        folder.rank_log(rank).write_text(line)
    return folder


def write_metrics(folder: RunFolder, steps: int, ranks: int, slow_rank: int | None, peak_rate: float) -> None:
    noise = random.Random(1)
    drawn = [noise.gauss(0, 1) for _ in range(997)]  # of 100,000 steps each would take long
    lines = []
    for step in range(1, steps + 1):
        one, other = drawn[step % 997], drawn[step * 7 % 997]
        loss = (
            11.5 if step == steps // 3 else 2 + 6 / (1 + step * peak_rate / 0.09) + 0.03 * one
        )  # a peak, one step wide
        rate = peak_rate * min(1.0, step / 100) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        lines.append(
            f'{{"kind":"step","step":{step},"steps":{steps},"loss":{loss},"grad_norm":{abs(0.8 + 0.2 * other)},'
            f'"learning_rate":{rate},"tokens":{step * 4_194_304},"tokens_per_s":{4_194_304 + 40_000 * one:.1f},'
            f'"tokens_per_s_per_gpu":4096.0,"mfu":{0.42 + 0.004 * one:.4f},"step_s":1.0,'
            f'"data_s":{abs(0.002 * other):.6f},'
            f'"checkpoint_s":{0.8 if step % 1000 == 0 else 0.0},"memory_gib":61.25,"epoch":{step / steps:.4f},'
            f'"attempt":1,"time":{BEGAN + step}}}'
        )
        if step % max(1, steps // 20) == 0:
            validation = {"kind": "validation", "step": step, "loss": loss + 0.1, "perplexity": 9.0, "accuracy": 0.5}
            lines.append(json.dumps({**validation, "sequences": 8, "tokens": 256, "attempt": 1, "time": BEGAN + step}))
        if step % max(1, steps // 500) == 0:
            lines.append(json.dumps(_ranks_record(step, noise, ranks, slow_rank if step > steps // 2 else None)))
    folder.metrics.write_text("\n".join(lines) + "\n")


def _ranks_record(step: int, noise: random.Random, ranks: int, slow_rank: int | None) -> dict:
    """As the trainer writes it: of more than 64 ranks the slowest few."""
    listed = range(ranks) if ranks <= 64 else sorted({noise.randrange(ranks) for _ in range(7)} | {slow_rank or 0})
    rows = []
    for rank in listed:
        behind_s = 0.7 if rank == slow_rank else abs(noise.gauss(0, 0.01))
        row = {"rank": rank, "host": f"node-{rank // 8}", "step_s": 1.0, "data_s": 0.0, "behind_s": behind_s}
        rows.append(row)
    slow = [slow_rank] if slow_rank is not None else []
    record = {"kind": "ranks", "step": step, "steps": 10, "held_up_s": 0.0, "slow": slow, "ranks": rows}
    return {**record, "attempt": 1, "time": BEGAN + step}


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
