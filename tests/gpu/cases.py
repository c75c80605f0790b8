"""What is trained: one run per case on 1, 2 and 4 ranks, whose losses and gradient norms must agree."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 6
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
DENSE = {"preset": "llama3.2-tiny", "config": TINY}
WIDE = {"preset": "llama3.2-tiny", "config": {**TINY, "hidden_size": 1024, "intermediate_size": 1024, "head_dim": 64}}
EXPERTS = {"preset": "mixtral-tiny", "config": TINY}
# Largest relative differences of a step's loss and of its gradient norm. fp32 differs by the order of sums alone; bf16
# rounds what is gathered and scattered; fp8 takes its scales from each rank's own tokens.
Tolerance = tuple[float, float]
FP32: Tolerance = (2e-6, 2e-5)
BF16: Tolerance = (2e-4, 2e-3)
FP8: Tolerance = (2e-3, 2e-2)
PLANTED = 1.02  # the wrong scale of one rank's gradient, which must be found


@dataclass(frozen=True)
class Case:
    """A run on several numbers of ranks, the first of them the reference."""

    name: str
    tolerance: Tolerance
    ranks: tuple[int, ...] = (1, 2, 4)
    changes: dict[str, Any] = field(default_factory=dict)  # section.key: value
    one_rank: dict[str, Any] = field(default_factory=dict)  # what differs where there is one rank
    local_world_size: int | None = None  # ranks of what counts as a node
    fresh: bool = False  # in processes of their own: torch 2.11 splits no NCCL group of a world that was made anew
    planted: bool = False  # rank 1 scales its gradient wrongly: the case passes if that is seen

    def run(self, corpus: Path, ranks: int, **more: Any) -> dict[str, Any]:
        run: dict[str, Any] = {
            "name": f"{self.name}-{ranks}",
            "model": copy.deepcopy(DENSE),
            "data": {"source": str(corpus), "sequence_length": 64},
            "train": {
                "steps": STEPS,
                "global_batch": 8,
                "precision": "fp32",
                "warmup_steps": 2,
                "learning_rate": 1e-3,
                "compile": False,
                "log_every": 1,
            },
            "parallel": {"sharding": "full", "timeout_minutes": 3},
            "checkpoint": {"every": 1000},
        }
        for key, value in {**self.changes, **(self.one_rank if ranks == 1 else {}), **more}.items():
            section, _, leaf = key.partition(".")
            if leaf:
                run[section] = {**run[section], leaf: value}
            else:
                run[section] = copy.deepcopy(value)
        return run


def _bf16(**more: Any) -> dict[str, Any]:
    return {"train.precision": "bf16", **more}


NONE = {"parallel.sharding": "none"}
AUTOCAST = {"train.bf16_weights": False}  # fp32 weights that are cast on every use, as under DDP
EQUAL = (
    Case("full-fp32", FP32, one_rank=NONE),
    Case("ddp-fp32", FP32, changes={"parallel.sharding": "ddp"}, one_rank=NONE),
    Case("hybrid-fp32", FP32, (1, 4), {"parallel.sharding": "hybrid"}, one_rank=NONE, local_world_size=2, fresh=True),
    Case("accumulation-fp32", FP32, changes={"train.micro_batch": 1}, one_rank=NONE),
    Case("offload-fp32", FP32, (1, 2), {"parallel.cpu_offload": True}, one_rank=NONE | {"parallel.cpu_offload": False}),
    Case("recompute-fp32", FP32, (1, 2), {"parallel.activation_checkpointing": "full"}, one_rank=NONE),
    Case("moe-fp32", FP32, changes={"model": EXPERTS}, one_rank=NONE),
    Case("moe-ddp-fp32", FP32, (1, 2), {"model": EXPERTS, "parallel.sharding": "ddp"}, one_rank=NONE),
    Case("full-bf16", BF16, changes=_bf16()),
    Case("ddp-bf16", BF16, (1, 2, 4), _bf16() | {"parallel.sharding": "ddp"}, one_rank=NONE | AUTOCAST),
    Case("moe-bf16", BF16, changes=_bf16(model=EXPERTS)),
    Case("fp8", FP8, changes=_bf16(model=WIDE) | {"train.fp8": True, "train.learning_rate": 1e-4}),
    Case("lora-bf16", BF16, (1, 2, 4), _bf16(model="LORA"), one_rank=NONE),
    Case("lora-ddp-bf16", BF16, (1, 2), _bf16(model="LORA") | {"parallel.sharding": "ddp"}, one_rank=NONE),
    Case("compile-full-bf16", BF16, changes=_bf16() | {"train.compile": True}),
    Case("compile-none-fp32", FP32, (1,), {"train.compile": True} | NONE),
    Case("compile-ddp-fp32", FP32, (1, 2), {"train.compile": True, "parallel.sharding": "ddp"}, one_rank=NONE),
    Case("compile-moe-fp32", FP32, (1, 2), {"model": EXPERTS, "train.compile": True}, one_rank=NONE),
    Case("planted-scale", FP32, (1, 2), one_rank=NONE, planted=True),
)
# What a case on the left computes must also be what the one on the right does, on one rank.
SAME = (("compile-none-fp32", "full-fp32"),)


def with_models(run: dict[str, Any], pretrained: Path) -> dict[str, Any]:
    """The run with the folder of the model that adapters are trained beside."""
    if run["model"] == "LORA":
        lora = {"rank": 4}
        return {**run, "model": {"path": str(pretrained), "init": "pretrained", "lora": lora}}
    return run
