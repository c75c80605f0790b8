"""Run a command in a pod: over one websocket, with its input, output and exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from windlass.errors import UserError
from windlass.targets.kubernetes.api.errors import from_status

if TYPE_CHECKING:
    from windlass.targets.kubernetes.api.http import Api

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)
CLOSE_STDIN = bytes((255, STDIN))
CAN_CLOSE_STDIN = "v5.channel.k8s.io"
PROTOCOLS = [CAN_CLOSE_STDIN, "v4.channel.k8s.io"]
CHUNK = 64 * 1024
Sink = Callable[[bytes], object]


def execute(
    api: Api,
    namespace: str,
    pod: str,
    command: Sequence[str],
    *,
    container: str,
    stdout: Sink,
    stderr: Sink,
    stdin: Iterator[bytes] | None = None,
    terminal: bool = False,
    timeout: float | None = None,
) -> int:
    """The exit code of the command; what it says goes to the sinks as it comes."""
    from httpx2.websockets import HTTPXWSException

    query: list[tuple[str, str | int | float | bool | None]] = [("container", container), ("stdout", "true")]
    query += [("stderr", "false" if terminal else "true"), ("tty", "true" if terminal else "false")]
    query += [("stdin", "true" if stdin is not None else "false")]
    query += [("command", word) for word in command]
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
    with (
        api.websocket(path, query, PROTOCOLS) as session,
        _sending_size(session) if terminal else contextlib.nullcontext(),
        _sending(session, stdin) if stdin is not None else contextlib.nullcontext(),
    ):
        try:
            while True:
                message = session.receive_bytes(timeout=timeout)
                channel, data = message[:1], message[1:]
                if channel == bytes((STDOUT,)) and data:
                    stdout(data)
                elif channel == bytes((STDERR,)) and data:
                    stderr(data)
                elif channel == bytes((ERROR,)):
                    status, code = parse_status(data)
                    if code is None:
                        raise from_status(api.access, status, f"the command in {pod}")
                    return code
        except HTTPXWSException as error:
            raise UserError(
                f"the connection to {pod} broke while the command ran",
                evidence=str(error) or type(error).__name__,
                cause="the pod ended, or its node was lost",
            ) from None
        except TimeoutError:
            raise UserError(f"{command[0]} in {pod} said nothing for {timeout:.0f} s") from None


def interactively(api: Api, namespace: str, pod: str, command: Sequence[str], *, container: str) -> int:
    """Run a command as if it were called here: this terminal is its terminal, or this input its input."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def write(data: bytes, to: BinaryIO) -> None:
        to.write(data)
        to.flush()

    with _raw_terminal() if terminal else contextlib.nullcontext():
        return execute(
            api,
            namespace,
            pod,
            command,
            container=container,
            stdout=partial(write, to=sys.stdout.buffer),
            stderr=partial(write, to=sys.stderr.buffer),
            stdin=_input(),
            terminal=terminal,
        )


@contextlib.contextmanager
def _sending(session: Any, chunks: Iterator[bytes]) -> Iterator[None]:
    """Send input while the output is being read."""
    ended = threading.Event()

    def send() -> None:
        from httpx2.websockets import HTTPXWSException

        with contextlib.suppress(HTTPXWSException, OSError, ValueError):
            for chunk in chunks:
                if ended.is_set():
                    return
                session.send_bytes(bytes((STDIN,)) + chunk)
            if session.subprotocol == CAN_CLOSE_STDIN and not ended.is_set():
                session.send_bytes(CLOSE_STDIN)

    threading.Thread(target=send, name="input", daemon=True).start()  # it may wait for a key for ever
    try:
        yield
    finally:
        ended.set()


def _input() -> Iterator[bytes]:
    handle = sys.stdin.fileno()
    while chunk := os.read(handle, CHUNK):
        yield chunk


def parse_status(data: bytes) -> tuple[dict[str, Any], int | None]:
    """The Status object that ends a command, and the exit code that it tells of; None where it tells of none."""
    try:
        status = json.loads(data)
        if not isinstance(status, dict):
            raise ValueError
        if status.get("status") == "Success":
            return status, 0
        for cause in (status.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode":
                return status, int(cause["message"])
    except (ValueError, RecursionError):
        return {"message": data[:200].decode(errors="replace")}, None
    except (KeyError, TypeError, AttributeError):
        return status, None
    return status, None


@contextlib.contextmanager
def _sending_size(session: Any) -> Iterator[None]:
    """Tell the pod how large this terminal is, now and whenever its window changes.

    A thread sends it: the signal may come while the main thread is inside the connection's own code.
    """
    changed, ended = threading.Event(), threading.Event()

    def send() -> None:
        from httpx2.websockets import HTTPXWSException

        with contextlib.suppress(HTTPXWSException, OSError, ValueError):
            while not ended.is_set():
                size = os.get_terminal_size(sys.stdout.fileno())
                new_size = {"Width": size.columns, "Height": size.lines}
                session.send_bytes(bytes((RESIZE,)) + json.dumps(new_size).encode())
                changed.wait()
                changed.clear()

    before = signal.signal(signal.SIGWINCH, lambda *_: changed.set())
    threading.Thread(target=send, name="window size", daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
        ended.set()
        changed.set()


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the pod, Ctrl-C too."""
    import termios
    import tty

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    try:
        tty.setraw(handle)
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
