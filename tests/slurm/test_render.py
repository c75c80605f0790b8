"""The sbatch script, as text: golden files, quoting, and what Slurm's own words come to. Starts nothing."""

import subprocess
from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.spec import parse_run
from windlass.targets.launch.torchrun import Place
from windlass.targets.slurm.checks import has_an_environment, limit_leaves_time, partition_of
from windlass.targets.slurm.queue import (
    QueuedJob,
    limit_broken,
    parse_accounting,
    parse_gpus,
    parse_partitions,
    parse_queue,
)
from windlass.targets.slurm.reasons import NEVER, WAITS, explain
from windlass.targets.slurm.render import render, render_sweep, sbatch_quote, time_limit, time_seconds

GOLDEN = Path(__file__).parent / "golden"
PLACE = Place(runs=Path("/fsx/me/runs"), working_directory=Path("/fsx/me"), python="/fsx/me/env/bin/python")
GPUS = {"nodes": 4, "gpus_per_node": 8, "processes_per_node": 8, "threads_per_process": 12}


def make(resources=None, name="llama", host=None, **slurm):
    return parse_run(
        {
            "name": name,
            "model": {"preset": "llama-tiny"},
            "data": {"source": "corpus:austen"},
            "resources": resources or GPUS,
            "target": {"kind": "slurm", "host": host, "slurm": slurm},
        }
    )


CASES = {
    "gpus": lambda: render(
        make(partition="p5", account="lab", qos="high", time="2d", constraint="h100&efa", exclusive=True), PLACE
    ),
    "cpus": lambda: render(
        make({"nodes": 3, "gpus_per_node": 0, "processes_per_node": 2, "threads_per_process": 4}), PLACE
    ),
    "container": lambda: render(
        make(container="/fsx/windlass.sqsh", container_mounts=["/data:/data"], gres="gpu:h100:8", requeue=False),
        Place(PLACE.runs, PLACE.working_directory, "python3"),
    ),
    "quoting": lambda: render(
        make(job_name="""it's "my" \\ run; $(x) #1""", setup=["module load cuda"], sbatch=["--mail-type=END"]),
        Place(Path("/fsx/it's 100% mine"), Path("/fsx/my work"), "/fsx/my env/bin/python"),
        faults="kill:rank=1,step=6",
    ),
    "sweep": lambda: render_sweep("llama", [make(), make()], [0, 2], PLACE)[0],
}


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    """`python -m tests.slurm.test_render` writes the files anew: read what changed before it is committed."""
    script = CASES[case]().script
    assert script == (GOLDEN / f"{case}.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_what_is_printed_is_what_is_sent():
    request = CASES["gpus"]()
    assert str(request) == f"# sbatch --parsable --comment=windlass:SUBMISSION < the following\n{request.script}"
    assert request.as_dict()["script"] == request.script


def test_a_sweep_is_an_array_for_all_that_ask_for_the_same():
    runs = [make(name=f"llama-{index}", time="4h" if index % 2 else "2h") for index in range(5)]
    first, second = render_sweep("llama", runs, [0, 1, 2, 3, 7], PLACE)
    assert (first.indices, second.indices) == ((0, 2, 7), (1, 3))
    assert ("--time=120" in first.script, "--time=240" in second.script) == (True, True)
    assert [folder.name for folder in first.folders] == ["llama-0", "llama-2", "llama-7"]
    left = first.only([1])
    assert left.command("ab") == ("sbatch", "--parsable", "--comment=windlass:ab", "--array=2")
    assert left.folders == (PLACE.runs / "llama-2",)


@pytest.mark.parametrize("option", ["--comment=for the lab", '--comment "for the lab"', "--comment='for the lab'"])
def test_the_users_own_comment_stays(option):
    request = render(make(sbatch=["--nice", option]), PLACE)
    assert request.command("ab")[2] == "--comment=for the lab windlass:ab"


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("plain-1.2_3", "plain-1.2_3"),
        ("two words", '"two words"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("it's", '"it\'s"'),
        ("back\\slash", '"back\\\\slash"'),
        ("", '""'),
    ],
)
def test_values_of_sbatch_lines(text, quoted):
    assert sbatch_quote(text) == quoted


@pytest.mark.parametrize(
    ("text", "sbatch", "seconds"),
    [
        ("90min", "90", 5400),
        ("4h", "240", 14400),
        ("2d", "2880", 172800),
        ("30:15", "30:15", 1815),
        ("1:30:00", "1:30:00", 5400),
        ("1-12", "1-12", 129600),
        ("1-12:30", "1-12:30", 131400),
        ("1-00:00:01", "1-00:00:01", 86401),
        ("UNLIMITED", "UNLIMITED", None),
    ],
)
def test_time_limits(text, sbatch, seconds):
    assert make(time=text).target.slurm.time == text
    assert time_limit(text) == sbatch
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"time": 240}, "needs a unit"),
        ({"time": "tomorrow"}, "no time limit"),
        ({"job_name": "a\n#SBATCH --nodes=100"}, "line break"),
        ({"sbatch": ["reservation=x"]}, "dash"),
        ({"partion": "x"}, "did you mean target.slurm.partition?"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(UserError) as error:
        make(**options)
    assert words in str(error.value)


def test_a_limit_must_leave_time_to_save_and_train():
    limit_leaves_time(make(time="4h"))
    with pytest.raises(UserError, match="leaves no time"):
        limit_leaves_time(make(time="2min"))


def test_over_ssh_it_must_be_said_where_windlass_is():
    has_an_environment(make(host="login", environment="/fsx/env"))
    with pytest.raises(UserError, match="where windlass is installed"):
        has_an_environment(make(host="login"))


SINFO = """\
debug*\x1fdebug\x1fup\x1f4\x1f8\x1f(null)
gpu\x1fgpu\x1fup\x1f2\x1f192+\x1fgpu:h100:8(S:0-1)
gpu\x1fgpu\x1fup\x1f1\x1f96\x1fgpu:4,nic:2
old\x1fold\x1fdown\x1f1\x1f8\x1f(null)
"""


def test_partitions():
    found = parse_partitions(SINFO)
    assert (found["gpu"].nodes, found["gpu"].cpus_per_node, found["gpu"].gpus_per_node) == (3, 96, 8)
    assert partition_of(make(), found).name == "debug"
    assert partition_of(make(partition="debug,gpu"), found).name == "debug"
    assert not found["old"].is_up
    with pytest.raises(UserError) as error:
        partition_of(make(partition="gpus"), found)
    assert error.value.fix == "target.slurm.partition=gpu"
    assert error.value.evidence == "partitions: debug, gpu, old"


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:8", 8),
        ("gpu:a100:4(S:0),gpu:h100:2", 6),
        ("nic:2", 0),
        ("", 0),
        ("gpu:a100", 1),
        ("gpu:gtx:no_consume:2,lscratch:800", 2),
    ],
)
def test_gpus_in_gres(gres, count):
    assert parse_gpus(gres) == count


def test_queue_and_accounting():
    assert parse_queue("Welcome!\x1f12\x1fPENDING\x1fResources\n\x1f13_2\x1fRUNNING\x1fNone\n") == {
        "12": QueuedJob("PENDING", "Resources"),
        "13_2": QueuedJob("RUNNING", "None"),
    }
    cancelled = "c\x1f12\x1fCANCELLED by 1000\x1f0:15\nc\x1f13\x1fCOMPLETED\x1f0:0\n"
    assert parse_accounting(cancelled, "12") == QueuedJob("CANCELLED", exit_code=0)
    assert parse_accounting("Welcome\nc\x1f12\x1fFAILED\x1f75:0\nBye\n", "12") == QueuedJob("FAILED", exit_code=75)
    assert parse_accounting("", "12") is None


@pytest.mark.parametrize(
    ("asked", "given", "limit"),
    [
        (
            {"TimeLimit": "3-00:00:00"},
            {"MaxTime": "01:00:00"},
            "PartitionTimeLimit, 3-00:00:00 asked, 01:00:00 at most",
        ),
        ({"TimeLimit": "00:30:00"}, {"MaxTime": "01:00:00"}, None),
        ({"TimeLimit": "3-00:00:00"}, {"MaxTime": "UNLIMITED"}, None),
        ({"TimeLimit": "Partition_Limit"}, {"MaxTime": "01:00:00"}, None),
        ({"NumNodes": "3-3"}, {"MaxNodes": "2", "TotalNodes": "8"}, "PartitionNodeLimit, 3 asked, 2 at most"),
        ({"NumNodes": "9"}, {"MaxNodes": "UNLIMITED", "TotalNodes": "4"}, "PartitionNodeLimit, 9 asked, 4 at most"),
        ({"NumNodes": "2"}, {"MaxNodes": "2", "TotalNodes": "4"}, None),
        ({}, {}, None),
    ],
)
def test_a_vague_reason_is_made_plain_by_the_limits_themselves(asked, given, limit):
    assert limit_broken(asked, given) == limit


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "it cannot start: it is held (JobHeldUser); scontrol release 12"),
        ("Resources", "the nodes it needs are busy (Resources)"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved (ReqNodeNotAvail, Unavail"),
        ("Job's account not permitted to use this partition (p allows a not b)", "its account may not use"),
        ("SomethingNew", "Slurm says: SomethingNew"),
    ],
)
def test_reasons_in_plain_words(reason, words):
    assert words in explain(reason, job="12", name="llama")


def test_every_reason_has_a_sentence():
    assert not WAITS.keys() & NEVER.keys()
    for what, fix in NEVER.values():
        assert what
        assert fix.format(job="1", name="n")


if __name__ == "__main__":
    for name, case in CASES.items():
        (GOLDEN / f"{name}.sbatch").write_text(case().script)
