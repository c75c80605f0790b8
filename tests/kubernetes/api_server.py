"""A small HTTP server that speaks the corners of the Kubernetes API: what a real one does only on a bad day."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self) -> None:
        place = urlsplit(self.path)
        self.params = dict(parse_qsl(place.query))
        size = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(size)
        with self.server.lock:
            self.server.requests.append((self.command, place.path, self.params))
            self.server.bodies.append(self.body)
            answers = self.server.answers.get(place.path) or [
                lambda handler: handler.status(404, "NotFound", "not there")
            ]
            chosen = answers.pop(0) if len(answers) > 1 else answers[0]
        chosen(self)

    do_GET = do_POST = do_DELETE = do_PATCH = answer  # noqa: N815

    def json(self, value: Any, code: int = 200, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)

    def status(self, code: int, reason: str, message: str, metadata: Any = None, **headers: str) -> None:
        value = {"kind": "Status", "code": code, "reason": reason, "message": message, "metadata": metadata or {}}
        self.json(value, code, **headers)

    def stream(self, *chunks: bytes, broken: bool = False) -> None:
        """A chunked answer; a broken one ends without its last chunk, as when a connection is lost."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if broken:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(2)
        else:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Answers by path: the given ones in turn, and the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[bytes] = []  # of the requests
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def on(self, path: str, *answers: Answer) -> None:
        self.answers[path] = list(answers)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


def write_kubeconfig(path: Path, server: str, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    value = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "ann", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "ann", "user": user or {}}],
    }
    path.write_text(json.dumps(value))
    return path
