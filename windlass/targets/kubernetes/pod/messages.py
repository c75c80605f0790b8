"""Messages between the pods of a run: JSON objects, one per line, over TCP.

Whoever connects has to prove that it knows the secret of the submission, and so has who answers: each sends a random
number, and the other an HMAC of it. The secret itself is in no message. What comes is checked before it is used: any
pod of the cluster can connect.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from windlass.common.files import parse_record
from windlass.targets.kubernetes.pod.verdict import NodeEnd
from windlass.targets.launch.decision import RankDeath

Message = dict[str, Any]
LONGEST = 4 * 2**20  # bytes of one message; an error file with a deep traceback stays far below
LONGEST_UNPROVEN = 4096  # before the secret is proven
LONGEST_TEXT = 2000  # letters of a reason
MOST_ENTRIES = 1024  # deaths or errors of one pod
SEND_SECONDS = 10.0


class LostError(Exception):
    """The other side is gone, or is not one of ours."""


class Line:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, *, longest: int = LONGEST) -> None:
        self.connection, self.longest = connection, longest
        self._unread = bytearray()
        self._sending = threading.Lock()
        try:
            connection.settimeout(SEND_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.peer = str(connection.getpeername()[0])
        except OSError as error:
            connection.close()
            raise LostError(str(error)) from None

    @classmethod
    def to(cls, address: tuple[str, int], *, timeout: float) -> Line:
        try:
            return cls(socket.create_connection(address, timeout=timeout))
        except OSError as error:
            raise LostError(str(error)) from None

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        data = json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            with self._sending:
                self.connection.sendall(data)
        except OSError as error:
            raise LostError(str(error)) from None

    def receive(self, timeout: float) -> list[Message]:
        """The messages that are there, after waiting for one at most so long."""
        waiting = select.poll()  # not a timeout of the socket: another thread may be sending, and has its own
        try:
            waiting.register(self.connection, select.POLLIN)
            if not waiting.poll(timeout * 1000):
                return []
            data = self.connection.recv(65536)
        except (OSError, ValueError) as error:  # ValueError: it was closed here
            raise LostError(str(error)) from None
        if not data:
            raise LostError("the connection was closed")
        lines = data.split(b"\n")
        lines[0] = bytes(self._unread) + lines[0] if len(lines) > 1 else lines[0]
        if len(lines) > 1:
            self._unread.clear()
        self._unread += lines.pop()
        if max(len(self._unread), *map(len, lines), 0) > self.longest:
            raise LostError("a message that is too long")
        return [_parse(line) for line in lines]

    def close(self) -> None:
        self.connection.close()


def _parse(line: bytes) -> Message:
    message = parse_record(line)
    if message is None or not isinstance(message.get("word"), str):
        raise LostError("what came is no message of ours")
    return message


# -- who is who


def nonce() -> str:
    return secrets.token_hex(16)


def proof(token: str, *parts: object) -> str:
    """What only somebody who knows the token can say of the parts."""
    return hmac.new(token.encode(), json.dumps([str(part) for part in parts]).encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: object, token: str, *parts: object) -> bool:
    """ASCII alone can be: JSON can hold texts that have no bytes, such as half a surrogate pair."""
    return isinstance(claimed, str) and claimed.isascii() and hmac.compare_digest(claimed, proof(token, *parts))


@dataclass(frozen=True)
class Host:
    """A pod that answers for node 0, and has proven that it belongs to the submission."""

    line: Line
    born: float
    own_nonce: str
    nonce: str

    def send_hello(self, token: str, *, node: int, pod: str, born: float, submission: str) -> None:
        facts = {"node": node, "pod": pod, "born": born, "submission": submission}
        shown = proof(token, "pod", self.own_nonce, self.nonce, *facts.values())
        self.line.send(word="hello", **facts, proof=shown)


def knock(line: Line, token: str, timeout: float) -> Host:
    """Ask who is there; raises LostError where it is nobody of ours."""
    own = nonce()
    line.send(word="knock", nonce=own)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for message in line.receive(max(0.0, deadline - time.monotonic())):
            born, theirs = message.get("born"), message.get("nonce")
            if message["word"] != "welcome" or not is_number(born) or not isinstance(theirs, str):
                raise LostError("it does not answer as node 0 does")
            if not is_proof(message.get("proof"), token, "host", own, theirs, born):
                raise LostError("it does not know the secret of this submission")
            return Host(line, float(born), own, theirs)
    raise LostError("it does not answer")


@dataclass(frozen=True)
class Hello:
    """A pod that says who it is."""

    node: int
    pod: str
    born: float
    submission: str

    @classmethod
    def of(cls, message: Message, token: str, pod_nonce: str | None, host_nonce: str) -> Hello | None:
        """None where the message is not well-formed, or not of this submission."""
        node, pod, born, submission = (message.get(key) for key in ("node", "pod", "born", "submission"))
        if not is_whole(node) or not is_number(born) or not isinstance(pod, str) or not isinstance(submission, str):
            return None
        if len(pod) > 253 or pod_nonce is None:
            return None
        if not is_proof(message.get("proof"), token, "pod", pod_nonce, host_nonce, node, pod, born, submission):
            return None
        return cls(node, pod, float(born), submission)


# -- what pods report


def end_of_node(value: Any, node: int) -> NodeEnd | None:
    """How the ranks of a pod ended, as it says; None where that is not well-formed.

    A rank's error file may hold anything that user code puts there: what is wrong in it is left out.
    """
    if not isinstance(value, dict) or not is_whole(value.get("code")):
        return None
    deaths, errors = value.get("deaths"), value.get("errors")
    if not isinstance(deaths, list) or not isinstance(errors, list):
        return None
    if not all(
        isinstance(death, dict) and is_whole(death.get("rank")) and is_whole(death.get("code")) for death in deaths
    ):
        return None
    return NodeEnd(
        node=node,
        code=value["code"],
        deaths=tuple(
            RankDeath(death["rank"], death["code"], text(death.get("time"))) for death in deaths[:MOST_ENTRIES]
        ),
        errors=tuple(_error(error) for error in errors[:MOST_ENTRIES] if isinstance(error, dict)),
        trouble=value.get("trouble") is True,
        leaving=value.get("leaving") is True,
        out_of_memory=text(value.get("out_of_memory")) or None,
    )


def _error(value: Mapping[str, Any]) -> dict[str, Any]:
    rank, code, when = value.get("rank"), value.get("exit_code"), value.get("time")
    return {
        **value,
        "rank": rank if is_whole(rank) else None,
        "exit_code": code if is_whole(code) else None,
        "time": when if is_number(when) else 0.0,
        "error": text(value.get("error")),
    }


def text(value: object) -> str:
    return "" if value is None else str(value)[:LONGEST_TEXT]


def is_whole(value: object) -> TypeGuard[int]:
    """An integer that every reader of it can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def is_number(value: object) -> TypeGuard[float]:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def addresses_of(host: str, port: int) -> list[str]:
    """What a name leads to now; nothing while nobody answers for it."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[4][0]) for address in addresses))
