"""The coordinator and its pods: real sockets, no training. Each pod here is a connection and a few messages."""

import json
import os
import resource
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.common.files import read_json_lines
from windlass.diagnose.decision import Decision
from windlass.runfolder import RunFolder
from windlass.spec import parse_run
from windlass.targets.kubernetes.pod import coordinator as coordinator_module
from windlass.targets.kubernetes.pod.attempt_history import AttemptHistory
from windlass.targets.kubernetes.pod.coordinator import Coordinator
from windlass.targets.kubernetes.pod.messages import (
    LONGEST_UNPROVEN,
    Hello,
    Line,
    LostError,
    end_of_node,
    is_proof,
    knock,
    proof,
)
from windlass.targets.kubernetes.pod.verdict import NodeEnd, verdict
from windlass.targets.launch.decision import Done, RankDeath

PATIENCE = 60.0
TOKEN = "secret of the submission"


class Pod:
    def __init__(self, port, node, *, born=1.0, submission="a", token=TOKEN):
        self.node = node
        self.line = Line.to(("127.0.0.1", port), timeout=PATIENCE)
        host = knock(self.line, TOKEN, PATIENCE)
        host.send_hello(token, node=node, pod=f"pod-{node}", born=born, submission=submission)

    def receive(self):
        """The next message that is not a heartbeat."""
        self.waiting = getattr(self, "waiting", [])
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            while self.waiting:
                message = self.waiting.pop(0)
                if message["word"] != "beat":
                    return message
            self.waiting += self.line.receive(1.0)
        raise AssertionError(f"node {self.node} received nothing")

    def expect(self, word):
        message = self.receive()
        while message["word"] in ("over", "again") and message["word"] != word:  # asides, for whom they concern
            message = self.receive()
        assert message["word"] == word, message
        return message

    def end(self, attempt, code=0, **facts):
        self.line.send(word="end", attempt=attempt, end=NodeEnd(self.node, code, **facts).as_dict())

    def is_cut_off(self):
        return is_cut_off(self.line)


def started_pods(port, number):
    pods = [Pod(port, node) for node in range(number)]
    for pod in pods:
        pod.expect("start")
    return pods


def pods_with_a_replaced_one(port):
    """A drained pod: Kubernetes makes the new one while the old one still saves."""
    pods = started_pods(port, 3)
    pods[2].line.send(word="leaving")
    for pod in pods:
        pod.expect("save")
    return pods, Pod(port, 2, born=2.0)


def end_of_attempt(pods):
    """What the others do when the coordinator has ended an attempt."""
    for pod in pods:
        pod.expect("over")
    for pod in pods:
        pod.end(1, code=1)


def until_lost(line):
    """Everything that comes, until the other side is gone or is cut off."""
    while True:
        try:
            messages = line.receive(PATIENCE)
        except LostError:
            return
        yield from messages


def is_cut_off_while_it_drips(line):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            line.connection.sendall(b" ")
            line.receive(0.1)
        except (LostError, OSError):
            return True
    return False


def is_cut_off(line):
    try:
        while True:
            line.receive(PATIENCE)
    except LostError:
        return True


@pytest.fixture
def coordinate(tmp_path):
    run = parse_run({"name": "tiny", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}})
    history = AttemptHistory(RunFolder(tmp_path / "tiny"), run)
    history.open()
    opened = []

    def start_coordinator(nodes=3, min_nodes=None, quiet_seconds=0.5):
        listener = socket.create_server(("127.0.0.1", 0))
        coordinator = Coordinator(
            listener,
            history,
            nodes=nodes,
            min_nodes=min_nodes or nodes,
            submission="a",
            token=TOKEN,
            address="127.0.0.1",
            born=1.0,
            log=lambda text: None,
            quiet_seconds=quiet_seconds,
        )
        thread = threading.Thread(target=coordinator.run)
        thread.start()
        opened.append((coordinator, thread))
        return coordinator, listener.getsockname()[1]

    start_coordinator.history = history
    yield start_coordinator
    for coordinator, thread in opened:
        coordinator.over.set()
        thread.join()


def history(coordinate):
    return [record["event"] for record in read_json_lines(coordinate.history.folder.history)]


def test_all_start_together_and_finish_together(coordinate):
    coordinator, port = coordinate()
    pods = [Pod(port, node) for node in (2, 0)]
    pods.append(Pod(port, 1))
    starts = {pod.node: pod.expect("start") for pod in pods}
    assert {node: start["position"] for node, start in starts.items()} == {0: 0, 1: 1, 2: 2}
    assert len({(start["port"], start["attempt"], start["nodes"]) for start in starts.values()}) == 1
    for pod in pods:
        pod.end(1)
    assert [pod.expect("exit")["code"] for pod in pods] == [0, 0, 0]
    assert coordinator.over.wait(PATIENCE)
    assert history(coordinate) == ["launched", "exit"]


def test_node_0_leaves_last(coordinate, monkeypatch):
    """An operator deletes the pods that still run once node 0's has succeeded, and their logs with them."""
    monkeypatch.setattr("windlass.targets.kubernetes.pod.coordinator.SETTLE_SECONDS", 0.0)
    coordinator, port = coordinate()
    pods = started_pods(port, 3)
    for pod in pods:
        pod.end(1)
    assert coordinator.over.wait(PATIENCE)
    leaving = threading.Thread(target=coordinator.see_off)
    leaving.start()
    pods[1].line.close()
    leaving.join(1.0)
    assert leaving.is_alive()
    pods[2].line.close()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
    assert history(coordinate) == ["launched", "exit"]


def test_a_lost_pod_ends_the_attempt_and_its_successor_starts_the_next(coordinate):
    _, port = coordinate()
    pods = started_pods(port, 3)
    pods[1].line.close()
    end_of_attempt([pods[0], pods[2]])
    for pod in (pods[0], pods[2]):
        assert "node 1 was lost" in pod.expect("again")["why"]
    successor = Pod(port, 1, born=2.0)
    assert {pod.expect("start")["attempt"] for pod in (pods[0], successor, pods[2])} == {2}
    assert history(coordinate) == ["launched", "node-lost", "restart", "launched"]


def test_a_pod_that_was_replaced_is_told_while_it_still_lives(coordinate):
    """A node whose kubelet died: its pod trains on, and Kubernetes has made another."""
    _, port = coordinate()
    pods = started_pods(port, 3)
    successor = Pod(port, 2, born=2.0)
    pods[2].expect("replaced")
    end_of_attempt(pods[:2])
    for pod in pods[:2]:
        pod.expect("again")
    assert successor.expect("start")["attempt"] == 2
    late = Pod(port, 2, born=1.0)  # the old one, back from a cut cable
    late.expect("replaced")


def test_a_pod_that_leaves_after_saving_costs_no_restart(coordinate):
    _, port = coordinate()
    pods = started_pods(port, 3)
    coordinate.history.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1, leaving=pod.node == 2)
    for pod in pods[:2]:
        assert pod.expect("again")["why"] == "node 2 was told to leave; saved first"
    assert pods[2].is_cut_off()
    records = read_json_lines(coordinate.history.folder.history)
    restarts = [record for record in records if record["event"] == "restart"]
    assert (restarts[0]["class"], restarts[0]["left"]) == ("preempted", None)


def test_a_successor_waits_until_the_pod_it_follows_has_saved(coordinate):
    _, port = coordinate()
    pods, replacement = pods_with_a_replaced_one(port)
    coordinate.history.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1, leaving=pod.node == 2)
    assert pods[2].receive()["word"] in ("again", "over")  # and not "replaced"
    assert [pod.expect("start")["attempt"] for pod in (pods[0], pods[1], replacement)] == [2, 2, 2]
    assert "node-lost" not in history(coordinate)


def test_a_successor_takes_over_when_the_pod_it_follows_dies_while_saving(coordinate):
    _, port = coordinate()
    pods, replacement = pods_with_a_replaced_one(port)
    pods[2].line.close()
    end_of_attempt(pods[:2])
    assert [pod.expect("start")["attempt"] for pod in (pods[0], pods[1], replacement)] == [2, 2, 2]


def test_ranks_start_anew_on_request(coordinate):
    """What `windlass sync` comes to."""
    _, port = coordinate()
    pods = started_pods(port, 3)
    pods[0].line.send(word="restart", why="there is new code")
    for pod in pods:
        pod.expect("save")
    coordinate.history.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1)
    assert [pod.expect("again")["why"] for pod in pods] == ["there is new code"] * 3
    assert {pod.expect("start")["attempt"] for pod in pods} == {2}


def test_fewer_nodes_train_on_and_make_room_for_a_late_one(coordinate):
    _, port = coordinate(min_nodes=2)
    pods = [Pod(port, node) for node in (0, 2)]
    starts = [pod.expect("start") for pod in pods]
    assert [(start["nodes"], start["position"]) for start in starts] == [(2, 0), (2, 1)]
    late = Pod(port, 1)
    for pod in pods:
        pod.expect("save")
    coordinate.history.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1)
    for pod in pods:
        pod.expect("again")
    positions = {pod.node: pod.expect("start")["position"] for pod in (*pods, late)}
    assert positions == {0: 0, 1: 1, 2: 2}


def test_a_pod_of_another_submission_is_not_let_in(coordinate):
    _, port = coordinate()
    assert Pod(port, 1, submission="b").is_cut_off()
    assert Pod(port, 7).is_cut_off()


FACTS = {"node": 1, "pod": "intruder", "born": 9e9, "submission": "a"}
STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"word":"hello"}\n',
    b'{"word":"knock"}\n{"word":"hello","node":1,"born":9e99,"pod":"x","submission":"a"}\n',
    json.dumps({"word": "hello", **FACTS}).encode() + b"\n",
    json.dumps({"word": "hello", **FACTS, "proof": proof("a guess", "pod", "", "", *FACTS.values())}).encode() + b"\n",
    b'{"word":"knock","nonce":"x"}\n' + json.dumps({"word": "hello", **FACTS, "proof": "\ud800"}).encode() + b"\n",
    b'{"word":"end","attempt":1,"end":{"node":1,"code":0,"deaths":[],"errors":[]}}\n',
    b'{"word":"restart"}\n',
    b'{"word":["hello"]}\n',
    b"[" * 4000 + b"\n",
    b"null\n",
    b"\xff\xfe\x00\n",
    b"x" * 100_000,
]


def test_no_stranger_ends_or_disturbs_a_run(coordinate):
    _, port = coordinate()
    pods = started_pods(port, 3)
    for data in STRANGERS:
        line = Line.to(("127.0.0.1", port), timeout=PATIENCE)
        line.connection.sendall(data)
        assert is_cut_off(line), data
    for pod in pods:
        pod.end(1)
    assert [pod.expect("exit")["code"] for pod in pods] == [0, 0, 0]
    assert history(coordinate) == ["launched", "exit"]


def test_who_does_not_know_the_secret_is_not_let_in_on_either_side(coordinate):
    _, port = coordinate(nodes=1)
    line = Line.to(("127.0.0.1", port), timeout=PATIENCE)
    with pytest.raises(LostError, match="secret of this submission"):
        knock(line, "a guess", PATIENCE)  # a host that cannot prove itself is none
    assert Pod(port, 0, token="a guess").is_cut_off()
    seen = Line.to(("127.0.0.1", port), timeout=PATIENCE)  # what one pod has proven is of no use to another
    host = knock(seen, TOKEN, PATIENCE)
    shown = proof(TOKEN, "pod", host.own_nonce, host.nonce, *FACTS.values())
    thief = Line.to(("127.0.0.1", port), timeout=PATIENCE)
    thief.send(word="knock", nonce=host.own_nonce)
    thief.send(word="hello", **FACTS, proof=shown)
    assert is_cut_off(thief)
    assert Pod(port, 0).expect("start")["attempt"] == 1


def test_a_proof_that_is_no_text_of_ours_is_none():
    """JSON can write half a surrogate pair, which no encoding has."""
    assert not is_proof("\ud800", TOKEN, "host")
    assert not is_proof("ä" * 64, TOKEN, "host")


def test_strangers_that_say_nothing_take_no_room(coordinate, monkeypatch):
    """Silent, slow and many: the pods of the run still start, and file handles do not run out."""
    monkeypatch.setattr(coordinator_module, "HELLO_SECONDS", 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, port = coordinate()
    slow = Line.to(("127.0.0.1", port), timeout=PATIENCE)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        assert is_cut_off_while_it_drips(slow)
        for connection in silent:
            connection.close()
        pods = [Pod(port, node) for node in range(3)]
        assert {pod.expect("start")["attempt"] for pod in pods} == {1}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


BAD_ENDS = [None, [], {}, {"code": "0"}, {"code": 1, "deaths": [{}], "errors": []}, {"code": 1, "deaths": 3}]


@pytest.mark.parametrize("end", BAD_ENDS)
def test_a_pod_of_ours_that_talks_nonsense_is_lost_and_the_run_goes_on(coordinate, end):
    _, port = coordinate(nodes=2)
    pods = started_pods(port, 2)
    pods[1].line.send(word="what", nobody="knows")
    pods[1].line.send(word="end", attempt=1, end=end)
    pods[0].expect("over")
    pods[0].end(1, code=1)
    assert "node 1 was lost" in pods[0].expect("again")["why"]
    successor = Pod(port, 1, born=2.0)
    assert {pod.expect("start")["attempt"] for pod in (pods[0], successor)} == {2}


def test_a_pod_speaks_for_its_own_ranks_only(coordinate):
    _, port = coordinate(nodes=2)
    pods = started_pods(port, 2)
    pods[1].line.send(word="end", attempt=1, end=NodeEnd(0, 0).as_dict())
    pods[0].end(1)
    assert [pod.expect("exit")["code"] for pod in pods] == [0, 0]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMED = ("code", "deaths", "errors", "rank", "time", "exit_code", "error", "leaving", "trouble", "retry")
ENDS = st.fixed_dictionaries(
    {"code": st.integers() | ANYTHING},
    optional={
        "deaths": st.lists(st.dictionaries(st.sampled_from(NAMED), ANYTHING, max_size=4), max_size=3) | ANYTHING,
        "errors": st.lists(st.dictionaries(st.sampled_from(NAMED), ANYTHING, max_size=4), max_size=3) | ANYTHING,
        "leaving": ANYTHING,
        "trouble": ANYTHING,
        "out_of_memory": ANYTHING,
    },
)


def test_nothing_of_what_a_pod_reports_is_lost_on_the_way():
    death, error = RankDeath(1, -9, "12:00"), {"rank": 1, "exit_code": 1, "time": 2.0, "error": "x"}
    end = NodeEnd(0, -9, (death,), (error,), trouble=True, leaving=True, out_of_memory="the pod's memory limit")
    assert end_of_node(json.loads(json.dumps(end.as_dict())), 0) == end


@settings(deadline=None, max_examples=60)
@given(value=ENDS | ANYTHING)
def test_fuzz_whatever_a_pod_reports_leads_to_a_verdict(value):
    end = end_of_node(json.loads(json.dumps(value)), 0)
    if end is not None:
        for ends in ([end], [end, NodeEnd(1)]):
            assert type(verdict(ends, [], [], 3)) in (Done, Decision)


@settings(deadline=None, max_examples=60)
@given(message=st.dictionaries(st.sampled_from(("node", "pod", "born", "submission", "proof")), ANYTHING))
def test_fuzz_no_hello_without_the_secret(message):
    assert Hello.of(message, TOKEN, "x", "y") is None


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    chunks=st.lists(
        st.binary(max_size=60) | st.sampled_from([b"\n", b'{"word":"beat"}\n', b'{"word":', b'"x"}\n']), max_size=12
    )
)
def test_fuzz_a_line_gives_messages_or_is_lost(chunks):
    tcp = socket.create_server(("127.0.0.1", 0))
    theirs = socket.create_connection(tcp.getsockname())
    line = Line(tcp.accept()[0], longest=LONGEST_UNPROVEN)
    try:
        for chunk in chunks:
            theirs.sendall(chunk)
        theirs.shutdown(socket.SHUT_WR)
        assert all(isinstance(message["word"], str) for message in until_lost(line))
    finally:
        for item in (line, theirs, tcp):
            item.close()
