"""Pods that meet: real sockets, no training. Each pod here is a line and a few words."""

import socket
import threading
import time

import pytest

from windlass.runfolder import RunFolder, read_json_lines
from windlass.spec import parse_run
from windlass.targets.kubernetes.meeting import Meeting
from windlass.targets.kubernetes.record import Chronicle
from windlass.targets.kubernetes.verdict import NodeEnd
from windlass.targets.kubernetes.wire import Line, LostError

PATIENCE = 60.0


class Pod:
    def __init__(self, port, node, *, born=1.0, submission="a"):
        self.node = node
        self.line = Line.to(("127.0.0.1", port), timeout=PATIENCE)
        assert self.hear()["word"] == "welcome"
        self.line.send(word="hello", node=node, pod=f"pod-{node}", born=born, submission=submission)

    def hear(self):
        """The next word that is not a heartbeat."""
        self.waiting = getattr(self, "waiting", [])
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            while self.waiting:
                message = self.waiting.pop(0)
                if message["word"] != "beat":
                    return message
            self.waiting += self.line.receive(1.0)
        raise AssertionError(f"node {self.node} heard nothing")

    def expect(self, word):
        message = self.hear()
        while message["word"] in ("over", "again") and message["word"] != word:  # asides, for whom they concern
            message = self.hear()
        assert message["word"] == word, message
        return message

    def end(self, attempt, code=0, **facts):
        self.line.send(word="end", attempt=attempt, end=NodeEnd(self.node, code, **facts).as_dict())

    def is_cut_off(self):
        return is_cut_off(self.line)


def is_cut_off(line):
    try:
        while True:
            line.receive(PATIENCE)
    except LostError:
        return True


@pytest.fixture
def meet(tmp_path):
    run = parse_run({"name": "tiny", "model": {"preset": "llama-tiny"}, "data": {"source": "corpus:austen"}})
    chronicle = Chronicle(RunFolder(tmp_path / "tiny"), run)
    chronicle.open()
    opened = []

    def open_meeting(nodes=3, min_nodes=None, quiet_seconds=0.5):
        listener = socket.create_server(("127.0.0.1", 0))
        meeting = Meeting(
            listener,
            chronicle,
            nodes=nodes,
            min_nodes=min_nodes or nodes,
            submission="a",
            address="127.0.0.1",
            born=1.0,
            say=lambda text: None,
            quiet_seconds=quiet_seconds,
        )
        thread = threading.Thread(target=meeting.run)
        thread.start()
        opened.append((meeting, thread))
        return meeting, listener.getsockname()[1]

    open_meeting.chronicle = chronicle
    yield open_meeting
    for meeting, thread in opened:
        meeting.over.set()
        thread.join()


def history(meet):
    return [one["event"] for one in read_json_lines(meet.chronicle.folder.history)]


def test_all_start_together_and_finish_together(meet):
    meeting, port = meet()
    pods = [Pod(port, node) for node in (2, 0)]
    pods.append(Pod(port, 1))
    starts = {pod.node: pod.expect("start") for pod in pods}
    assert {node: one["position"] for node, one in starts.items()} == {0: 0, 1: 1, 2: 2}
    assert len({(one["port"], one["attempt"], one["nodes"]) for one in starts.values()}) == 1
    for pod in pods:
        pod.end(1)
    assert [pod.expect("exit")["code"] for pod in pods] == [0, 0, 0]
    assert meeting.over.wait(PATIENCE)
    assert history(meet) == ["launched", "exit"]


def test_a_lost_pod_ends_the_attempt_and_its_successor_starts_the_next(meet):
    _, port = meet()
    pods = [Pod(port, node) for node in range(3)]
    for pod in pods:
        pod.expect("start")
    pods[1].line.close()
    for pod in (pods[0], pods[2]):
        pod.expect("over")
    for pod in (pods[0], pods[2]):
        pod.end(1, code=1)
    for pod in (pods[0], pods[2]):
        assert "node 1 was lost" in pod.expect("again")["why"]
    successor = Pod(port, 1, born=2.0)
    assert {one.expect("start")["attempt"] for one in (pods[0], successor, pods[2])} == {2}
    assert history(meet) == ["launched", "node-lost", "restart", "launched"]


def test_a_pod_that_was_replaced_is_told_while_it_still_lives(meet):
    """A node whose kubelet died: its pod trains on, and Kubernetes has made another."""
    _, port = meet()
    pods = [Pod(port, node) for node in range(3)]
    for pod in pods:
        pod.expect("start")
    successor = Pod(port, 2, born=2.0)
    pods[2].expect("replaced")
    for pod in pods[:2]:
        pod.expect("over")
    for pod in pods[:2]:
        pod.end(1, code=1)
    for pod in pods[:2]:
        pod.expect("again")
    assert successor.expect("start")["attempt"] == 2
    late = Pod(port, 2, born=1.0)  # the old one, back from a cut cable
    late.expect("replaced")


def test_a_pod_that_leaves_after_saving_costs_no_restart(meet):
    _, port = meet()
    pods = [Pod(port, node) for node in range(3)]
    for pod in pods:
        pod.expect("start")
    meet.chronicle.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1, told=pod.node == 2)
    for pod in pods[:2]:
        assert pod.expect("again")["why"] == "node 2 was told to leave; saved first"
    assert pods[2].is_cut_off()
    restart = [one for one in read_json_lines(meet.chronicle.folder.history) if one["event"] == "restart"]
    assert restart[0]["left"] == 3


def test_a_successor_waits_until_the_pod_it_follows_has_saved(meet):
    """A drained pod: Kubernetes makes the new one while the old one still saves."""
    _, port = meet()
    pods = [Pod(port, node) for node in range(3)]
    for pod in pods:
        pod.expect("start")
    pods[2].line.send(word="leaving")
    for pod in pods:
        pod.expect("save")
    heir = Pod(port, 2, born=2.0)
    meet.chronicle.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1, told=pod.node == 2)
    assert pods[2].hear()["word"] in ("again", "over")  # and not "replaced"
    assert [one.expect("start")["attempt"] for one in (pods[0], pods[1], heir)] == [2, 2, 2]
    assert "node-lost" not in history(meet)


def test_a_successor_takes_over_when_the_pod_it_follows_dies_while_saving(meet):
    _, port = meet()
    pods = [Pod(port, node) for node in range(3)]
    for pod in pods:
        pod.expect("start")
    pods[2].line.send(word="leaving")
    for pod in pods:
        pod.expect("save")
    heir = Pod(port, 2, born=2.0)
    pods[2].line.close()
    for pod in pods[:2]:
        pod.expect("over")
    for pod in pods[:2]:
        pod.end(1, code=1)
    assert [one.expect("start")["attempt"] for one in (pods[0], pods[1], heir)] == [2, 2, 2]


def test_ranks_start_anew_on_request(meet):
    """What `windlass sync` comes to."""
    _, port = meet()
    pods = [Pod(port, node) for node in range(3)]
    for pod in pods:
        pod.expect("start")
    pods[0].line.send(word="restart", why="there is new code")
    for pod in pods:
        pod.expect("save")
    meet.chronicle.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1)
    assert [pod.expect("again")["why"] for pod in pods] == ["there is new code"] * 3
    assert {pod.expect("start")["attempt"] for pod in pods} == {2}


def test_fewer_nodes_train_on_and_make_room_for_a_late_one(meet):
    _, port = meet(min_nodes=2)
    pods = [Pod(port, node) for node in (0, 2)]
    starts = [pod.expect("start") for pod in pods]
    assert [(one["nodes"], one["position"]) for one in starts] == [(2, 0), (2, 1)]
    late = Pod(port, 1)
    for pod in pods:
        pod.expect("save")
    meet.chronicle.folder.record("preempted", step=4)
    for pod in pods:
        pod.end(1, code=1)
    for pod in pods:
        pod.expect("again")
    positions = {pod.node: pod.expect("start")["position"] for pod in (*pods, late)}
    assert positions == {0: 0, 1: 1, 2: 2}


def test_a_pod_of_another_submission_is_not_let_in(meet):
    _, port = meet()
    assert Pod(port, 1, submission="b").is_cut_off()
    assert Pod(port, 7).is_cut_off()


def test_what_is_no_message_of_ours_is_cut_off(meet):
    _, port = meet()
    line = Line.to(("127.0.0.1", port), timeout=PATIENCE)
    line.connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert is_cut_off(line)
    pods = [Pod(port, node) for node in range(3)]
    assert {pod.expect("start")["attempt"] for pod in pods} == {1}
