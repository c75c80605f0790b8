"""Which rank is slow: how far each is behind the others, and its times; a line in metrics.jsonl now and then.

All ranks take the same time for a step, because they wait for each other in collectives. The one that is waited for
comes last to each of them. So every rank notes when it came to its newest collectives (torch's flight recorder has it)
and sends that to rank 0 over the watch's own connections: no collective more, and nothing that a step waits for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from windlass.trainer.callbacks.callback import Callback
from windlass.trainer.distributed.peers import Standing, recent_collectives
from windlass.trainer.state import TrainState

EVERY_S = 30.0  # between two comparisons, at least
NOTICE_S = 5.0  # for all ranks to learn after which step they measure: a message takes up to two
SAMPLES = 32  # collectives that are compared
MOST_RANKS = 64  # that a record lists; of more, the slowest few
SLOWEST = 8
SLOW_SHARE = 0.1  # of a step: held up for less is no news
SLOW_S = 0.005


class Stragglers(Callback):
    def __init__(self, state: TrainState) -> None:
        self.is_on = state.ranks.world_size > 1
        self.begun: float | None = None  # of the steps that are measured
        self.num_steps = self.num_collectives = 0
        self.data_s = 0.0
        self.due = 0.0

    def after_step(self, state: TrainState) -> None:
        if not self.is_on or state.result is None:
            return
        now, peers = time.monotonic(), state.peers
        if self.begun is None:  # the first step compiles
            self._begin(now)
            return
        self.num_steps += 1
        self.data_s += state.result.batch.wait_s
        step_s = (now - self.begun) / self.num_steps
        if state.ranks.is_first and now >= self.due and state.step > peers.measure_at:
            self._compare(state)
            self.due = now + EVERY_S
            peers.measure_at = state.step + 1 + int(NOTICE_S / step_s)
        if state.step != peers.measure_at:
            return
        total, samples = recent_collectives(SAMPLES, leave_out=state.ranks.saving.group_name)
        offset = 0.0 if state.ranks.is_first else peers.clock_ahead
        peers.share_times(
            {
                "step": state.step,
                "steps": self.num_steps,
                "step_s": round(step_s, 6),
                "data_s": round(self.data_s / self.num_steps, 6),
                "collectives": (total - self.num_collectives) / self.num_steps if self.num_collectives else None,
                "came": {key: round(when + offset, 6) for key, when in samples.items()},
            }
        )
        self._begin(now, total)

    def _begin(self, now: float, num_collectives: int = 0) -> None:
        self.begun, self.num_steps, self.data_s, self.num_collectives = now, 0, 0.0, num_collectives

    def _compare(self, state: TrainState) -> None:
        comparison = compare(state.peers.standings())
        if comparison is not None:
            state.reporter.ranks_compared(comparison.pop("of_step"), comparison)


def compare(standings: Sequence[Standing]) -> dict[str, Any] | None:
    """How far each rank was behind the usual one, in seconds of a step. None where ranks did not measure the same."""
    times = {standing.rank: standing.times for standing in standings if standing.times.get("came")}
    if len(times) < 2 or len({part["step"] for part in times.values()}) > 1:
        return None
    first = next(iter(times.values()))
    shared = [key for key in first["came"] if all(key in part["came"] for part in times.values())]
    if not shared or not first["collectives"]:
        return None
    # the lower of two: with two ranks the usual one is the one that was there first
    usual = {key: statistics.median_low([part["came"][key] for part in times.values()]) for key in shared}
    rows = []
    for standing in standings:
        if standing.rank not in times:
            continue
        own = times[standing.rank]
        late = statistics.fmean(max(0.0, own["came"][key] - usual[key]) for key in shared)
        behind_s = min(late * own["collectives"], own["step_s"])
        row = {"rank": standing.rank, "host": standing.host, "step_s": own["step_s"], "data_s": own["data_s"]}
        rows.append({**row, "behind_s": round(behind_s, 6)})
    slow = [row for row in rows if row["behind_s"] > max(SLOW_S, SLOW_SHARE * row["step_s"])]
    worst = max(rows, key=lambda row: float(row["behind_s"]))
    listed = rows if len(rows) <= MOST_RANKS else sorted(rows, key=lambda row: -float(row["behind_s"]))[:SLOWEST]
    return {
        "of_step": first["step"],
        "steps": first["steps"],
        "held_up_s": round(worst["behind_s"] * first["steps"], 6) if slow else 0.0,
        "slow": [row["rank"] for row in sorted(slow, key=lambda row: -float(row["behind_s"]))[:SLOWEST]],
        "ranks": listed,
    }
