"""A job on a cluster whose parts fail, by discrete events; what follows a failure is decided by windlass' own code.

Between two failures training is arithmetic, so months on thousands of nodes take milliseconds. A failure becomes the
verdict that `windlass.diagnose` would give, `decide` says what follows, and a strategy says what the target can do.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.diagnose.decision import Decision, Policy, decide, verdict_of
from windlass.goodput.model import GPUS_PER_NODE, Cause, Sign, Tier, seconds

LOSSES = ("saving", "repeated", "detection", "restart", "waiting", "slow", "person")
SLOW_SPEED = 0.5  # of a job with one rank that is too slow
NODE_TIERS = ("memory", "local")  # in the nodes themselves


DEFAULT_POLICY = Policy()


@dataclass(frozen=True)
class Strategy:
    """What follows a failure: the deciding code's policy, and what the target can do of what it decides."""

    name: str
    policy: Policy | None = DEFAULT_POLICY  # None: nothing is started again but by a person
    excludes: bool = True  # nodes that a decision names are kept away from
    spares: int = 0  # nodes that stand ready, with the image
    evicts: int = 0  # nodes that leave together with one that is named after a hang, or where none is
    elsewhere: Policy | None = None  # of the level above, once the ranks were restarted in place for nothing


@dataclass(frozen=True)
class Spot:
    """A market that takes nodes back, with a notice in which ranks save."""

    reclaims_per_node_hour: float
    wait_s: float  # mean time until another node is to be had


@dataclass(frozen=True)
class Job:
    """What runs, and how long things take where it runs."""

    gpus: int
    causes: Sequence[Cause]
    rate_per_gpu: float  # failures per GPU and second, all causes together
    step_s: float
    tiers: Sequence[Tier]  # shares are not used: the simulator knows what each failure leaves
    every: Mapping[str, int]  # steps between two saves of each tier
    detection_s: Mapping[Sign, float]
    start_s: float
    spot: Spot | None = None
    swap_s: float = seconds("swap")
    provision_s: float = seconds("provision")
    repair_s: float = seconds("repair")
    check_s: float = seconds("check")
    person_s: float = seconds("person")

    @property
    def nodes(self) -> int:
        return -(-self.gpus // GPUS_PER_NODE)


@dataclass
class Outcome:
    """Where the time went."""

    paid_s: float = 0.0
    training_s: float = 0.0
    lost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: int = 0
    gave_up: int = 0
    decisions: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        return self.training_s / self.paid_s


def simulate(job: Job, strategy: Strategy, *, seconds: float, seed: int = 0) -> Outcome:
    """Run for so long. The same seed meets the same failures, whatever the strategy, as far as its timing allows."""
    return _Simulation(job, strategy, seconds, random.Random(seed)).run()


def replay(job: Job, strategy: Strategy, failures: Sequence[tuple[float, Cause]]) -> list[defaultdict[str, float]]:
    """What each of some failures costs that happened somewhere, each with the seconds that were trained before it."""
    simulation = _Simulation(replace(job, rate_per_gpu=0.0), strategy, math.inf, random.Random(0))
    costs: list[defaultdict[str, float]] = []
    for duration, cause in failures:
        if costs:  # steps that the failure before this one lost are repeated first
            costs[-1]["repeated"] += min(duration, (simulation.furthest - simulation.step) * job.step_s)
        simulation.train(duration)
        before = dict(simulation.outcome.lost)
        simulation.recover(cause)
        lost = {name: seconds - before.get(name, 0.0) for name, seconds in simulation.outcome.lost.items()}
        costs.append(defaultdict(float, lost))
    if costs:
        costs[-1]["repeated"] += (simulation.furthest - simulation.step) * job.step_s
    return costs


class _Simulation:
    def __init__(self, job: Job, strategy: Strategy, end: float, draw: random.Random) -> None:
        self.job, self.strategy, self.end, self.draw = job, strategy, end, draw
        self.clock = 0.0
        self.step = self.furthest = 0
        self.saved = {tier.name: 0 for tier in job.tiers}
        self.spares = strategy.spares
        self.in_repair: deque[float] = deque()  # when each becomes a spare again, the soonest first
        self.history: deque[dict[str, Any]] = deque(
            maxlen=64
        )  # since the newest checkpoint, as the deciding code reads it
        self.recorded = 0  # the newest checkpoint in it
        self.outcome = Outcome()
        reclaims = job.spot.reclaims_per_node_hour / 3600 * job.nodes if job.spot else 0.0
        self.failure_rate = job.rate_per_gpu * job.gpus
        self.rate = self.failure_rate + reclaims
        self.weights = [cause.count for cause in job.causes]

    def run(self) -> Outcome:
        while self.clock < self.end:
            gap = self.draw.expovariate(self.rate) if self.rate else math.inf
            begun = self.clock
            self.train(min(gap, self.end - self.clock))
            if begun + gap < self.end:
                self.recover(self._draw_cause())
        return self.ended()

    def ended(self) -> Outcome:
        self.outcome.paid_s = self.clock
        return self.outcome

    def _draw_cause(self) -> Cause:
        if self.draw.random() * self.rate >= self.failure_rate:
            return SPOT_RECLAIM
        return self.draw.choices(self.job.causes, self.weights)[0]

    def train(self, duration: float) -> None:
        """Steps and saves for `duration` seconds; what is complete then is there after a failure."""
        job, begin = self.job, self.step
        pace = job.step_s + sum(tier.stall_s / job.every[tier.name] for tier in job.tiers)
        reached = begin + int(duration / pace) + 1
        while self._time_between(begin, reached) > duration:
            reached -= 1
        stalled = self._time_between(begin, reached) - (reached - begin) * job.step_s
        repeated = max(0, min(reached, self.furthest) - begin) * job.step_s
        self._lose("saving", stalled)
        self._lose("repeated", repeated)
        trained = (reached - begin) * job.step_s - repeated
        self.outcome.training_s += trained
        self.clock += trained
        # a step that a failure cuts off is lost with it
        self._lose("repeated", duration - self._time_between(begin, reached))
        for tier in job.tiers:
            every = job.every[tier.name]
            newest = reached // every * every
            while newest > begin and self._time_between(begin, newest) + tier.write_s > duration:
                newest -= every
            if newest > begin:
                self.saved[tier.name] = newest
        self.step, self.furthest = reached, max(reached, self.furthest)

    def _time_between(self, begin: int, end: int) -> float:
        saves = sum(
            (end // self.job.every[tier.name] - begin // self.job.every[tier.name]) * tier.stall_s
            for tier in self.job.tiers
        )
        return (end - begin) * self.job.step_s + saves

    def recover(self, cause: Cause) -> None:
        """From a failure to the next step; failures strike meanwhile too."""
        job, strategy = self.job, self.strategy
        self._detect(cause)
        outage_ends = self.clock + (self.draw.expovariate(1 / cause.outage_s) if cause.outage_s else 0.0)
        broken = cause.breaks_node
        while True:
            decision = self._decide(cause, strategy.policy)
            leaves = strategy.excludes
            if decision is not None and decision.action == "give_up" and strategy.elsewhere is not None:
                decision, leaves = self._decide(cause, strategy.elsewhere), True
                self.history.append({"event": "launched", "job": self.outcome.failures})
            lost_nodes, still_broken = 0, False
            if decision is None or decision.action == "give_up":
                self.outcome.gave_up += decision is not None
                self._lose("person", job.person_s)
                lost_nodes, outage_ends = int(broken), self.clock  # who looks at it finds the node, or waits
                self.history.clear()
                self.recorded = -1
            elif strategy.evicts and cause.sign == "hang":
                lost_nodes = strategy.evicts
            elif broken and cause.sign == "notice":
                lost_nodes = 1
            elif leaves and decision.exclude_nodes:
                lost_nodes, still_broken = 1, self.draw.random() >= cause.named_right
            if decision is not None:
                self._lose("waiting", decision.backoff_seconds)
            if lost_nodes:
                self._replace(lost_nodes, reclaimed=cause is SPOT_RECLAIM)
                broken = broken and still_broken
            took = job.start_s + self._restore(cause, lost_nodes)
            gap = self.draw.expovariate(self.rate) if self.rate else math.inf
            if gap < took:
                self._lose("restart", gap)
                self.recover(self._draw_cause())
                return
            self._lose("restart", took)
            if not broken and self.clock >= outage_ends:
                return
            # the same again: its ranks cannot be started, or do not reach each other
            cause = replace(cause, sign="hang" if cause.sign == "hang" else "crash")
            self._detect(cause)

    def _detect(self, cause: Cause) -> None:
        self.outcome.failures += 1
        if cause.sign == "slow":
            self._lose("slow", self.job.detection_s["slow"] * (1 - SLOW_SPEED))
        elif cause.sign != "corruption":  # while numbers are wrong it trains; those steps are repeated
            self._lose("detection", self.job.detection_s[cause.sign])
        newest = max(self.saved.values())
        if newest != self.recorded:
            self.history.clear()
            self.history.append({"event": "checkpoint", "step": newest})
            self.recorded = newest

    def _decide(self, cause: Cause, policy: Policy | None) -> Decision | None:
        if policy is None:
            return None
        host = "node-0" if cause.names_node else None
        verdict = verdict_of(cause.failure_class, cause.name, host=host)
        decision = decide(verdict, self.history, policy)
        self.outcome.decisions[decision.action] += 1
        if decision.action == "retry":
            self.history.append({"event": policy.record, **decision.as_record()})
        return decision

    def _replace(self, count: int, *, reclaimed: bool) -> None:
        """Take nodes out, and wait for as many others."""
        while self.in_repair and self.in_repair[0] <= self.clock:
            self.in_repair.popleft()
            self.spares += 1
        if reclaimed and self.job.spot and self.spares < count:
            self._lose("waiting", self.draw.expovariate(1 / self.job.spot.wait_s))
            return
        ready = min(count, self.spares)
        self.spares -= ready
        self._lose("waiting", self.job.swap_s if ready == count else self.job.provision_s)
        if self.strategy.spares and not reclaimed:
            back = [self.clock + self.job.repair_s] + [self.clock + self.job.check_s] * (count - 1)
            self.in_repair = deque(sorted([*self.in_repair, *back[:ready]]))

    def _restore(self, cause: Cause, lost_nodes: int) -> float:
        """Go back to the newest save that is left; the seconds until it is read."""
        job = self.job
        if cause.sign == "notice":  # saved before it left
            tier = job.tiers[-1]
            self._lose("saving", tier.stall_s + tier.write_s)
            self.saved[tier.name] = self.step
        if cause.sign == "corruption":  # what was saved since is wrong too
            late = int(job.detection_s["corruption"] / job.step_s)
            self.saved = {name: max(0, step - late) for name, step in self.saved.items()}
        for name in NODE_TIERS:
            # a peer holds what one lost node held in memory; its disk is gone with it
            if name in self.saved and lost_nodes > (1 if name == "memory" else 0):
                self.saved[name] = 0
        newest = max(self.saved.values())
        tier = next(tier for tier in job.tiers if self.saved[tier.name] == newest)
        self.step = newest
        return tier.restore_s

    def _lose(self, name: str, duration: float) -> None:
        self.outcome.lost[name] += duration
        self.clock += duration


def daly(interval_s: float, stall_s: float, restart_s: float, between_s: float) -> float:
    """Goodput with one tier, failures of an exponential distribution that also strike while it restarts: exact."""
    segment = between_s * math.exp(restart_s / between_s) * math.expm1((interval_s + stall_s) / between_s)
    return interval_s / segment


SPOT_RECLAIM = Cause("spot reclaim", 1, "preempted", "notice", breaks_node=True, names_node=True)
