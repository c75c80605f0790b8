"""What Slurm, its login shells and damaged files print: read, or passed over, and never a traceback. Starts nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runfolder import RunFolder
from windlass.targets.launch.progress import is_stop_requested
from windlass.targets.slurm.attempt import JobFacts
from windlass.targets.slurm.commands import ignored_options, without_options
from windlass.targets.slurm.queue import (
    JOB_NUMBER,
    SEPARATOR,
    QueuedJob,
    fields_of,
    limit_broken,
    parse_accounting,
    parse_comments,
    parse_exit_code,
    parse_gpus,
    parse_partitions,
    parse_queue,
    parse_sbatch,
)
from windlass.targets.slurm.reasons import explain
from windlass.targets.slurm.state import JOB_FILE, SubmittedJob

# text that is likely to look like Slurm's, beside text that is not
NUMBERS = ("12", "12_3", "9" * 30, "64+", "1-12:00:00", "75:0", "0:15", "12;cluster", "²", "٣")
NAMES = (
    "debug*",
    "up",
    "None",
    "PENDING",
    "CANCELLED by 0",
    "gpu:8",
    "gpu:a:" + "9" * 5000,
    "windlass:0123456789abcdef",
)
FACTS = ("JobState=X", " Restarts=9x", "ExitCode=1:", "TimeLimit=9-99:99:99", "NumNodes=3-3", "MaxNodes=" + "9" * 5000)
WORDS = st.sampled_from([*NUMBERS, *NAMES, *FACTS, SEPARATOR, "\n", "|", "=", " "])
LINES = st.lists(st.one_of(WORDS, st.text(max_size=8))).map("".join)
# what a login shell says, line by line, before and after; SEPARATOR is what nobody prints
BANNER = st.lists(st.text(st.characters(blacklist_characters=SEPARATOR + "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029")))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), LINES),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
)


@given(LINES)
def test_every_parser_takes_anything(text):
    parse_partitions(text)
    parse_gpus(text)
    parse_exit_code(text)
    limit_broken(fields_of(text), fields_of(text[::-1]))
    explain(text, job="1", name="n")
    assert all(JOB_NUMBER.fullmatch(number) for number in parse_queue(text))
    assert all(JOB_NUMBER.fullmatch(number) for number in parse_comments(text, "0123456789abcdef"))
    number = parse_sbatch(text)
    assert number is None or (number.isascii() and number.isdecimal())
    found = parse_accounting(text, "12")
    assert found is None or found.state
    facts = JobFacts.parse(text, asked_restarts=1)
    assert isinstance(facts.requeued, bool)


def row(*fields):
    return SEPARATOR.join(fields)


@given(BANNER, BANNER)
def test_a_login_shell_may_print_what_it_likes_around_the_answer(before, after):
    def among(*lines):
        return "\n".join([*before, *lines, *after])

    partitions = among(row("gpu*", "gpu", "up", "2", "96+", "gpu:8"), row("old", "old", "down", "1", "8", "(null)"))
    found = parse_partitions(partitions)
    assert sorted(found) == ["gpu", "old"]
    assert (found["gpu"].is_default, found["gpu"].gpus_per_node, found["gpu"].cpus_per_node) == (True, 8, 96)
    assert parse_queue(among(row("", "12", "PENDING", "Resources"))) == {"12": QueuedJob("PENDING", "Resources")}
    assert parse_queue("".join(before) + row("", "12_3", "RUNNING", "None")) == {"12_3": QueuedJob("RUNNING", "None")}
    assert parse_comments(among(row("", "7", "mine windlass:ab"), row("", "8", "windlass:cd")), "ab") == ["7"]
    assert parse_accounting(among(row("c", "12", "FAILED", "75:0")), "12") == QueuedJob("FAILED", exit_code=75)
    assert parse_sbatch(among("12;cluster")) in ("12", None)  # another lone number: the queue will be asked


@given(st.one_of(JSON.map(lambda value: json.dumps(value, default=str)), LINES))
def test_a_record_is_whole_or_no_record(tmp_path_factory, text):
    folder = RunFolder(tmp_path_factory.getbasetemp() / "fuzzed")
    folder.path.mkdir(exist_ok=True)
    (folder.path / JOB_FILE).write_text(text, encoding="utf-8", errors="replace")
    record = SubmittedJob.of(folder)
    if record is not None:
        assert record.number or record.submission
        assert record.number is None or JOB_NUMBER.fullmatch(record.number)
        assert record.host is None or not record.host.startswith("-")


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "job": st.one_of(st.none(), WORDS, st.integers()),
        "host": st.one_of(st.none(), st.sampled_from(["login", "-oProxyCommand=x", ""]), st.integers()),
        "submission": st.one_of(st.none(), st.just("0123456789abcdef"), WORDS),
        "index": st.one_of(st.none(), st.integers(), WORDS),
        "folder": st.one_of(st.none(), st.just("/runs/a"), st.integers()),
    },
)


@given(FIELDS)
def test_what_is_read_is_what_was_written(value):
    try:
        record = SubmittedJob.parse(value)
    except ValueError:
        return
    assert SubmittedJob.parse(json.loads(json.dumps(record.as_dict()))) == record


@given(st.lists(st.sampled_from(["stop-requested", "stop-refused", "checkpoint"])))
def test_a_refused_stop_is_no_stop(events):
    expected = [event for event in events if event != "checkpoint"][-1:] == ["stop-requested"]
    assert is_stop_requested([{"event": event} for event in events]) == expected


def test_the_history_knows_the_job_where_its_record_is_damaged(tmp_path):
    folder = RunFolder(tmp_path)
    first = SubmittedJob(None, None, "0123456789abcdef", None, str(tmp_path))
    folder.record("submitting", **first.as_dict())
    assert SubmittedJob.of(folder) == first
    confirmed = first.confirm(folder, "12")
    (folder.path / JOB_FILE).write_text("{")
    assert SubmittedJob.of(folder) == confirmed
    folder.record("submitting", **SubmittedJob(None, None, "fedcba9876543210", None, str(tmp_path)).as_dict())
    folder.record("not-submitted", submission="fedcba9876543210")
    assert SubmittedJob.of(folder) == confirmed


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        *[(name, False) for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_STATES", "SINFO_PARTITION")],
        *[(name, True) for name in ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "PATH", "MY_SBATCH_X")],
    ],
)
def test_variables_that_slurm_would_take_for_options(name, stays):
    assert (name in without_options({name: "x"})) == stays
    assert (name in ignored_options({name: "x"})) == name.startswith("SBATCH_")
