"""Coordinate the pods of a run: node 0 waits for all, starts them together, notices lost ones, decides what follows.

Messages to a pod: welcome (born), start, save, over, again, exit, replaced, beat. From a pod: knock, hello, end,
restart, leaving, beat. Any pod of the cluster can connect: until it has proven that it belongs to the submission it
gets nothing but a welcome, and nothing that it sends ends or holds up the others.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windlass.common.ports import free_port
from windlass.targets.kubernetes.pod.attempt_history import AttemptHistory
from windlass.targets.kubernetes.pod.messages import (
    LONGEST,
    LONGEST_UNPROVEN,
    Hello,
    Line,
    LostError,
    Message,
    end_of_node,
    nonce,
    proof,
    text,
)
from windlass.targets.kubernetes.pod.verdict import NodeEnd
from windlass.targets.launch.decision import Done

BEAT_SECONDS = 3.0
SILENCE_SECONDS = 60.0  # a pod that sends nothing for so long is lost, though its connection may look open
HELLO_SECONDS = 15.0  # for a connection to prove who it is
MAX_UNPROVEN = 64  # connections, beside one per node, that have not proven who they are; the oldest makes room
REMIND_SECONDS = 30.0
QUIET_SECONDS = 60.0  # with min_nodes: how long to wait for those that are still missing
POLL_SECONDS = 0.2
LEAVE_SECONDS = 20.0  # for the other pods to go, once the run has ended
SETTLE_SECONDS = 2.0  # for their kubelets to report it


@dataclass
class Member:
    """A pod that has connected."""

    line: Line
    received_at: float
    connected_at: float
    nonce: str
    pod_nonce: str | None = None  # what it sent when it knocked
    hello: Hello | None = None  # None: it has not proven who it is
    closed: bool = False
    node: int | None = None  # None: it is not (or not yet) a member
    pod: str = ""
    born: float = 0.0
    leaving: bool = False  # it got a SIGTERM: its ranks are saving


@dataclass
class Attempt:
    """Ranks under way."""

    number: int
    nodes: tuple[int, ...]
    ends: dict[int, NodeEnd] = field(default_factory=dict)
    over: bool = False
    saving: str | None = None


class Coordinator:
    """The coordinator of one run; runs in a thread of node 0's entry."""

    def __init__(
        self,
        listener: socket.socket,
        history: AttemptHistory,
        *,
        nodes: int,
        min_nodes: int,
        submission: str,
        token: str,
        address: str,
        born: float,
        log: Callable[[str], None],
        code: Callable[[], str | None] = lambda: None,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        self.listener, self.history, self.log, self.code = listener, history, log, code
        self.nodes, self.min_nodes, self.submission, self.address = nodes, min_nodes, submission, address
        self.token, self.born, self.quiet_seconds = token, born, quiet_seconds
        listener.setblocking(False)  # who asked to connect may be gone when it is let in
        self.members: dict[int, Member] = {}
        self.pending: list[Member] = []  # connected, and not (or no more) members
        self.replacements: dict[int, Member] = {}  # successors of pods that are still saving
        self.attempt: Attempt | None = None
        self.over = threading.Event()  # the exit code is decided
        self._changed = self._reminded = time.monotonic()
        self._not_before = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the run has ended."""
        last_beat = 0.0
        while not self.over.is_set():
            for key, _ in self._selector.select(POLL_SECONDS):
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._receive(key.data)
            now = time.monotonic()
            if now - last_beat > BEAT_SECONDS:
                last_beat = now
                self._send_all("beat", at=now)
            for member in [*self.members.values(), *self.pending]:
                if now - member.received_at > SILENCE_SECONDS:
                    self._drop(member, f"silent for {SILENCE_SECONDS:.0f} s")
                elif member.hello is None and now - member.connected_at > HELLO_SECONDS:
                    self._drop(member, "it has not said who it is")
            self._advance(now)

    def see_off(self) -> None:
        """Wait until the other pods have left, so that node 0 is the last.

        Kubeflow's operator calls a job done when its master is, and deletes the pods that still run, with their logs.
        """
        others = [member for node, member in self.members.items() if node != 0]
        deadline = time.monotonic() + LEAVE_SECONDS
        while not all(member.closed for member in others) and time.monotonic() < deadline:
            for key, _ in self._selector.select(POLL_SECONDS):
                if key.fileobj is not self.listener:
                    self._receive(key.data)
        if others:
            time.sleep(SETTLE_SECONDS)

    # -- who is there

    def _accept(self) -> None:
        unproven = [member for member in self.pending if member.hello is None]
        if len(unproven) >= MAX_UNPROVEN + self.nodes:
            self._drop(unproven[0], "others knock")
        try:
            connection, _ = self.listener.accept()
        except OSError as error:  # it is gone again, or there is no file handle left
            if not isinstance(error, BlockingIOError):
                time.sleep(POLL_SECONDS)
            return
        try:
            line = Line(connection, longest=LONGEST_UNPROVEN)
        except LostError:
            return
        now = time.monotonic()
        member = Member(line, received_at=now, connected_at=now, nonce=nonce())
        self.pending.append(member)
        self._selector.register(member.line, selectors.EVENT_READ, member)

    def _receive(self, member: Member) -> None:
        if member.closed:  # by what another one sent in the same turn
            return
        try:
            messages = member.line.receive(0.0)
        except LostError as error:
            self._drop(member, str(error))
            return
        member.received_at = time.monotonic()
        for message in messages:
            if not member.closed:
                self._answer(member, message)

    def _answer(self, member: Member, message: Message) -> None:
        """Do what a message asks for; one that is not well-formed costs its sender the connection."""
        match message["word"]:
            case "knock" if member.pod_nonce is None:
                member.pod_nonce = text(message.get("nonce"))
                shown = proof(self.token, "host", member.pod_nonce, member.nonce, self.born)
                self._send(member, "welcome", born=self.born, nonce=member.nonce, proof=shown)
            case "hello" if member.hello is None:
                member.hello = Hello.of(message, self.token, member.pod_nonce, member.nonce)
                if member.hello is None:
                    self._drop(member, "it has not proven that it belongs to this submission")
                    return
                member.line.longest = LONGEST
                self._register(member, member.hello)
            case _ if member.hello is None:
                self._drop(member, "it has not said who it is")
            case "end" if self.attempt and member.node in self.attempt.nodes and self._is_current(member):
                end = end_of_node(message.get("end"), member.node)
                if end is None:
                    self._drop(member, "it reported an end that is none")
                elif message.get("attempt") == self.attempt.number:
                    self.attempt.ends.setdefault(end.node, end)
            case "leaving" if self._is_current(member):
                member.leaving = True
                self._request_save()
            case "restart" if self._is_current(member):
                self._save(text(message.get("why")) or "it was asked for")

    def _register(self, member: Member, hello: Hello) -> None:
        node, born = hello.node, hello.born
        if hello.submission != self.submission or not 0 <= node < self.nodes:
            self._drop(member, "it belongs to another submission")
            return
        former = self.members.get(node)
        if former is not None and former.born > born:  # a pod of old that does not know it was replaced
            self._send(member, "replaced")
            return
        if former is not None and former.leaving and self.attempt and node in self.attempt.nodes:
            self.replacements[node] = member  # Kubernetes makes it while the old one saves: that must not be cut off
            return
        if former is not None:
            self._send(former, "replaced")
            self._drop(former, f"its pod was replaced by {hello.pod}")
        member.node, member.born, member.pod = node, born, hello.pod
        self.pending.remove(member)
        self.members[node] = member
        self._changed = time.monotonic()
        if self.attempt and len(self.attempt.nodes) < self.nodes:
            self._save(f"node {node} is there: more nodes")

    def _is_current(self, member: Member) -> bool:
        return member.node is not None and self.members.get(member.node) is member

    def _drop(self, member: Member, why: str) -> None:
        if member in self.pending:
            self.pending.remove(member)
            self.replacements = {node: pod for node, pod in self.replacements.items() if pod is not member}
        elif self._is_current(member):
            node = member.node
            assert node is not None
            del self.members[node]
            self._changed = time.monotonic()
            if self.attempt and node in self.attempt.nodes and node not in self.attempt.ends:
                self.attempt.ends[node] = NodeEnd(node, code=-1, lost=why)
                self.history.lost(self.attempt.number, node, member.pod, why)
                self.log(f"node {node} ({member.pod}) was lost: {why}")
        else:
            return
        self._selector.unregister(member.line)
        member.line.close()
        member.closed = True
        replacement = self.replacements.pop(member.node, None) if member.node is not None else None
        if replacement is not None and replacement.hello is not None:
            self._register(replacement, replacement.hello)

    # -- what they do

    def _advance(self, now: float) -> None:
        if self.attempt is None:
            if now >= self._not_before and self._may_start(now):
                self._start()
            elif now - self._reminded > REMIND_SECONDS:
                self._reminded = now
                missing = [str(node) for node in range(self.nodes) if node not in self.members]
                if missing:
                    self.log(f"waiting for node{'s' * (len(missing) > 1)} {', '.join(missing)} of {self.nodes}")
            return
        attempt = self.attempt
        if len(attempt.ends) == len(attempt.nodes):
            self._conclude(attempt)
        elif not attempt.over and any(end.code for end in attempt.ends.values()):
            attempt.over = True
            for node in attempt.nodes:
                if node not in attempt.ends and node in self.members:
                    self._send(self.members[node], "over")

    def _may_start(self, now: float) -> bool:
        if 0 not in self.members:
            return False
        if len(self.members) == self.nodes:
            return True
        return len(self.members) >= self.min_nodes and now - self._changed > self.quiet_seconds

    def _start(self) -> None:
        nodes = tuple(sorted(self.members))
        pods = [self.members[node].pod for node in nodes]
        number = self.history.launched(self.submission, nodes, pods)
        if number is None:
            self._exit(self.history.end)
            return
        self.attempt = Attempt(number, nodes)
        port = free_port()
        code = self.code()  # all pods run what node 0 has
        for position, node in enumerate(nodes):
            facts = {"attempt": number, "nodes": len(nodes), "position": position, "port": port, "code": code}
            self._send(self.members[node], "start", address=self.address, **facts)

    def _save(self, why: str) -> None:
        if self.attempt and not self.attempt.saving and not self.attempt.ends:
            self.attempt.saving = why
            self.log(f"saving, to start anew: {why}")
            self._request_save()

    def _request_save(self) -> None:
        for node in self.attempt.nodes if self.attempt else ():
            if node in self.members:
                self._send(self.members[node], "save")

    def _conclude(self, attempt: Attempt) -> None:
        self.attempt = None
        self._changed = self._reminded = time.monotonic()
        ends = [attempt.ends[node] for node in attempt.nodes]
        decided = self.history.conclude(attempt.number, ends, saving=attempt.saving)
        if isinstance(decided, Done):
            self._exit(decided)
            return
        self._not_before = time.monotonic() + decided.backoff_seconds
        self.log(f"starting again: {decided.reason}")
        self._send_all("again", why=decided.reason)
        for end in ends:
            if end.leaving and end.node in self.members:
                self._drop(self.members[end.node], "it leaves")

    def _exit(self, done: Done | None) -> None:
        assert done is not None
        self.log(f"{done.state}" + (f": {done.reason}" if done.reason else ""))
        self.over.set()
        self._send_all("exit", code=int(done.code), state=done.state)

    def _send_all(self, word: str, **facts: Any) -> None:
        for member in list(self.members.values()):
            self._send(member, word, **facts)

    def _send(self, member: Member, word: str, **facts: Any) -> None:
        try:
            member.line.send(word=word, **facts)
        except LostError as error:
            self._drop(member, str(error))
