"""Logs as a timeline: lines with rank, time and level; attempts; progress; tracebacks; torchrun's report."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from windlass.common.files import parse_record
from windlass.diagnose.facts import Log
from windlass.diagnose.reading import moment

MOST_MESSAGE_LINES = 60  # of one exception's message
FIRST_LINES, LAST_LINES = 2000, 20_000  # of a log that are read
MOST_LINE = 4000  # characters of a line that are looked at
ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

# What transports put before a line: Kubernetes' time, the rank that torchrun, srun, mpirun, Ray or windlass names.
TRANSPORT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)) ?"
    r"|\[(?:rank|default|Rank|RANK|trainer)[ :_-]?(?P<rank>\d{1,6})\]:? ?"
    r"|\[\d+,(?P<mpi>\d{1,6})\]<std(?:err|out)>: ?"
    r"|\[?(?:pod/)?[\w.-]+/[\w.-]+\]? (?=Traceback)"
    r"|\[pod/[^\]]{1,200}\] ?"
    r"|\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"|(?:rank|worker|node)[-_ ]?(?P<named>\d{1,6}) ?\| ?"
)
TRANSPORT_BEGINS = frozenset("0123456789[(rwnp")
SRUN_LABEL = re.compile(r"\s{0,4}(\d{1,6}): ?")
LEVELS = "DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL"
GLOG = re.compile(
    r"\[?(?P<level>[EWIF])(?:(?P<month>\d{1,2})(?P<day>\d\d)"
    r" (?P<clock>\d\d:\d\d:\d\d)(?P<fraction>\.\d+)?)?\s+(?=[^\]]{0,80}\w+\.(?:cpp|cc|py|h"
    r"|hpp):\d+)[^\]]{1,120}\]\s?"
)
NCCL = re.compile(
    r"(?:\[[^\]]{1,60}\] )?(?:[\w.-]+:\d+:\d+ (?:\[\d+\] )?)?(?:\S+:\d+ )?NCCL (?P<level>WARN|INFO"
    r"|TRACE) "
)
STAMP = re.compile(r"\[?(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)\]?[\s,:|-]*")
LEVEL = re.compile(
    rf"(?:[^\s\]]{{1,80}}[\s:|-]+){{0,3}}?\[?(?P<level>{LEVELS})\b\]?[\s:|\]-]+(?:[\w.]+:(?!\S*Error)\d*\s?)?"
)
LEVEL_WORD = re.compile(LEVELS)
BARE_LEVEL = re.compile(rf"\[?(?P<level>{LEVELS})\]?(?::[\w.]+)?(?::|\s[-|]|\s)\s*")

JSON_KEYS = (
    ("time", "timestamp", "ts", "asctime", "@timestamp"),
    ("level", "levelname", "severity", "lvl"),
    ("message", "msg", "log", "event", "text"),
    ("exc_info", "exception", "traceback", "stack_trace", "stacktrace", "stack"),
)
PROGRESS_STEP = re.compile(
    r"(?:^|[\s\[{(,|\"'])(?:global_?step|step|iter|iteration|it|batch"
    r"|update)s?[\"']?\s*[=:#\[]?\s*(\d[\d,]{0,12})(?:\s*/\s*\d+)?",
    re.IGNORECASE,
)
PROGRESS_OF = re.compile(r"[(\[ ](\d{1,12})/\d+[)\] ].{0,80}loss", re.IGNORECASE)
PROGRESS_METRIC = re.compile(
    r"loss|lr\b|it/s|s/it|tok|grad|\bms\b|samples|throughput|elapsed|acc|ppl|took|time|mfu|\d+\s*/\s*\d+", re.IGNORECASE
)
HAS_DIGIT = re.compile(r"\d")
TQDM = re.compile(r"\d{1,3}%\|.{0,200}\|\s*(\d{1,12})/\d+")
NOT_PROGRESS = re.compile(
    r"error|exception|fail|traceback|abort|timed? ?out|sigterm|killed|saving|saved|stopping"
    r"|resum|retry",
    re.IGNORECASE,
)

# Where a new attempt begins: what came before it was survived.
ATTEMPT = re.compile(
    r"(?:\[\w{1,40}\] )?(?:restarting worker group|worker group.{0,60}restart)|restart_count=[1-9]"
    r"|(?:windlass: )?restarting[:.]"
    r"|[=\-*# ]{0,40}(?:job |run |training )?(?:attempt|restart)[ #:]+(?:no\.? ?)?(?:[2-9]|\d\d)\b(?! ?(?:of"
    r"|/))[^a-z]{0,60}$"
    r"|[=\-*# ]{2,40}.{0,60}\battempt[ #:]+\d+.{0,40}"
    r"|(?:the )?job (?:was )?requeued|slurm_restart_count=[1-9]|restarting from (?:the )?(?:last|latest) checkpoint"
    r"|container restarted|starting attempt [2-9]|relaunching|restarting (?:training|job|workers)",
    re.IGNORECASE,
)
CAUGHT = re.compile(
    r"\bretry|\bretries\b|retrying|will try again|trying again|attempt \d+ ?(?:of|/) ?\d+|falling back|fallback"
    r"|ignoring|(?<!Exception )ignored|skipping|skipped|continuing|non-?fatal|recovered|using default",
    re.IGNORECASE,
)
GAVE_UP = re.compile(
    r"giv(?:e|ing|en) up|gave up|exhausted|max(?:imum)? (?:number of )?retries|no more (?:retries"
    r"|attempts)|final attempt",
    re.IGNORECASE,
)

# What launchers add when a process has ended.
LAUNCHER = re.compile(
    r"srun: |slurmstepd|={3,}|-{3,}|Root Cause|Failures:|\[\d+\]:|(?:time|host|rank|exitcode|error_file|traceback) +: "
    r"|\S+ FAILED|Sending process|.{0,40}exit(?:ed)? (?:with )?code|terminate called|\s*what\(\):|\[?E\d{4} "
)
HEADER = re.compile(r"\s*(?:\+ |\| )*(?:traceback +: )?(?:Exception Group )?Traceback \(most recent call last\):")
FRAME = re.compile(r'[\s>]*(?:\| )*File "(?P<file>[^"]{1,500})", line (?P<line>\d+)(?:, in (?P<function>.{1,200}))?')
RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.){0,12}[A-Za-z_]\w*)(?:: ?(?P<message>.*))?$", re.DOTALL)
BARE_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.){0,12}[A-Z]\w*(?:Error|Exception|Interrupt|Fault|NotFound|Timeout)"
    r"|(?:[a-z_]\w*\.){1,12}(?:exceptions?|errors?)\.[A-Z]\w*): (?P<message>\S.*)$"
)
EXCEPTION_GROUP, GROUP_MARGIN = "Exception Group Traceback", re.compile(r"(?:  )+(?:\| |\+ (?=Ex)|\+-[-+ \d]*$)")
CAUSE_LINK = "The above exception was the direct cause of the following exception"
CONTEXT_LINK = "During handling of the above exception, another exception occurred"
AFTER_MESSAGE = re.compile(
    rf"{CAUSE_LINK}|{CONTEXT_LINK}|Exception (?:in thread|ignored in)|\[|srun:|slurmstepd:|terminate called"
    r"|Fatal Python|Segmentation|Killed|==="
)
# A thread of torch or of C++ that ends the process with another's message.
NATIVE = re.compile(
    r"(?:\[[^\]]{1,80}\]:?\s*){0,4}(?:NCCL watchdog thread|Process group watchdog thread"
    r"|ProcessGroupNCCL\S*) (?:terminated with|caught) exception: (?P<watchdog>.*)"
    r"|what\(\): +(?P<what>.*)"
)
LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python3|<frozen|/opt/conda/lib|/windlass/|/torch/"
    r"|/transformers/|/usr/lib/"
)

REPORT = re.compile(
    r"^ *time +: (?P<time>\S+)\n *host +: (?P<host>.*)\n *rank +: (?P<rank>\d+) .*\n"
    r" *exitcode +: (?P<code>-?\d+).*\n(?: *error_file *: .*\n)?(?: *traceback *: (?P<words>.*))?",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Line:
    log: str
    rank: int | None
    order: int
    time: float | None
    level: str  # "", INFO, WARNING, ERROR, FATAL
    text: str  # without what transports and loggers put before it
    source: str = "text"  # text, nccl, glog
    layout: str = ""  # with its indentation, without the transport's prefix


@dataclass(frozen=True)
class Raised:
    """One exception of a chain."""

    type: str
    message: str
    frames: tuple[tuple[str, str], ...] = ()  # file, line of code
    link: str = ""  # how the next one came of it: cause or context

    @property
    def name(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    @property
    def ends_in_users_code(self) -> bool:
        return bool(self.frames) and not LIBRARY.search(self.frames[-1][0])

    @property
    def is_users_own(self) -> bool:
        """Raised by a `raise` in code that is no library: its message may quote anything."""
        return self.ends_in_users_code and self.frames[-1][1].startswith(("raise ", "assert "))

    @property
    def users_frame(self) -> tuple[str, str]:
        """The last frame in code that is no library, or the last one."""
        return next((frame for frame in reversed(self.frames) if not LIBRARY.search(frame[0])), self.frames[-1])

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True)
class Failure:
    """An exception that nobody caught, as far as the log tells."""

    line: Line  # where its last line stands
    chain: tuple[Raised, ...]
    begin: int
    end: int
    in_thread: bool = False

    @property
    def final(self) -> Raised:
        return self.chain[-1]


@dataclass(frozen=True)
class RankReport:
    """A rank in torchrun's summary of a failed group."""

    rank: int
    code: int
    time: float | None
    host: str
    words: str
    is_root: bool


@dataclass
class LogView:
    """One log, its last attempt only."""

    name: str
    rank: int | None
    lines: list[Line] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    reports: list[RankReport] = field(default_factory=list)
    progress: list[tuple[Line, int]] = field(default_factory=list)  # with the step
    covered: set[int] = field(default_factory=set)  # orders of lines inside tracebacks
    is_previous: bool = False  # of a container before the present one
    is_submission: bool = False

    def survived(self, order: int, rank: int | None) -> bool:
        """Whether this rank trained on after a line."""
        own = [(line.order, step) for line, step in self.progress if rank is None or line.rank in (rank, None)]
        last = next((step for at, step in reversed(own) if at < order), None)
        return any(at > order and step != last for at, step in own)

    def was_caught(self, begin: int, end: int) -> bool:
        """Whether the lines around an error say that it was retried or passed over, and the program went on."""
        near = [line for line in self.lines if begin - 3 <= line.order < begin or end < line.order <= end + 4]
        words = " ".join(line.text for line in near if line.order not in self.covered)
        if not CAUGHT.search(words) or GAVE_UP.search(words):
            return False
        after = [line for line in self.lines if line.order > end and line.order not in self.covered]
        return sum(line.level not in ("ERROR", "FATAL") and not LAUNCHER.match(line.text) for line in after) >= 3


def parse_log(log: Log, year: int) -> LogView:
    """A log as a view of its last attempt that says anything."""
    lines = list(_lines(log, year))
    begins = [
        0,
        *(i for i, line in enumerate(lines) if i and len(line.text) < 300 and ATTEMPT.match(line.text)),
        len(lines),
    ]
    view = LogView(log.name, log.rank)
    for begin, end in reversed(list(itertools.pairwise(begins))):
        view = _view(log, lines[begin:end])
        says_something = view.failures or view.progress or view.reports or len(view.lines) > 1
        if says_something or begin == 0:
            break
    view.is_previous = bool(re.search(r"prev|\.old|attempt-?0|last-?state", log.name, re.IGNORECASE))
    view.is_submission = log.is_submission
    return view


def year_of(logs: Iterable[Log]) -> int:
    """The year that times without one (glog's) are of."""
    for log in logs:
        match = re.search(r"\b(20\d\d)-\d\d-\d\d[T ]\d\d:", log.text)
        if match:
            return int(match[1])
    return 2000


def _view(log: Log, lines: Sequence[Line]) -> LogView:
    view = LogView(log.name, log.rank, list(lines))
    streams: dict[int | None, list[Line]] = {}
    for line in lines:
        streams.setdefault(line.rank, []).append(line)
    for stream in streams.values():
        view.failures += _failures(stream, view.covered)
    view.failures.sort(key=lambda failure: failure.begin)
    view.reports = _reports("\n".join(line.layout for line in lines))
    for line in lines:
        if line.order not in view.covered and (step := _step(line)) is not None:
            view.progress.append((line, step))
    return view


def _lines(log: Log, year: int) -> Iterable[Line]:
    raw = ANSI.sub("", log.text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    if len(raw) > FIRST_LINES + LAST_LINES:
        raw = raw[:FIRST_LINES] + raw[-LAST_LINES:]
    raw = [line for text in raw for line in (_of_json(text) if text[:1] == "{" else (text,))]
    has_groups = EXCEPTION_GROUP in log.text
    labels = sum(bool(SRUN_LABEL.match(line)) for line in raw[:400])
    is_labelled = labels >= 3 and labels * 10 >= 6 * len([line for line in raw[:400] if line.strip()])
    last_time: float | None = None
    for order, text in enumerate(raw):
        text, rank, when = text[:MOST_LINE], log.rank, None
        if is_labelled and (label := SRUN_LABEL.match(text)):
            rank, text = int(label[1]), text[label.end() :]
        for _ in range(4):
            match = TRANSPORT.match(text) if text[:1] in TRANSPORT_BEGINS else None
            if not match or not match.end():
                break
            number = match["rank"] or match["mpi"] or match["named"]
            rank = int(number) if number else rank
            when = moment(match["time"]) or when
            text = text[match.end() :]
        if has_groups:
            text = GROUP_MARGIN.sub("", text, count=1)
        if not text.strip():
            continue
        layout = text
        level, source, message, stamp = _logged(text.strip(), year)
        when = stamp or when
        last_time = when or last_time
        yield Line(log.name, rank, order, when or last_time, level, message, source, layout)


def _of_json(text: str) -> Sequence[str]:
    """A line of a logger that writes JSON, as one that writes text: time, level, message, and its traceback."""
    record = parse_record(text)
    if record is None:
        return (text,)
    time, level, message, trace = (
        next((str(record[key]) for key in keys if isinstance(record.get(key), str | int | float)), "")
        for keys in JSON_KEYS
    )
    return (f"{time} {level.upper()} {message}".strip(), *trace.split("\n")) if message else (text,)


def _logged(text: str, year: int) -> tuple[str, str, str, float | None]:
    """Level, source, message and time of a line as a logger wrote it."""
    nccl = NCCL.match(text) if "NCCL " in text else None
    stamp = STAMP.match(text) if text[:2].strip("[").isdigit() else None
    when = moment(stamp["time"]) if stamp else None
    if nccl:
        return ("WARNING" if nccl["level"] == "WARN" else "INFO"), "nccl", text[nccl.end() :], when
    glog = GLOG.match(text) if text[:1] in "[EWIF" else None
    if glog:
        clock = f"{year}-{(glog['month'] or '').zfill(2)}-{glog['day']}T{glog['clock']}{glog['fraction'] or ''}"[:29]
        level = {"E": "ERROR", "W": "WARNING", "I": "INFO", "F": "FATAL"}[glog["level"]]
        return level, "glog", text[glog.end() :], moment(clock)
    rest = text[stamp.end() :] if stamp else text
    match = (LEVEL if stamp else BARE_LEVEL).match(rest) if LEVEL_WORD.search(rest, 0, 200) else None
    if match:
        level = {"WARN": "WARNING", "CRITICAL": "FATAL"}.get(match["level"], match["level"])
        return level, "text", rest[match.end() :], when
    return ("WARNING" if re.match(r"[\w./<>-]{1,200}:\d+: \w*Warning: ", rest) else ""), "text", rest, when


def _step(line: Line) -> int | None:
    if line.level in ("WARNING", "ERROR", "FATAL") or line.source != "text":
        return None
    if not HAS_DIGIT.search(line.text, 0, 600):
        return None
    bar = TQDM.search(line.text) if "%|" in line.text else None
    if bar:
        return int(bar[1])
    if len(line.text) > 600 or not PROGRESS_METRIC.search(line.text) or NOT_PROGRESS.search(line.text):
        return None
    step = PROGRESS_STEP.search(line.text) or PROGRESS_OF.search(line.text)
    return int(step[1].replace(",", "")) if step else None


def _failures(stream: Sequence[Line], covered: set[int]) -> list[Failure]:
    """The tracebacks of one stream, chained ones together, and exceptions that were printed without theirs."""
    failures: list[Failure] = []
    chain: list[Raised] = []
    begin = index = 0
    in_group = False
    while index < len(stream):
        if HEADER.match(stream[index].text):
            if not chain and not in_group:
                begin = index
            raised, index = _traceback(stream, index)
            if raised is None:
                continue
            in_group = raised.name.endswith("ExceptionGroup") and index < len(stream)
            if in_group and HEADER.match(stream[index].text):  # what was raised in it says more
                continue
            in_group = False
            chain.append(raised)
            link = stream[index].text.strip() if index < len(stream) else ""
            if link.startswith((CAUSE_LINK, CONTEXT_LINK)):
                chain[-1] = Raised(
                    raised.type, raised.message, raised.frames, "cause" if link.startswith(CAUSE_LINK) else "context"
                )
                index += 1
                if index < len(stream) and HEADER.match(stream[index].text):
                    continue
            failures.append(_failure(stream, begin, index, chain))
            chain = []
        else:
            index += 1
    for failure in failures:
        covered.update(line.order for line in stream if failure.begin <= line.order <= failure.end)
    for line in stream:
        if (
            line.order in covered
            or line.level in ("INFO", "DEBUG", "WARNING")
            or line.source == "nccl"
            or ":" not in line.text
        ):
            continue
        match, native = BARE_EXCEPTION.match(line.text), NATIVE.match(line.text)
        if match:
            failures.append(Failure(line, (Raised(match["type"], match["message"]),), line.order, line.order))
        elif native:
            message = re.sub(r"^(?:\[[^\]]{1,80}\]:?\s*){1,4}", "", native["watchdog"] or native["what"] or "")
            failures.append(Failure(line, (Raised("RuntimeError", message),), line.order, line.order))
    return failures


def _failure(stream: Sequence[Line], begin: int, end: int, chain: list[Raised]) -> Failure:
    first, last = stream[begin], stream[max(begin, end - 1)]
    before = stream[begin - 1].text if begin else ""
    in_thread = bool(re.match(r"Exception (?:in thread|ignored in)", before))
    named = next((line for line in stream[begin:end] if str(chain[-1].type) in line.text), last)
    return Failure(named, tuple(chain), first.order, last.order, in_thread)


def _traceback(stream: Sequence[Line], index: int) -> tuple[Raised | None, int]:
    """The exception whose traceback begins at `index`, and the index behind it."""
    frames: list[tuple[str, str]] = []
    index += 1
    margin = ""  # a report may indent a whole traceback
    while index < len(stream):
        text = stream[index].layout
        frame = FRAME.match(text)
        if frame and not frames:
            margin = re.match(r"\s*", text)[0][2:]  # type: ignore[index]
        text = text.removeprefix(margin)
        if frame:
            code = stream[index + 1].layout.strip() if index + 1 < len(stream) else ""
            frames.append((frame["file"], "" if FRAME.match(code) else code))
        elif (not text.startswith((" ", "\t")) and not set(text.strip()) <= set("^~| +-.[]")) or HEADER.match(text):
            break
        index += 1
    if index >= len(stream) or HEADER.match(stream[index].text):
        return None, index
    match = RAISED.match(stream[index].text.strip())
    if match is None or stream[index].text.startswith((CAUSE_LINK, CONTEXT_LINK)):
        return None, index + 1 if index < len(stream) and not HEADER.match(stream[index].text) else index
    message = [match["message"] or ""]
    index += 1
    while index < len(stream) and len(message) < MOST_MESSAGE_LINES:
        line = stream[index]
        is_new = (
            line.level
            or line.source != "text"
            or HEADER.match(line.text)
            or STAMP.match(line.text)
            or _step(line) is not None
        )
        gap = line.order - stream[index - 1].order > 1 and line.rank is None
        quotes = len(message) > 1 and message[1].startswith("Original Traceback")  # of a data loader's worker
        if is_new or gap or AFTER_MESSAGE.match(line.text) or (BARE_EXCEPTION.match(line.text) and not quotes):
            break
        if inner := FRAME.match(line.layout):
            frames.append((inner["file"], stream[index + 1].layout.strip() if index + 1 < len(stream) else ""))
        message.append(line.text)
        index += 1
    return Raised(match["type"], "\n".join(message).strip(), tuple(frames)), index


def _reports(text: str) -> list[RankReport]:
    """The ranks in torchrun's last summary, the root cause first."""
    root_at = text.rfind("Root Cause (first observed failure)")
    if root_at < 0:
        return []
    begin = max(0, text.rfind("FAILED", 0, root_at) - 200)
    reports = [
        RankReport(
            rank=int(match["rank"][:6]),
            code=int(match["code"][:6]),
            time=moment(match["time"].replace("_", " ")),
            host=match["host"].strip(),
            words=(match["words"] or "").strip(),
            is_root=match.start() >= root_at,
        )
        for match in REPORT.finditer(text, begin)
    ]
    return sorted(reports, key=lambda report: not report.is_root)


def clock_text(when: float | None) -> str | None:
    if when is None:
        return None
    try:
        return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):  # no time that a clock shows
        return None
