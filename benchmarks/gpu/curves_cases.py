"""Which runs are compared with which, and how far apart they may be: the one table of bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """One model and its data, shared by all cases."""

    title: str
    layers: int
    intermediate: int
    vocabulary: int
    length: int
    batch: int
    learning_rate: float
    steps: int = 200  # of a curve
    mode_steps: int = 20
    fast: tuple[str, ...] = ()  # makes this device's defaults those of a GPU
    # Wide enough for fp8, which leaves products narrower than 1024 alone; keys and values stay below that on purpose.
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4

    def config(self) -> dict[str, Any]:
        """Of a transformers Llama; tied, as the small published ones are: head and embedding then share a gradient."""
        return {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.width // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.length,
            "tie_word_embeddings": True,
        }


GPU = Size(
    "width 1024, 4 layers, T=512, B=8",
    layers=4,
    intermediate=4096,
    vocabulary=4096,
    length=512,
    batch=8,
    learning_rate=6e-4,
)
TINY = Size(
    "tiny: width 1024, 1 layer, T=32, B=4",
    layers=1,
    intermediate=1024,
    vocabulary=512,
    length=32,
    batch=4,
    learning_rate=6e-4,
    fast=("train.fused_head=true",),  # a CPU's default is torch's own; compiling stays off
)


# How much farther than the farthest of three peers a curve may be from what all are compared with. If a difference is
# a normal number around zero, a fourth peer would be farther in 2.4 of 100 runs.
PEER_FACTOR = 3.0


@dataclass(frozen=True)
class Bound:
    """What a curve must hold to. None: not asked."""

    relative: float | None = None  # of any step's loss, to that of the curve it is compared with
    mean: float | None = None  # between the means over the last steps, in nats
    norm: float | None = (
        None  # of the gradient's norm, relative, at the median step: AdamW hides a wrong scale from losses
    )
    fall: float = 0.0  # from the first step to the mean over the last ones, in nats; more than this
    last: int = 50  # steps that those means are over

    def describe(self) -> str:
        parts = [] if self.relative is None else [f"{self.relative:.1%}"]
        parts += [] if self.mean is None else [f"{self.mean:g} in the last {self.last}"]
        parts += [] if self.norm is None else [f"norm {self.norm:.0%}"]
        return ", ".join([*parts, f"falls by {self.fall:g}" if self.fall else "falls"])


@dataclass(frozen=True)
class Case:
    """One run. `kind`: the trainer once, the trainer killed and started again, or the plain loop."""

    name: str
    bound: Bound
    overrides: tuple[str, ...] = ()  # of the run file
    against: str | None = None
    peers: tuple[str, ...] = ()  # the same numbers by torch's own bf16, rounded in other orders: how far is usual
    kind: str = "trainer"
    packed: bool = False  # documents shorter than a sequence, kept apart
    fast: bool = True  # with this device's `Size.fast`
    gpu_only: str = ""  # why it says nothing on a CPU


@dataclass(frozen=True)
class Group:
    name: str
    cases: tuple[Case, ...] = field(default_factory=tuple)

    def steps(self, size: Size) -> int:
        return size.steps if self.name == "curves" else size.mode_steps


FALL = 1.0
# The same arithmetic in the same type, summed in another order.
EXACT = Bound(relative=1e-3, mean=1e-3, norm=0.01, fall=FALL)
BF16 = Bound(relative=0.02, mean=0.02, norm=0.1, fall=FALL)
FP8 = Bound(relative=0.05, mean=0.05, norm=0.2, fall=FALL)
SAME = Bound(relative=0.02, mean=0.05, norm=0.1, last=5)
RESUMED = Bound(relative=1e-3, mean=5e-3, norm=0.01, last=5)
FALLS = Bound(fall=0.05, last=5)  # adapters beside random weights: enough to see that they learn at all

FP32 = ("train.precision=fp32", "train.compile=false", "train.fused_head=false")
# Its adapters begin at nothing and have 20 steps.
LORA = ("model.lora.rank=16", "train.learning_rate=5e-3")

NF4 = (*LORA, "model.lora.quantize=nf4")
# For a curve of 200 steps that rate is too high: runs that differ in their last bits drift apart after 50.
SLOWER = "train.learning_rate=1e-3"
NO_LEAN = "train.lean_blocks=false"
SHARDED = ("parallel.sharding=full",)
# Adapters learn the frequencies of tokens first; after about 90 steps on that plateau the loss falls again. When it
# does so depends on the last bits, in torch's own bf16 as well: how far from fp32 is usual is measured in the same run.
BF16_LORA = Bound(relative=0.02, norm=0.1, fall=0.05)
LORA_PEERS = {
    "plain": (NO_LEAN,),
    "plain-sdpa": (NO_LEAN, "model.attention=sdpa"),
    "plain-eager": (NO_LEAN, "model.attention=sdpa", "train.compile=false"),
}


def lora_cases(name: str, options: tuple[str, ...]) -> tuple[Case, ...]:
    """In fp32, by torch's own bf16 in three ways, and by the fast path."""
    reference = f"{name}-fp32"
    peers = [
        Case(f"{name}-{kind}", BF16_LORA, (*options, *changes), against=reference, gpu_only="bf16 as GPUs round it")
        for kind, changes in LORA_PEERS.items()
    ]
    fast = Case(f"{name}-fast", BF16_LORA, options, against=reference, peers=tuple(peer.name for peer in peers))
    return Case(reference, FALLS, (*options, *FP32), fast=False), *peers, fast


CURVES = Group(
    "curves",
    (
        Case("reference", Bound(fall=FALL), kind="plain"),
        Case("fp32", EXACT, FP32, against="reference", fast=False),
        Case("fast", BF16, against="reference"),
        Case("fp8", FP8, ("train.fp8=true",), against="fast"),
        Case("sharded", BF16, SHARDED, against="reference"),
        Case("sharded-fp8", FP8, (*SHARDED, "train.fp8=true"), against="fast"),
        Case("reference-packed", Bound(fall=FALL), kind="plain", packed=True),
        Case("packed", BF16, against="reference-packed", packed=True),
        *lora_cases("lora", (*LORA, SLOWER)),
        *lora_cases("nf4", (*NF4, SLOWER)),
    ),
)
MODES = Group(
    "modes",
    (
        Case("default", Bound(last=5)),
        # Two processes, one after the other: begun early, so that nothing waits for it at the end.
        Case("resume", RESUMED, ("checkpoint.every=10",), against="default", kind="killed"),
        Case("fsdp", SAME, ("parallel.sharding=full",), against="default"),
        Case("ddp", SAME, ("parallel.sharding=ddp",), against="default"),
        Case("cpu-offload", SAME, ("parallel.sharding=full", "parallel.cpu_offload=true"), against="default"),
        Case("recompute-full", SAME, ("parallel.activation_checkpointing=full",), against="default"),
        Case("recompute-selective", SAME, ("parallel.activation_checkpointing=selective",), against="default"),
        Case("accumulate", SAME, ("train.micro_batch=2",), against="default"),
        Case("no-compile", SAME, ("train.compile=false",), against="default", gpu_only="off on CPUs anyway"),
        Case("sdpa", SAME, ("model.attention=sdpa",), against="default", gpu_only="a CPU has no other kernel anyway"),
        Case("no-lean-blocks", SAME, (NO_LEAN,), against="default", gpu_only="off on CPUs anyway"),
        Case("no-bf16-weights", SAME, ("train.bf16_weights=false",), against="default"),
        Case("no-fused-head", SAME, ("train.fused_head=false",), against="default"),
        Case("lora", FALLS, LORA),
        Case("lora-nf4", FALLS, NF4),
        Case("lora-recompute", FALLS, (*LORA, "parallel.activation_checkpointing=full")),
    ),
)
GROUPS = (CURVES, MODES)
