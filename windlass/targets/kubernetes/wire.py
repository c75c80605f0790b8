"""Messages between the pods of a run: JSON objects, one per line, over TCP."""

from __future__ import annotations

import json
import select
import socket
import threading
from typing import Any

Message = dict[str, Any]
LONGEST = 4 * 2**20  # bytes of one message; an error file with a deep traceback stays far below
SEND_SECONDS = 10.0


class LostError(Exception):
    """The other side is gone."""


class Line:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""
        self._sending = threading.Lock()

    @classmethod
    def to(cls, address: tuple[str, int], *, timeout: float) -> Line:
        try:
            return cls(socket.create_connection(address, timeout=timeout))
        except OSError as error:
            raise LostError(str(error)) from None

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def peer(self) -> str:
        return str(self.connection.getpeername()[0])

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
        waiting.register(self.connection, select.POLLIN)
        try:
            if not waiting.poll(timeout * 1000):
                return []
            data = self.connection.recv(65536)
        except OSError as error:
            raise LostError(str(error)) from None
        if not data:
            raise LostError("the connection was closed")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > LONGEST:
            raise LostError("a message that does not end")
        return [message for line in lines if isinstance(message := _parse(line), dict)]

    def close(self) -> None:
        self.connection.close()


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise LostError("what came is no message of ours") from None


def addresses_of(host: str, port: int) -> list[str]:
    """What a name leads to now; nothing while nobody answers for it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(one[4][0]) for one in found))
