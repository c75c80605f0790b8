"""The goodput to expect, the best time between two checkpoints of every tier, and the published numbers they rest on.

First order in (time lost per failure ÷ time between failures), as Young (1974). The simulator of
benchmarks/ is held against it (tests/goodput).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Tier:
    """A place where checkpoints are kept. Shares are of all failures."""

    name: str
    stall_s: float  # for which a save holds training up
    write_s: float  # until a save counts: a failure before that finds the one before
    restore_s: float
    share: float  # of failures after which it is the nearest tier that is still there


@dataclass(frozen=True)
class Failures:
    """How often a job is interrupted, and what each interruption costs beside the steps done again."""

    between_s: float  # mean time between two, of the whole job
    detection_s: float
    restart_s: float  # new nodes, processes, joining, the first step; without reading the checkpoint


@dataclass(frozen=True)
class Expected:
    """Shares of the time paid for."""

    goodput: float
    losses: Mapping[str, float]


def best_interval(tier: Tier, between_s: float, *, step_s: float) -> float:
    """Seconds between two saves that cost least: a save holds training up, a failure repeats half the interval."""
    if tier.share <= 0:
        return math.inf
    young = math.sqrt(2 * tier.stall_s * between_s / tier.share)
    return max(young, tier.write_s, step_s)  # a save begins when the one before is written


def expected(failures: Failures, tiers: Sequence[Tier], intervals: Mapping[str, float]) -> Expected:
    rate = 1 / failures.between_s  # of a second in which the job is up
    saving = sum(tier.stall_s / (intervals[tier.name] + tier.stall_s) for tier in tiers)
    repeated = sum(tier.share * (intervals[tier.name] / 2 + tier.write_s) for tier in tiers) * rate
    restoring = sum(tier.share * tier.restore_s for tier in tiers)
    detection, restart = rate * failures.detection_s, rate * (failures.restart_s + restoring)
    paid = 1 + detection + restart  # for each second in which it is up
    losses = {"saving": saving, "repeated": repeated, "detection": detection, "restart": restart}
    losses = {name: share / paid for name, share in losses.items()}
    return Expected(max(0.0, 1 - sum(losses.values())), losses)


# What others published about failures at scale, and the times that plans and simulations take, with sources.

# How a failure shows: processes end; a node says nothing more; no step comes; steps are slow; the numbers are wrong;
# the scheduler announces it, and the ranks save first.
Sign = Literal["crash", "silence", "hang", "slow", "corruption", "notice"]


@dataclass(frozen=True)
class Cause:
    name: str
    count: int
    failure_class: str  # of windlass.diagnose.classes: what the deciding code is given
    sign: Sign
    breaks_node: bool = False  # whatever starts on that node again fails at once
    names_node: bool = False  # the verdict names a node
    named_right: float = 1.0  # how often that is the broken one
    outage_s: float = 0.0  # mean time until a restart can succeed, where it is no node's fault


# Llama 3 405B: 54 days on 16,384 H100, 47 planned and 419 unexpected interruptions ("The Llama 3 Herd of Models",
# arXiv 2407.21783, section 3.3.4 and table 5). Counts are the paper's; the rest is ours: how each
# would show here, and that the hang watch names the right node in four of five cases, are assumptions.
LLAMA3_DAYS, LLAMA3_GPUS, GPUS_PER_NODE = 54, 16_384, 8
LLAMA3 = (
    Cause("faulty GPU", 148, "gpu_hardware", "crash", breaks_node=True, names_node=True),
    Cause("GPU HBM3 memory", 72, "gpu_hardware", "crash", breaks_node=True, names_node=True),
    Cause("software bug", 54, "illegal_memory_access", "crash"),
    Cause("network switch or cable", 35, "hang", "hang", names_node=True, outage_s=120.0),
    Cause("host maintenance", 32, "preempted", "notice", breaks_node=True, names_node=True),
    Cause("GPU SRAM memory", 19, "gpu_hardware", "crash", breaks_node=True, names_node=True),
    Cause("GPU system processor", 17, "hang", "hang", breaks_node=True, names_node=True, named_right=0.8),
    Cause("NIC", 7, "hang", "hang", breaks_node=True, names_node=True, named_right=0.8),
    Cause("NCCL watchdog timeout", 7, "hang", "hang", names_node=True),
    Cause("silent data corruption", 6, "nan", "corruption", breaks_node=True),
    Cause("GPU thermal interface or sensor", 6, "straggler", "slow", breaks_node=True, names_node=True),
    Cause("SSD", 3, "file_system", "crash", breaks_node=True, names_node=True),
    Cause("power supply", 3, "node_lost", "silence", breaks_node=True, names_node=True),
    Cause("server chassis", 2, "node_lost", "silence", breaks_node=True, names_node=True),
    Cause("IO expansion board", 2, "gpu_hardware", "crash", breaks_node=True, names_node=True),
    Cause("dependency", 2, "store_transient", "crash", outage_s=120.0),
    Cause("CPU", 2, "node_lost", "silence", breaks_node=True, names_node=True),
    Cause("system memory", 2, "node_lost", "silence", breaks_node=True, names_node=True),
    Cause("planned: firmware, configuration", 47, "preempted", "notice"),
)
LLAMA3_RATE = sum(cause.count for cause in LLAMA3) / (LLAMA3_DAYS * 86_400 * LLAMA3_GPUS)  # per GPU and second


@dataclass(frozen=True)
class Quantity:
    value: float
    source: str
    measured: bool = False  # here, by a command of this repository


# Seconds unless the name says otherwise.
TIMES = {
    "step": Quantity(6.0, "Llama 3 405B: 16M tokens a step on 16,384 GPUs at 400 TFLOP/s each (its table 4)"),
    "detect crash": Quantity(
        8.0,
        "assumed: killed rank to decision, measured 2 s idle, 13 s at a load of 30 (benchmarks/goodput_real.py)",
    ),
    "detect silence": Quantity(
        50.0, "Kubernetes notices a lost node after 40 to 50 s (docs/kubernetes.md)", measured=True
    ),
    "detect hang": Quantity(60.0, "the hang watch: at least 60 s, or 10 median steps (docs/goodput.md)", measured=True),
    "detect slow": Quantity(600.0, "assumed; a report of slow ranks comes with every log line"),
    "detect corruption": Quantity(600.0, "assumed: until a loss is not finite; what was saved meanwhile is not used"),
    "start": Quantity(
        24.0,
        "assumed: 28 to 35 s measured on an H200, 1B, less the attention kernels, cached by then (docs/speed-log.md)",
    ),
    "join per GPU": Quantity(0.003, "MegaScale (arXiv 2402.15627): under 30 s for more than 10,000 GPUs"),
    "swap": Quantity(10.0, "assumed: a pod starts on a spare node that has the image"),
    "provision": Quantity(900.0, "assumed: a cloud or HyperPod brings another node"),
    "repair": Quantity(86_400.0, "assumed: a broken node comes back after a day"),
    "check": Quantity(1_800.0, "assumed: a node that was evicted on suspicion is tested"),
    "person": Quantity(1_800.0, "assumed: somebody looks at it, and acts"),
    "state GB": Quantity(4_860.0, "405B parameters × 12 bytes: fp32 weights and two moments, sharded evenly"),
    "state GB per GPU": Quantity(12.0, "at most: smaller clusters train smaller models, 8B on 8 GPUs for example"),
    "host link GB/s": Quantity(25.0, "pinned copies from an H200 (windlass/plan/speed.py)", measured=True),
    "save overhead": Quantity(0.1, "assumed: ranks agree on a save"),
    "memory GB/s per GPU": Quantity(1.0, "assumed: written to /dev/shm, sent to a peer, SHA-256 on both sides"),
    "local GB/s per GPU": Quantity(0.5, "assumed: one NVMe disk for two GPUs"),
    "shared GB/s per GPU": Quantity(2_000 / 16_384, "Llama 3: 2 TB/s sustained by its file system, shared evenly"),
}


def seconds(name: str) -> float:
    return TIMES[name].value
