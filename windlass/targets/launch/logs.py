"""Print the logs of a run folder, and go on while they grow: those of its ranks and of whatever launched them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from windlass.runfolder import RunFolder
from windlass.targets.launch.tail import READ_BYTES, Tail
from windlass.targets.protocol import LogLine

POLL_SECONDS = 0.2
RANK_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d rank \d+ [A-Z]+ ")
# What torchrun prints around every end of a rank: its own traceback, and rules that frame its summary.
TORCHRUNS_ERROR = re.compile(r"torch\.distributed\.elastic\.\S+\.(?:ChildFailedError|SignalException)\b")
NOISE = re.compile(
    r"(?:W\d{4} .{1,120}\] )?(?:[=*-]{20,}\s*$|Setting OMP_NUM_THREADS environment variable|$)|Failures:$"
    r"|\s+<NO_OTHER_FAILURES>|\s+traceback : To enable traceback see|\s+error_file: <N/A>|\S+ FAILED$"
)
Source = tuple[int, int, str]  # in the order of printing: a rank; behind all ranks the launchers' files
LAUNCHER = 2**62


def follow_logs(
    folder: RunFolder,
    rank: int | None,
    ended: Callable[[], bool],
    *,
    launchers: Mapping[str, str],
    only_without_ranks: bool = True,
) -> Iterator[LogLine]:
    """Lines of one rank, or of all ranks, until `ended`.

    `launchers`: patterns of the launchers' files in logs/, with the name under which their lines are printed.
    They are printed along with the ranks', or `only_without_ranks`: at the end, where no rank has a log.
    """
    tails: dict[Source, Tail] = {}
    quiet: dict[Source, QuietLauncher] = {}
    names = list(launchers.values())
    while True:
        is_over = ended()
        if rank is not None:
            tails.setdefault((rank, 0, ""), Tail(folder.rank_log(rank)))
        else:
            for path in folder.logs.glob("rank-*.log"):
                with contextlib.suppress(ValueError):
                    tails.setdefault((int(path.stem.removeprefix("rank-")), 0, ""), Tail(path))
            if not only_without_ranks or (is_over and not tails):
                for position, pattern in enumerate(launchers):
                    for path in folder.logs.glob(pattern):
                        tails.setdefault((LAUNCHER, position, path.name), Tail(path))
        for source in sorted(tails):
            number, position, _ = source
            while lines := tails[source].lines(rest=is_over, limit=READ_BYTES):
                if number != LAUNCHER:
                    yield from (LogLine(number, text) for text in lines)
                    continue
                for text in quiet.setdefault(source, QuietLauncher()).without_noise(lines):
                    if only_without_ranks or not RANK_LINE.match(text):  # else a copy of what a rank's log holds
                        yield LogLine(None, text, names[position])
            if is_over and source in quiet:
                yield from (LogLine(None, text, names[position]) for text in quiet[source].held)
        if is_over:
            return
        time.sleep(POLL_SECONDS)


class QuietLauncher:
    """A launcher's log without what torchrun says of itself; which ranks ended, when and how stays."""

    def __init__(self) -> None:
        self.held: list[str] = []  # a traceback of which it is not known yet whose it is

    def without_noise(self, lines: Iterable[str]) -> Iterator[str]:
        for text in lines:
            if text.startswith("Traceback (most recent call last):") or (self.held and text.startswith(" ")):
                self.held.append(text)
                continue
            held, self.held = self.held, []
            if held and TORCHRUNS_ERROR.match(text):
                continue
            yield from held
            if not NOISE.match(text):
                yield text
