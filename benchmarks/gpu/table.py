"""Rows as a Markdown table, with what its numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.points import POINTS
from benchmarks.gpu.rows import Row

CONVENTIONS = (
    "Median over timed steps (windlass: over windows of 5 steps from its metrics.jsonl; the others: CUDA events), "
    "random tokens, fp32 masters, bf16 compute, AdamW, clip 1.0, no activation checkpointing, one process each. "
    "MFU: 6 FLOPs per matrix weight and token plus causal attention, against the dense bf16 peak (H200: 989 TFLOP/s), "
    "fp8 too. Peak: torch.cuda.max_memory_allocated. Ratio: to torchtitan, of fp8 contestants to torchtitan-fp8, "
    "at LoRA points to peft-compiled. First step: from the start of a process to the end of its first step. "
    "torchtitan has no tied embeddings: at 1B and 3B it holds and updates a second embedding matrix (FLOPs alike)."
)
HEADER = (
    "| point | contestant | tokens/s | step ms: median (min..max) | MFU | peak GiB | ÷ peer | first step s | loss |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Row]) -> str:
    """Grouped by point, in the order they were measured."""
    speeds = {(row.point, row.contestant): row.tokens_per_s for row in rows if row.error is None}
    points = list(dict.fromkeys(row.point for row in rows))
    lines = [line(row, speeds) for point in points for row in rows if row.point == point]
    return "\n".join([HEADER, *lines])


def line(row: Row, speeds: dict[tuple[str, str], float]) -> str:
    start = f"| {POINTS[row.point].title} | {row.contestant} "
    if row.error is not None:
        return f"{start}| failed: {row.error.replace('|', '/')[:160]} | | | | | | |"
    peer = "peft-compiled" if POINTS[row.point].lora else "torchtitan"
    base = speeds.get((row.point, "torchtitan-fp8" if "-fp8" in row.contestant else peer))
    ratio = f"{row.tokens_per_s / base:.3f}" if base else ""
    mfu = f"{row.mfu:.1%}" if row.mfu is not None else ""
    times = f"{row.median_s * 1e3:.1f} ({row.min_s * 1e3:.1f}..{row.max_s * 1e3:.1f})"
    first = f"{row.first_step_s:.1f}" if row.first_step_s is not None else ""
    loss = f"{row.loss:.3f}" if row.loss is not None else ""
    return f"{start}| {row.tokens_per_s:,.0f} | {times} | {mfu} | {row.peak_gib:.1f} | {ratio} | {first} | {loss} |"
