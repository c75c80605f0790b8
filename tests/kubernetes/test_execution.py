"""Commands in pods, over a real websocket."""

import base64
import fcntl
import hashlib
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from httpcore2._backends.sync import SyncStream
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection

from windlass.errors import UserError
from windlass.targets.kubernetes.api.execution import PROTOCOLS, _sending, execute, parse_status

PATH = "/api/v1/namespaces/team/pods/run-0/exec"
SUCCESS = b'\x03{"status":"Success"}'


class Shell:
    """The far end of `exec`: keeps what comes and sends what it is told to."""

    def __init__(self, *messages):
        self.messages, self.came, self.ready = messages, [], threading.Event()

    def __call__(self, handler):
        self.shake_hands(handler)
        wire, speech = handler.connection, Connection(ConnectionType.SERVER)
        for message in self.messages:
            wire.sendall(speech.send(BytesMessage(message)))
        handler.close_connection = True
        while data := wire.recv(4096):
            speech.receive_data(data)
            for event in speech.events():
                if isinstance(event, BytesMessage):
                    self.came.append(bytes(event.data))
                    if event.data[:1] == b"\x00":  # a key was pressed: the command ends
                        wire.sendall(speech.send(BytesMessage(SUCCESS)))
                elif isinstance(event, CloseConnection):
                    wire.sendall(speech.send(event.response()))
                    return

    def shake_hands(self, handler):
        key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        handler.send_response(101)
        for name, value in (
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Accept", accept),
            ("Sec-WebSocket-Protocol", "v5.channel.k8s.io"),
        ):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.flush()

    @property
    def sizes(self):
        return [(item["Width"], item["Height"]) for item in (json.loads(m[1:]) for m in self.came if m[:1] == b"\x04")]


def wait_until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


def test_the_pod_learns_of_every_new_size_of_the_window(server, api):
    shell = Shell()
    server.on(PATH, shell)
    program = (
        "import sys\n"
        "from windlass.targets.kubernetes.api.http import Api\n"
        "from windlass.targets.kubernetes.api.execution import interactively\n"
        "from windlass.targets.kubernetes.api.kubeconfig import access\n"
        "sys.exit(interactively(Api(access()), 'team', 'run-0', ['bash'], container='trainer'))\n"
    )
    ours, theirs = os.openpty()

    def resize(columns, lines):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    resize(80, 24)
    environment = {**os.environ, "COLUMNS": "7", "LINES": "7"}  # what a shell exports is of when it started
    process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs, env=environment)
    try:
        wait_until(lambda: shell.sizes == [(80, 24)], "the first size")
        for size in ((120, 40), (100, 30)):
            resize(*size)
            process.send_signal(signal.SIGWINCH)
            wait_until(lambda size=size: shell.sizes[-1] == size, f"the size {size}")
        os.write(ours, b"q")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert shell.sizes == [(80, 24), (120, 40), (100, 30)]


def output_of_true(api):
    out, err = bytearray(), bytearray()
    sinks = {"stdout": out.extend, "stderr": err.extend}
    code = execute(api, "team", "run-0", ["true"], container="trainer", timeout=60.0, **sinks)
    return code, bytes(out), bytes(err)


@pytest.mark.parametrize("verb", ["get", "create"])
def test_the_verb_that_is_missing_is_named(server, api, verb):
    """1.36 asks for `create` when a websocket is opened, and still for `get` when a plain question is."""
    message = (
        f'pods "run-0" is forbidden: User "ann" cannot {verb} resource "pods/exec" in API group "" in the namespace'
    )

    def answer(handler):
        upgrades = handler.headers.get("Upgrade") == "websocket"
        if upgrades or (handler.command == "GET") == (verb == "get"):
            handler.status(403, "Forbidden", f'{message} "team"')
        else:
            handler.status(400, "BadRequest", "Upgrade request required")

    server.on(PATH, answer)
    with pytest.raises(UserError, match=f"you may not {verb} pods/exec in the namespace team") as error:
        output_of_true(api)
    assert f"--verb={verb} --resource=pods/exec" in error.value.fix


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"", b"\x01out", b"\x07?", SUCCESS], None),
        ([b"\x03nonsense"], "the command in run-0"),
        ([b"\x03[]"], "the command in run-0"),
        ([b'\x03{"status":"Failure","code":"x","details":7}'], "the command in run-0"),
    ],
)
def test_what_no_pod_says_is_an_error_in_words(server, api, messages, words):
    server.on(PATH, Shell(*messages))
    if words is None:
        assert output_of_true(api) == (0, b"out", b"")
    else:
        with pytest.raises(UserError, match=words):
            output_of_true(api)


def test_commands_at_the_same_time_keep_their_connections(tls_server, certificates, connect):
    """A reader that outlived its connection would read from the next one, which gets the same file descriptor."""
    url = f"https://127.0.0.1:{tls_server.server_port}"
    api = connect({"token": "t"}, url, **{"certificate-authority": str(certificates / "ca.crt")})
    tls_server.on(PATH, Shell(b"\x01out", SUCCESS))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: output_of_true(api), range(200)))
    assert answers == [(0, b"out", b"")] * 200


class Deaf(Shell):
    """Reads nothing of what is sent to it, and leaves when it is told to."""

    def __call__(self, handler):
        self.shake_hands(handler)
        self.ready.wait(60)
        handler.connection.shutdown(2)


def test_a_connection_is_not_closed_while_somebody_writes_to_it(server, api, monkeypatch):
    """A writer that outlived its connection would write to the next one, which gets the same file descriptor."""
    writers, begun, closing, closed_under = set(), threading.Event(), threading.Event(), []
    write, close = SyncStream.write, SyncStream.close

    def slow_write(stream, buffer, timeout=None):
        if len(buffer) < len(chunk):
            return write(stream, buffer, timeout)
        writers.add(stream)
        begun.set()
        try:
            write(stream, buffer, timeout)
        finally:
            closing.wait(3)  # woken by the end of the connection, and not gone yet
            writers.discard(stream)

    def watched_close(stream):
        closed_under.append(stream in writers)
        closing.set()
        close(stream)

    monkeypatch.setattr(SyncStream, "write", slow_write)
    monkeypatch.setattr(SyncStream, "close", watched_close)
    chunk, deaf = bytes(2**24), Deaf()  # more than the buffers of the two sockets hold
    server.on(PATH, deaf)
    with (
        api.websocket(PATH, [("stdin", "true")], PROTOCOLS) as session,
        _sending(session, itertools.repeat(chunk)),
    ):
        assert begun.wait(60)
        deaf.ready.set()
        wait_until(lambda: session.connection.state is not ConnectionState.OPEN, "the end of the connection")
    assert closed_under
    assert not any(closed_under)


def test_a_connection_that_breaks_ends_the_command_in_words(server, api):
    class Lost(Shell):
        def __call__(self, handler):
            threading.Timer(0.2, handler.connection.shutdown, (2,)).start()
            super().__call__(handler)

    server.on(PATH, Lost(b"\x01out"))
    with pytest.raises(UserError, match="the connection to run-0 broke while the command ran"):  # not "said nothing"
        output_of_true(api)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("ExitCode"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("status", "details", "causes", "reason", "message")), inner, max_size=4)
    ),
)


@settings(deadline=None)
@given(data=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value).encode()))
@example(data=b'{"details":{"causes":[{"reason":"ExitCode","message":"7"}]}}')
@example(data=b"[" * 100_000)
def test_fuzz_the_end_of_a_command(data):
    status, code = parse_status(data)
    assert isinstance(status, dict)
    assert code is None or isinstance(code, int)
