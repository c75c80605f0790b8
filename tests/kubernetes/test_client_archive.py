"""The archive: what pods say is kept once, whoever is killed when."""

import json
import os
import resource
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.common.files import append_json_line, read_json_lines
from windlass.runfolder import RunFolder
from windlass.targets.kubernetes.watch import archive as archive_module
from windlass.targets.kubernetes.watch.archive import Skipper, opened
from windlass.targets.kubernetes.watch.logs import full_moment, parse_line


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def stamp(tick):
    return f"2026-11-15T06:00:{tick // 10:02d}.{tick % 10:09d}Z"


def read(archive, lines, node=0):
    """Read a pod's whole log once more, as the API gives it: from the second of the cursor on."""
    cursor = archive.cursor("pod")
    since = cursor.second() or ""
    skipper = Skipper(cursor)
    for tick, text in lines:
        if stamp(tick)[:19] >= since[:19]:
            archive.take(skipper, stamp(tick), text, node)


LINES = [
    (0, "[rank 0] a"),
    (0, "[rank 0] a"),
    (1, "[rank 1] b"),
    (1, "torchrun"),
    (7, "[rank 0] a"),
    (12, "[rank 0] c"),
]


def test_lines_go_where_they_belong(folder):
    with opened(folder) as archive:
        read(archive, [*LINES, (13, "[rank 12] \rprogress\rbar"), (14, "")])
    assert folder.rank_log(0).read_text() == "a\na\na\nc\n"
    assert folder.rank_log(1).read_text() == "b\n"
    assert folder.rank_log(12).read_bytes() == b"\rprogress\rbar\n"
    assert (folder.logs / "launcher-0.log").read_text() == "torchrun\n\n"


def test_a_second_look_adds_only_what_is_new(folder):
    for upto in range(len(LINES) + 1):
        with opened(folder) as archive:
            read(archive, LINES[:upto])
    assert folder.rank_log(0).read_text() == "a\na\na\nc\n"


@pytest.mark.slow
@given(
    ticks=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    deaths=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(0, 3)), max_size=5),
)
def test_keepers_that_are_killed_lose_and_repeat_nothing(tmp_path_factory, ticks, deaths):
    """Each keeper reads some lines, may write its cursors down, and dies; a torn line may be left."""
    folder = RunFolder(tmp_path_factory.mktemp("archive") / "run")
    lines = [(tick, f"[rank 0] line {tick % 3}") for tick in sorted(ticks)]
    furthest = 0
    for upto, commits, torn in deaths:
        with opened(folder) as archive:
            read(archive, lines[:upto])
            if commits:
                archive.commit()
            archive.commit = lambda: None  # killed: nothing is written down at the end
        furthest = max(furthest, upto)
        if torn and upto == furthest < len(lines) and folder.rank_log(0).exists():  # it died while it wrote a line
            with folder.rank_log(0).open("ab") as file:
                file.write(lines[upto][1].removeprefix("[rank 0] ").encode()[:torn])
    with opened(folder) as archive:
        read(archive, lines)
    kept = folder.rank_log(0).read_text().splitlines()
    assert kept == [text.removeprefix("[rank 0] ") for _, text in lines]


def record(kind, offset, value, origin="abcd1234"):
    return f"windlass-record {kind} {origin}@{offset} {json.dumps(value, separators=(',', ':'))}"


def test_records_that_come_again_are_passed_over(folder):
    first, second = {"event": "started"}, {"event": "checkpoint", "step": 3}
    size = len(json.dumps(first, separators=(",", ":"))) + 1
    with opened(folder) as archive:
        read(archive, [(0, record("history", 0, first)), (1, record("history", size, second))])
        replacement = Skipper(archive.cursor("another pod"))
        for tick, value, offset in ((5, first, 0), (6, second, size)):
            archive.take(replacement, stamp(tick), record("history", offset, value), 0)
    assert list(read_json_lines(folder.history)) == [first, second]


def test_this_machines_own_records_stay_among_them(folder):
    folder.logs.mkdir(parents=True)
    folder.record("submitted", job="x")
    with opened(folder) as archive:
        read(archive, [(0, record("history", 0, {"event": "started"}))])
        append_json_line(folder.history, {"event": "stop-requested"})
        archive.commit = lambda: None
    with opened(folder) as archive:
        read(archive, [(0, record("history", 0, {"event": "started"}))])
    assert [record["event"] for record in read_json_lines(folder.history)] == ["submitted", "started", "stop-requested"]


def test_what_pods_said_that_are_gone_is_fetched(folder):
    """The first record here begins in the middle of the cluster's file: the part before it is asked for."""
    asked = []
    earlier = b'{"kind":"step","step":1}\n{"kind":"step","step":2}\n'

    def fill(kind, begin, end):
        asked.append((kind, begin, end))
        return earlier[begin:end]

    with opened(folder, fill) as archive:
        read(archive, [(0, record("metrics", len(earlier), {"kind": "step", "step": 3}))])
        size = len(earlier) + len('{"kind":"step","step":3}') + 1
        read(archive, [(1, record("metrics", size, {"kind": "step", "step": 4}))])
    assert asked == [("metrics", 0, len(earlier))]
    assert [record["step"] for record in read_json_lines(folder.metrics)] == [1, 2, 3, 4]


def test_errors_of_ranks_become_their_files(folder):
    error = {"rank": 3, "attempt": 1, "error": "boom"}
    with opened(folder) as archive:
        read(archive, [(0, f"windlass-record error - {json.dumps(error)}")])
    assert json.loads(folder.rank_error(3).read_text()) == error


def test_one_keeper_at_a_time(folder):
    with opened(folder) as first, opened(folder) as second:
        assert first is not None
        assert second is None
    with opened(folder) as third:
        assert third is not None
    assert (folder.logs / archive_module.CURSOR_FILE).exists()


def test_moments_are_compared_in_full():
    assert full_moment("2026-11-15T06:00:00Z") == "2026-11-15T06:00:00.000000000Z"
    assert full_moment("2026-11-15T06:00:00.5Z") < full_moment("2026-11-15T06:00:00.51Z")
    assert full_moment("unable to retrieve container logs") is None
    assert full_moment("2026-11-15T08:00:00.25+02:00") == "2026-11-15T06:00:00.250000000Z"  # a node's own time zone
    assert full_moment("2026-11-14T22:30:00-07:30") == "2026-11-15T06:00:00.000000000Z"
    assert full_moment("0001-01-01T00:00:00+23:00") is None


PIECES = [
    "[rank ",
    "] ",
    "windlass-record ",
    "metrics ",
    "error ",
    "history - ",
    "ab@",
    "7",
    "{",
    "}",
    '"rank":',
    "-1",
    "x",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join).map(str.encode)


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(st.binary(max_size=40) | TEXTS, max_size=12), stamped=st.booleans())
def test_fuzz_whatever_a_pod_writes_the_next_line_is_kept(tmp_path_factory, lines, stamped):
    folder = RunFolder(tmp_path_factory.mktemp("fuzz") / "run")
    raw = [line.replace(b"\n", b"") for line in lines]
    whole = [f"{stamp(0)} ".encode() + line if stamped else line for line in raw]
    with opened(folder) as archive:
        skipper = Skipper(archive.cursor("pod"))
        for line in (*whole, f"{stamp(1)} [rank 999] last".encode()):
            said = parse_line(line)
            if said is not None:
                archive.take(skipper, *said, 0)
    assert folder.rank_log(999).read_text().splitlines()[-1] == "last"
    if stamped and not any(line.startswith((b"[rank ", b"windlass-record ")) for line in raw) and raw:
        assert (folder.logs / "launcher-0.log").read_bytes() == b"".join(line + b"\n" for line in raw)


@pytest.fixture
def few_handles():
    """As on a Mac: 256 open files at most, many of them taken by connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 80, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_ranks_need_few_file_handles(folder, few_handles):
    with opened(folder) as archive:
        for turn in range(2):
            for node in range(128):
                skipper = Skipper(archive.cursor(f"pod-{node}"))
                for rank in range(node * 8, node * 8 + 8):
                    archive.take(skipper, stamp(turn * 10 + rank % 8), f"[rank {rank}] line {turn}", node)
        archive.commit()
    assert len(list(folder.logs.glob("rank-*.log"))) == 1024
    assert {path.read_text() for path in folder.logs.glob("rank-*.log")} == {"line 0\nline 1\n"}


def test_a_line_that_cannot_be_written_is_not_passed_over(folder):
    """The cursor moves after the write: what a full disk refused comes again, once, when there is room."""
    lines = [(tick, f"[rank {tick % 3}] {'x' * 50} {tick}") for tick in range(30)]
    with opened(folder) as archive:
        read(archive, lines[:10])
        full = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = folder.rank_log(0).stat().st_size + 75  # in the middle of a line
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, full[1]))
        try:
            for _ in range(3):
                with pytest.raises(OSError, match=r"File too large|No space left"):
                    read(archive, lines)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, full)
        read(archive, lines)
    for rank in range(3):
        wanted = [text.removeprefix(f"[rank {rank}] ") for tick, text in lines if tick % 3 == rank]
        assert folder.rank_log(rank).read_text().splitlines() == wanted


def test_records_that_cannot_be_written_are_not_passed_over(folder):
    earlier = b'{"kind":"step","step":1}\n{"kind":"step","step":2}\n'
    third = [(0, record("metrics", len(earlier), {"kind": "step", "step": 3}))]
    full = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with opened(folder, lambda kind, begin, end: earlier[begin:end]) as archive:
        for limit in (10, 30, 60):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, full[1]))
            try:
                with pytest.raises(OSError, match=r"File too large|No space left"):
                    read(archive, third)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, full)
        read(archive, third)
    assert [record["step"] for record in read_json_lines(folder.metrics)] == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        f"[rank {'9' * 5000}] a",
        "[rank 99999999] a",
        "[rank ٣] a",
        f"windlass-record metrics ab@{'9' * 5000} {{}}",
        'windlass-record error - {"rank": Infinity}',
        'windlass-record error - {"rank": -1}',
        f"windlass-record error - {'{' * 5000}}}",
        'windlass-record metrics ab@0 {"a":"\udcff"}',
        "\udcff\udcfe",
    ],
)
def test_lines_that_no_pod_of_ours_says_end_nothing(folder, text):
    with opened(folder) as archive:
        read(archive, [(0, text), (1, "[rank 0] next")])
    assert folder.rank_log(0).read_text() == "next\n"
    assert {path.name for path in folder.logs.glob("rank-*")} <= {"rank-0000.log"}
