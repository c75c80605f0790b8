"""What only the rhythm of a run tells: no step for long, one rank slower than the rest, a slow network, a lost loss."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from statistics import median

from windlass.diagnose.facts import Facts
from windlass.diagnose.findings import Evidence, Finding
from windlass.diagnose.reading import moment
from windlass.diagnose.timeline import LogView, clock_text

HANG_SECONDS = 900.0  # without a step, at least
HANG_STEPS = 10.0  # times the usual time between two steps
SLOWER = 1.5  # times the others
DURATION = re.compile(
    r"(?:compute|forward|fwd|step|iter(?:ation)?|batch|data)[ _-]?(?:time|duration)(?:_s"
    r"|_ms)?[ =:\"']+([\d.]{1,12}) ?(ms|s\b)?|took ([\d.]{1,12}) ?(ms|s)\b",
    re.IGNORECASE,
)
STRAGGLER = re.compile(r"straggl\w+|slow(?:est)? rank|rank \d+ is (?:[\d.]+ ?x|much) slower", re.IGNORECASE)
STALL = re.compile(
    r"no (?:progress|step|new step|heartbeat)\S* (?:for|in|since) |(?:appears"
    r"|seems) (?:to be )?(?:hung|stuck)|hang detected|stalled for|has not made progress",
    re.IGNORECASE,
)
SOCKETS = re.compile(r"Using network Socket|NET/Socket ?: Using|via NET/Socket", re.IGNORECASE)
EXPECTED_FAST = re.compile(
    r"NET/OFI|FI_PROVIDER ?[=:] ?efa|\bEFA\b|NET/IB ?: No device found|libnccl-net\.so"
    r"|aws-ofi|NCCL_IB_HCA|No eligible providers",
    re.IGNORECASE,
)
NAN_LOSS = re.compile(r"loss[\"']?\s*[=:]?\s*-?(?:nan|inf)\b", re.IGNORECASE)


def rhythm(facts: Facts, views: Sequence[LogView], *, is_over: bool) -> Finding | None:
    """A finding for a job in which nothing failed outright."""
    return (
        _lost_loss(views)
        or _slow_network(facts, views)
        or _straggler(views)
        or (None if is_over else _hang(facts, views))
    )


def _lost_loss(views: Sequence[LogView]) -> Finding | None:
    for view in views:
        last = [one for one in view.lines if any(one.order == order for order, _, _ in view.progress[-3:])]
        if last and all(NAN_LOSS.search(one.text) for one in last):
            return Finding(
                "nan",
                0.85,
                20,
                tuple(Evidence(view.name, one.text[:300], one.rank) for one in last),
                "the last steps have no finite loss",
            )
    return None


def _slow_network(facts: Facts, views: Sequence[LogView]) -> Finding | None:
    asks = any("efa" in key or "rdma" in key or "hca" in key for pod in facts.pods for key in pod.requests)
    for view in views:
        socket = next((one for one in view.lines if SOCKETS.search(one.text)), None)
        reason = next((one for one in view.lines if EXPECTED_FAST.search(one.text)), None)
        if socket is not None and (asks or reason is not None):
            lines = [one for one in (reason, socket) if one is not None]
            return Finding(
                "nccl_slow_fallback",
                0.8,
                20,
                tuple(Evidence(view.name, one.text[:300], one.rank) for one in lines),
                "NCCL names the network that it uses",
            )
    return None


def _straggler(views: Sequence[LogView]) -> Finding | None:
    for view in views:
        for line in view.lines[-500:]:
            if (
                STRAGGLER.search(line.text)
                and re.search(r"detect|is |are |: ", line.text)
                and not re.search(r"no straggl|enabled|disabled|init", line.text, re.IGNORECASE)
            ):
                return Finding(
                    "straggler",
                    0.75,
                    20,
                    (Evidence(view.name, line.text[:300], line.rank),),
                    "the run's own report says so",
                )
    times: dict[int, float] = {}
    for view in views:
        if view.rank is None:
            continue
        found = [seconds for line in view.lines if (seconds := _seconds(line.text)) is not None]
        if len(found) >= 3:
            times[view.rank] = median(found[-20:])
    if len(times) < 2:
        return None
    slowest = max(times, key=lambda rank: times[rank])
    rest = median([seconds for rank, seconds in times.items() if rank != slowest])
    if rest <= 0 or times[slowest] < SLOWER * rest:
        return None
    text = f"rank {slowest}: {times[slowest]:.3g} a step, the others {rest:.3g}"
    return Finding(
        "straggler",
        0.7,
        20,
        (Evidence(f"rank{slowest}", text, slowest),),
        "its steps take longer than those of the other ranks",
    )


def _seconds(text: str) -> float | None:
    match = DURATION.search(text)
    if match is None or not re.search(r"step|iter", text, re.IGNORECASE):
        return None
    number, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    try:
        return float(number) / (1000.0 if unit and unit.lower() == "ms" else 1.0)
    except ValueError:
        return None


def _hang(facts: Facts, views: Sequence[LogView]) -> Finding | None:
    for view in views:
        for line in view.lines[-200:]:
            if STALL.search(line.text) and not view.survived(line.order):
                return Finding(
                    "hang", 0.75, 20, (Evidence(view.name, line.text[:300], line.rank),), "the run's own watch says so"
                )
    dates = [
        _date(line.text) for view in views for line in view.lines[-200:] if view.is_submission or view.rank is None
    ]
    steps = sorted(time for view in views for _, _, time in view.progress if time is not None)
    heard = [time for view in views for line in view.lines if (time := line.time) is not None]
    heard += [time for one in facts.events if (time := one.time) is not None]
    heard += [time for node in facts.nodes for one in node.conditions if (time := one.time) is not None]
    heard += [time for time in dates if time is not None]
    if not steps:  # a rank that began and never came to a step
        steps = sorted(
            line.time for view in views if view.rank is not None for line in view.lines[-1:] if line.time is not None
        )
    if not steps or not heard:
        return None
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps) if later > earlier]
    silence = max(heard) - steps[-1]
    usual = median(gaps) * HANG_STEPS if gaps else HANG_SECONDS * 2
    if silence < max(HANG_SECONDS, usual):
        return None
    text = f"the last step was at {clock_text(steps[-1])}, {silence / 60:.0f} min before the newest fact"
    return Finding("hang", 0.7, 20, (Evidence("logs", text),), "no step for much longer than steps usually take")


DATE = re.compile(r"\w{3} (\w{3}) +(\d{1,2}) (\d\d:\d\d:\d\d) (?:[AP]M )?(?:UTC|GMT)? ?(\d{4})\b")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _date(text: str) -> float | None:
    """The time that `date` or nvidia-smi printed."""
    match = DATE.search(text)
    if match is None or match[1] not in MONTHS:
        return None
    return moment(f"{match[4]}-{MONTHS.index(match[1]) + 1:02d}-{int(match[2]):02d}T{match[3]}Z")
