"""What follows the end of the ranks of all pods, decided once for all of them."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from windlass.common.files import read_json_lines
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.targets.kubernetes.entry import BROKEN
from windlass.targets.kubernetes.pod.attempt_history import AttemptHistory
from windlass.targets.kubernetes.pod.launching import describe_limit, oom_kills
from windlass.targets.kubernetes.pod.verdict import NodeEnd, verdict
from windlass.targets.launch.decision import Done, RankDeath

FRESH, SPENT = [], [{"event": "restart", "class": "node_lost"}] * 3
PEER_LOST = {"rank": 1, "error": "RuntimeError: Connection closed by peer", "retry": True, "time": 2.0}
NOT_FINITE = {"rank": 2, "error": "the loss is not finite", "retry": False, "exit_code": 1, "time": 1.0}
NO_RENDEZVOUS = {"rank": 1, "error": "the ranks could not meet", "retry": False, "exit_code": 2, "time": 1.0}
KILLED = RankDeath(2, -9, "t1")


def events(*names):
    return [{"event": "launched"}, *({"event": name, "step": 4} for name in names)]


CASES = {
    "all well": ([NodeEnd(0), NodeEnd(1)], (), FRESH, Done("finished", 0)),
    "a killed rank": (
        [NodeEnd(0, 1, errors=(PEER_LOST,)), NodeEnd(1, 1, deaths=(KILLED,))],
        (),
        FRESH,
        ("again", "rank 2 was killed by SIGKILL"),
    ),
    "a rank that the kernel killed for its memory": (
        [NodeEnd(0, 1, errors=(PEER_LOST,)), NodeEnd(1, 1, deaths=(KILLED,), out_of_memory="the limit of 8 GiB")],
        (),
        FRESH,
        ("again", "node 1 ran out of memory: the limit of 8 GiB"),
    ),
    "a lost pod": (
        [NodeEnd(0, 1, errors=(PEER_LOST,)), NodeEnd(1, -1, lost="the connection was closed")],
        (),
        FRESH,
        ("again", "node 1 was lost: the connection was closed"),
    ),
    "a lost pod too many": (
        [NodeEnd(0, 1), NodeEnd(1, -1, lost="gone")],
        (),
        SPENT,
        Done("failed", 1, "node 1 was lost: gone; given up after 3 restarts without a new checkpoint"),
    ),
    "an error that would come again": (
        [NodeEnd(0, 1, errors=(PEER_LOST,)), NodeEnd(1, 1, errors=(NOT_FINITE,))],
        (),
        FRESH,
        Done("failed", 1, "the loss is not finite"),
    ),
    "an error that would come again, beside a lost pod": (
        [NodeEnd(0, 1, errors=(NOT_FINITE,)), NodeEnd(1, -1, lost="gone")],
        (),
        FRESH,
        Done("failed", 1, "the loss is not finite"),
    ),
    "ranks that did not meet": (
        [NodeEnd(0, 1, errors=(NO_RENDEZVOUS,)), NodeEnd(1, 1)],
        (),
        FRESH,
        ("again", "the pods did not meet"),
    ),
    "a taken port": ([NodeEnd(0, 1, trouble=True), NodeEnd(1, 1)], (), FRESH, ("again", "the pods did not meet")),
    "a drained pod that saved": (
        [NodeEnd(0, 1), NodeEnd(1, 1, leaving=True)],
        ("preempted",),
        FRESH,
        ("again", "node 1 was told to leave; saved first"),
    ),
    "a drained pod that saved, with no restarts left": (
        [NodeEnd(0, 1), NodeEnd(1, 1, leaving=True)],
        ("preempted",),
        SPENT,
        ("again", "node 1 was told to leave; saved first"),
    ),
    "a drained pod that did not save": (
        [NodeEnd(0, 1), NodeEnd(1, 1, leaving=True)],
        (),
        FRESH,
        ("again", "node 1 was told to leave before a checkpoint"),
    ),
    "all told and saved": (
        [NodeEnd(0, 1, leaving=True), NodeEnd(1, 1, leaving=True)],
        ("preempted",),
        FRESH,
        Done("preempted", 75, "told to leave; saved first"),
    ),
    "all told and not saved": (
        [NodeEnd(0, 1, leaving=True), NodeEnd(1, 1, leaving=True)],
        (),
        FRESH,
        Done("stopped", 130, "told to leave, without a new checkpoint"),
    ),
    "ranks told without any pod being told": (
        [NodeEnd(0, 1), NodeEnd(1, 1)],
        ("preempted",),
        FRESH,
        ("again", "saved to start anew"),
    ),
    "a pod lost after the last step": (
        [NodeEnd(0), NodeEnd(1, -1, lost="gone")],
        ("finished",),
        FRESH,
        Done("finished", 0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case):
    ends, happened, budget, expected = CASES[case]
    decided = verdict(ends, events(*happened), budget, 3)
    if isinstance(expected, Done):
        assert replace(decided, name=None) == expected
    else:
        assert (decided.action, decided.reason) == ("retry", expected[1])
        assert ("told to leave" in decided.reason or decided.reason.startswith("saved")) == (decided.left is None)


def test_an_export_that_failed_is_not_trained_again():
    """The other pods are gone by then: waiting for them would be for ever."""
    ends = [NodeEnd(0, 1, deaths=(KILLED,)), NodeEnd(1)]
    decided = verdict(ends, events("finished"), FRESH, 3, export=True)
    assert decided == Done("failed", 1, "trained to the end, but the export did not finish")
    assert verdict(ends, events("finished", "exported"), FRESH, 3, export=True) == Done("finished", 0)


@pytest.fixture
def history(tmp_path):
    run = parse_run(
        {
            "name": "tiny",
            "model": {"preset": "llama-tiny"},
            "data": {"source": "corpus:austen"},
            "target": {"kind": "kubernetes", "max_restarts": 2},
        }
    )
    made = AttemptHistory(RunFolder(tmp_path / "tiny"), run)
    made.open()
    return made


def lose(history, submission="a"):
    attempt = history.launched(submission, [0, 1], ["p0", "p1"])
    if attempt is None:
        return history.end
    return history.conclude(attempt, [NodeEnd(0, 1), NodeEnd(1, -1, lost="gone")], saving=None)


def test_restarts_without_progress_end(history):
    assert lose(history).action == "retry"
    assert lose(history).action == "retry"
    done = lose(history)
    assert isinstance(done, Done)
    assert "given up after 2 restarts" in done.reason
    assert history.ended_before("a") == replace(done, name=None)
    assert history.ended_before("b") is None  # somebody submitted it again


def test_a_checkpoint_fills_the_budget_up(history):
    for step in range(10):
        assert lose(history).action == "retry"
        history.folder.record("checkpoint", step=step)


def test_attempts_are_counted_over_the_lives_of_node_0(history):
    lose(history)
    again = AttemptHistory(history.folder, history.run)
    again.open()
    assert again.launched("a", [0, 1], ["p0", "p1"]) == 2


def test_a_drained_pod_that_was_alone_is_a_restart_of_the_run(history):
    """Node 0 writes down that it was told to leave; the pod that comes in its place that it goes on."""
    attempt = history.launched("a", [0], ["p0"])
    history.folder.record("preempted", step=80)
    assert history.conclude(attempt, [NodeEnd(0, 143, leaving=True)], saving=None).state == "preempted"
    successor = AttemptHistory(history.folder, history.run)
    successor.open()
    assert successor.ended_before("a") is None
    assert successor.launched("a", [0], ["p0-new"]) == 2
    events = [record for record in read_json_lines(history.folder.history) if record["event"] == "restart"]
    assert [(event["attempt"], event["why"]) for event in events] == [(2, "the pod of node 0 was replaced")]
    assert successor.launched("b", [0], ["p0-anew"]) == 3  # somebody submitted it again: no restart
    assert len([record for record in read_json_lines(history.folder.history) if record["event"] == "restart"]) == 1


@pytest.mark.parametrize(
    ("files", "kills", "limit"),
    [
        ({"memory.events": "low 0\noom 2\noom_kill 3\n", "memory.max": "8589934592\n"}, 3, "of 8 GiB"),
        ({"memory/memory.oom_control": "under_oom 0\noom_kill 1\n", "memory/memory.limit_in_bytes": "1073741824"}, 1,
         "of 1 GiB"),
        ({"memory.events": "oom_kill 0\n", "memory.max": "max\n"}, 0, "limit was reached"),
        ({}, 0, "limit was reached"),
    ],
)  # fmt: skip
def test_what_the_kernel_killed_for_memory_is_counted(tmp_path, files, kills, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == kills
    assert limit in describe_limit(tmp_path)
    assert "target.kubernetes.memory" in describe_limit(tmp_path)


def test_a_folder_of_another_run_is_refused(history):
    from windlass.errors import UserError

    other = history.run.model_copy(update={"train": history.run.train.model_copy(update={"seed": 5})})
    AttemptHistory(history.folder, other).open()  # nothing was saved that belongs to the first
    history.folder.record("checkpoint", step=5, tier="shared")
    with pytest.raises(UserError, match="exists with other settings"):
        AttemptHistory(history.folder, history.run).open()


def test_an_entry_that_breaks_is_worth_another_pod_and_one_that_is_refused_is_not(history, tmp_path):
    """Codes of 1 and 2 end the job; a file system that is away must not."""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    environment = {
        **os.environ,
        "WINDLASS_RUN_FILE": str(history.folder.run_file),
        "WINDLASS_SCRATCH": str(in_the_way / "scratch"),
        "WINDLASS_RUNS": str(tmp_path),
        "WINDLASS_NODE_INDEX": "0",
    }
    command = [sys.executable, "-m", "windlass.targets.kubernetes.entry"]
    broken = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert broken.returncode == BROKEN, broken.stderr
    assert "NotADirectoryError" in broken.stderr
    lost = {**environment, "WINDLASS_NODE_INDEX": ""}
    refused = subprocess.run(command, env=lost, capture_output=True, text=True, check=False)
    assert refused.returncode == 2, refused.stderr


def test_what_runs_in_pods_needs_nothing_of_the_client():
    program = "import sys, windlass.targets.kubernetes.entry, windlass.targets.kubernetes.pod.hyperpod_agent\n"
    program += "print(*sorted(name for name in sys.modules if name.startswith(('windlass.targets.', 'httpx2'))))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    rooms = ("windlass.targets.kubernetes.entry", "windlass.targets.kubernetes.pod", "windlass.targets.launch")
    assert [name for name in loaded if not name.startswith(rooms)] == [
        "windlass.targets.kubernetes",
        "windlass.targets.protocol",
    ]
