"""`python -m tests.gpu.layouts`: tensor, context and expert layouts on GPUs against one rank, as a table.

The ranks of a group train all of its runs in one process group: torch 2.11 splits no NCCL group of a world made anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.cases import BF16, EXPERTS, FP32, TINY, Case, Tolerance
from tests.gpu.machine import environment, free_port, side_by_side, why_not
from tests.gpu.runner import Rig, furthest
from windlass.data.tokenizers.tokenizer import load_tokenizer

LLAMA = {"preset": "llama3.2-tiny", "config": TINY}
FAMILY = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024}
HYBRID = {"sharding": "hybrid", "shard_group": 2}
TENSOR, CONTEXT, EXPERT = {"tensor": 2}, {"context": 2}, {"expert": 2}
DENSE_FP32 = {
    2: [TENSOR, CONTEXT],
    4: [TENSOR, CONTEXT, TENSOR | HYBRID, CONTEXT | HYBRID, TENSOR | CONTEXT],
}
RECOMPUTED = {"activation_checkpointing": "full"}
COMPILED = {"train.precision": "bf16", "train.compile": True}
Layouts = dict[int, list[dict[str, Any]]]
# (what, model or the configuration of one, other changes, tolerance, layouts by number of ranks)
KINDS: list[tuple[str, dict[str, Any], dict[str, Any], Tolerance, Layouts]] = [
    ("llama-fp32", LLAMA, {}, FP32, DENSE_FP32),
    ("qwen3-fp32", {**FAMILY, "model_type": "qwen3"}, {}, FP32, DENSE_FP32),
    ("qwen2-fp32", {**FAMILY, "model_type": "qwen2"}, {}, FP32, {2: [TENSOR], 4: [TENSOR]}),
    (
        "mixtral-fp32",
        EXPERTS,
        {},
        FP32,
        {
            2: [EXPERT, TENSOR, CONTEXT],
            4: [EXPERT, EXPERT | HYBRID, TENSOR | {"expert": 4}, CONTEXT | EXPERT | HYBRID],
        },
    ),
    (
        "qwen3_moe-fp32",
        {**FAMILY, "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
        {},
        FP32,
        {2: [EXPERT]},
    ),
    (
        "llama-bf16",
        LLAMA,
        COMPILED,
        BF16,
        {
            2: [TENSOR | {"activation_checkpointing": "selective"}, CONTEXT],
            4: [TENSOR | {"activation_checkpointing": "attention"}, TENSOR | HYBRID, CONTEXT | HYBRID],
        },
    ),
    (
        "qwen3-bf16",
        {**FAMILY, "model_type": "qwen3"},
        COMPILED,
        BF16,
        {2: [TENSOR, CONTEXT], 4: [TENSOR, CONTEXT, TENSOR | HYBRID]},
    ),
    (
        "mixtral-bf16",
        EXPERTS,
        COMPILED,
        BF16,
        {2: [EXPERT, EXPERT | RECOMPUTED], 4: [TENSOR | RECOMPUTED, EXPERT, EXPERT | HYBRID]},
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.layouts", description=__doc__)
    parser.add_argument("--keep", type=Path, default=None)
    root = parser.parse_args().keep or Path(tempfile.mkdtemp(prefix="windlass-layouts-"))
    obstacle = why_not(4)
    if obstacle:
        print(f"skipped: {obstacle}")
        return 0
    rig = Rig(root)
    groups: dict[int, list[Path]] = {1: [], 2: [], 4: []}
    rows = []
    for kind, model, changes, tolerance, layouts in KINDS:
        case = Case(kind, tolerance, changes={"model": _named(root, kind, model), **changes})
        single = case.run(rig.corpus, 1, name=kind)
        groups[1].append(rig.write(single))
        for ranks, parallels in layouts.items():
            for parallel in parallels:
                says = " ".join(f"{key}={value}" for key, value in parallel.items())
                run = case.run(rig.corpus, ranks, name=f"{kind}-{ranks}-{len(rows)}")
                run["parallel"] |= parallel
                groups[ranks].append(rig.write(run))
                rows.append((kind, ranks, says, run["name"], tolerance))
    with side_by_side(root / "mps", 4) as how:
        print(how, flush=True)
        processes = [process for ranks, files in groups.items() for process in _start(rig, ranks, files)]
        for process in processes:
            process.wait(timeout=400)
    failed = 0
    print("| run | ranks | layout | loss differs by | norm by | |\n|---|---|---|---|---|---|")
    for kind, ranks, says, name, (loss_limit, norm_limit) in rows:
        losses, norms = furthest(rig.curve(name), rig.curve(kind))
        ok = losses <= loss_limit and norms <= norm_limit
        failed += not ok
        print(f"| {kind} | {ranks} | {says} | {losses:.1e} | {norms:.1e} | {'ok' if ok else 'FAILED'} |", flush=True)
    return 1 if failed else 0


def _named(root: Path, kind: str, model: dict[str, Any]) -> dict[str, Any]:
    """A model that no preset names, by a folder with its configuration; its weights are drawn."""
    if "preset" in model:
        return model
    folder = root / "models" / kind
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model | {"max_position_embeddings": 1024}))
    load_tokenizer("tiny").save(folder)
    return {"path": str(folder), "init": "random"}


def _start(rig: Rig, ranks: int, files: list[Path]) -> list[subprocess.Popen[bytes]]:
    port, processes = free_port(), []
    for rank in range(ranks):
        log = (rig.root / "logs" / f"{ranks}-rank-{rank}.txt").open("wb")
        own = environment(rank, ranks, port) | rig.variables()
        command = [sys.executable, "-m", "tests.trainer.layouts", *map(str, files)]
        processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    return processes


if __name__ == "__main__":
    sys.exit(main())
