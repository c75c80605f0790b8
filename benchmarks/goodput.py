"""Goodput by simulation, 8 to 16,384 GPUs: `python -m benchmarks.goodput [--seeds 10] [--write docs/goodput.md]`.

Prints what each step from "a person restarts it" to "warm spares and copies in peers' memory" is worth, where the rest
of the time goes, and how far the result depends on what was assumed.
`--write` puts the tables between the marks in a file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.goodput_simulator import LOSSES, Job, Outcome, Spot, Strategy, simulate
from windlass.diagnose.decision import Policy
from windlass.goodput.model import GPUS_PER_NODE, LLAMA3, LLAMA3_RATE, TIMES, Sign, Tier, best_interval, seconds

SCALES = (8, 64, 512, 2_048, 8_192, 16_384)
DAYS, FEWEST_FAILURES = 54, 400  # a small cluster is simulated for longer, so that something happens
MORE_RESTARTS = Policy(restarts=8)  # target.max_restarts=8: an outage of the network may take longer than three
STATED = "max_restarts=8"
# Other rates per GPU, to see how far the result depends on this one.
OTHER_RATES = {
    # "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (Meta, arXiv 2410.21680): 6.50 and 2.34
    # failures per 1,000 node-days of 8 A100 on its two clusters.
    "Meta RSC-1": 6.50 / (1_000 * 86_400 * GPUS_PER_NODE),
    "Meta RSC-2": 2.34 / (1_000 * 86_400 * GPUS_PER_NODE),
}
MARKS = ("<!-- goodput -->", "<!-- /goodput -->")


@dataclass(frozen=True)
class Setup:
    strategy: Strategy
    memory: bool = False  # copies in peers' memory


def setups(gpus: int) -> list[Setup]:
    """From nothing to everything; each adds one thing to the one before."""
    nodes = -(-gpus // GPUS_PER_NODE)
    group = min(16, max(1, nodes // 16))
    spares = 1 + nodes // 128  # enough for the nodes that are in repair at a time
    in_place, elsewhere = Policy(), Policy(record="retry")
    return [
        Setup(Strategy("a person restarts it", policy=None)),
        Setup(Strategy("restart in place", in_place, excludes=False)),
        Setup(Strategy("then a new job without the suspects", in_place, excludes=False, elsewhere=elsewhere)),
        Setup(Strategy("suspects excluded at once", in_place)),
        Setup(Strategy("warm spares", in_place, spares=spares)),
        Setup(Strategy("copies in peers' memory", in_place, spares=spares), memory=True),
        Setup(Strategy(STATED, MORE_RESTARTS, spares=spares), memory=True),
        Setup(
            Strategy("after a hang a whole group leaves", MORE_RESTARTS, spares=spares + 16, evicts=group), memory=True
        ),
    ]


def job_of(
    gpus: int,
    *,
    memory: bool,
    rate: float = LLAMA3_RATE,
    spot: Spot | None = None,
    start_s: float | None = None,
    storage: float = 1.0,
) -> Job:
    """Every tier at its own best interval."""
    state, step = min(seconds("state GB") / gpus, seconds("state GB per GPU")), seconds("step")
    stall = state / seconds("host link GB/s") + seconds("save overhead")
    in_memory = state / seconds("memory GB/s per GPU")
    shared = state / seconds("shared GB/s per GPU") / storage
    tiers = [Tier("shared", stall, shared, shared, share=0.05 if memory else 1.0)]
    if memory:
        tiers.insert(0, Tier("memory", stall, in_memory, in_memory, share=0.95))
    between = 1 / (rate * gpus)
    every = {tier.name: max(1, round(best_interval(tier, between, step_s=step) / step)) for tier in tiers}
    signs: tuple[Sign, ...] = ("crash", "silence", "hang", "slow", "corruption")
    return Job(
        gpus=gpus,
        causes=LLAMA3,
        rate_per_gpu=rate,
        step_s=step,
        tiers=tiers,
        every=every,
        detection_s={**{sign: seconds(f"detect {sign}") for sign in signs}, "notice": 0.0},
        start_s=(seconds("start") if start_s is None else start_s) + gpus * seconds("join per GPU"),
        spot=spot,
    )


def measure(job: Job, strategy: Strategy, *, seeds: int) -> Outcome:
    """Several runs together."""
    failures_a_day = 86_400 * job.rate_per_gpu * job.gpus
    days = max(DAYS, FEWEST_FAILURES / failures_a_day)
    whole = Outcome()
    for seed in range(seeds):
        outcome = simulate(job, strategy, seconds=days * 86_400, seed=seed)
        whole.paid_s += outcome.paid_s
        whole.training_s += outcome.training_s
        for name, lost_s in outcome.lost.items():
            whole.lost[name] += lost_s
        whole.failures += outcome.failures
        whole.gave_up += outcome.gave_up
    return whole


def tables(seeds: int) -> str:
    last = SCALES[-1]
    by_scale, losses = [], []
    for index, setup in enumerate(setups(last)):
        row = [setup.strategy.name]
        for gpus in SCALES:
            current = setups(gpus)[index]
            outcome = measure(job_of(gpus, memory=current.memory), current.strategy, seeds=seeds)
            row.append(f"{outcome.goodput:.2%}")
        spare = setup.strategy.spares / (last // GPUS_PER_NODE + setup.strategy.spares)
        by_scale.append([*row, f"{outcome.goodput * (1 - spare):.2%}"])
        shares = [f"{outcome.lost[name] / outcome.paid_s:.2%}" for name in LOSSES]
        losses.append([setup.strategy.name, *shares, f"{outcome.gave_up / seeds:.1f}"])
    intervals = job_of(last, memory=True).every
    return "\n".join(
        [
            "Goodput, each row with what the rows above it have. The last column counts the spare nodes as paid.",
            "",
            *table(["strategy", *(f"{gpus:,} GPUs" for gpus in SCALES), "with spares paid"], by_scale),
            "",
            f"Where the rest goes at {last:,} GPUs, and how often in {DAYS} days the deciding code gave up:",
            "",
            *table(["strategy", *LOSSES, "gave up"], losses),
            "",
            f"Steps between saves at {last:,} GPUs with both tiers: "
            + ", ".join(f"{name} {every}" for name, every in intervals.items())
            + f" (a step takes {seconds('step'):g} s).",
            "",
            f"How far it depends on what was assumed: the last strategy but one, {last:,} GPUs.",
            "",
            *table(["changed", "goodput"], list(sensitivity(seeds))),
            "",
            "What goes in:",
            "",
            *table(["quantity", "value", "", "source"], inputs()),
        ]
    )


def sensitivity(seeds: int) -> Iterable[list[str]]:
    gpus = SCALES[-1]
    setup = setups(gpus)[-2]
    base = job_of(gpus, memory=True)
    slow = {**base.detection_s, "crash": 60.0, "hang": 600.0}
    market, small = Spot(reclaims_per_node_hour=0.001, wait_s=600.0), setups(512)[-2].strategy
    cases = [
        ("nothing", base, setup.strategy),
        ("detection: 60 s for a crash, 600 s for a hang", replace(base, detection_s=slow), setup.strategy),
        (
            "start: 35 s instead of 24 (attention kernels compiled anew)",
            job_of(gpus, memory=True, start_s=35.0),
            setup.strategy,
        ),
        ("start: 180 s", job_of(gpus, memory=True, start_s=180.0), setup.strategy),
        ("a person takes 4 hours instead of half an hour", replace(base, person_s=14_400.0), setup.strategy),
        ("spares take 120 s instead of 10", replace(base, swap_s=120.0), setup.strategy),
        ("no budget: one restart without progress", base, replace(setup.strategy, policy=Policy(restarts=1))),
        ("shared storage of a tenth of the speed", job_of(gpus, memory=True, storage=0.1), setup.strategy),
        ("the same, without copies in memory", job_of(gpus, memory=False, storage=0.1), setup.strategy),
        ("512 GPUs on demand", job_of(512, memory=True), small),
        ("the same from a spot market: each node back after 1,000 h", job_of(512, memory=True, spot=market), small),
        *(
            (f"failures as on {name}", job_of(gpus, memory=True, rate=rate), setup.strategy)
            for name, rate in OTHER_RATES.items()
        ),
    ]
    for name, job, strategy in cases:
        yield [name, f"{measure(job, strategy, seeds=seeds).goodput:.2%}"]


def inputs() -> list[list[str]]:
    rows = [
        [
            "failures",
            f"{1e9 * LLAMA3_RATE * 3600:,.0f} per 10⁹ GPU-hours",
            "published",
            "Llama 3 405B: 466 in 54 days on 16,384 GPUs, by cause (arXiv 2407.21783, table 5)",
        ]
    ]
    for name, quantity in TIMES.items():
        kind = "measured" if quantity.measured else "assumed" if quantity.source.startswith("assumed") else "published"
        rows.append(
            [name, f"{quantity.value:.4g}", kind, quantity.source.removeprefix("assumed: ").removeprefix("assumed; ")]
        )
    return rows


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def write(path: Path, text: str) -> None:
    before, _, rest = path.read_text().partition(MARKS[0])
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    begin = time.monotonic()
    text = tables(options.seeds)
    print(text)
    print(f"\n{options.seeds} runs of each in {time.monotonic() - begin:.1f} s")
    if options.write:
        write(options.write, text)


if __name__ == "__main__":
    main()
