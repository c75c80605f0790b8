"""A stand-in for the HTTP service behind HyperPod's Managed Tiered Checkpointing: its paths, codes and retention.

GET, POST, DELETE /v1/cp/namespaces/NS                 POST ?num_ranks=N&steps_retained=K; 404 unknown, 409 exists
GET, POST, DELETE /v1/cp/checkpoints/NS/RANK/STEP      the shard as the body, its checksum in the header Shard-Meta
GET /v1/cp/checkpoints/NS/latest?limit=N               steps that any rank has, the newest first
POST /v1/cp/cluster/reset                              all gone
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Namespace:
    num_ranks: int
    steps_retained: int
    shards: dict[int, dict[int, tuple[bytes, str]]] = field(default_factory=dict)  # rank → step → content, Shard-Meta


@dataclass
class ManagedStandIn:
    endpoint: str = ""
    namespaces: dict[str, Namespace] = field(default_factory=dict)
    failing: int = 0  # so many requests to come are answered with 503
    lock: threading.Lock = field(default_factory=threading.Lock)

    def only(self) -> Namespace:
        (namespace,) = self.namespaces.values()
        return namespace


@contextlib.contextmanager
def running_service() -> Iterator[ManagedStandIn]:
    state = ManagedStandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ManagedStandIn

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        options = {key: values[-1] for key, values in parse_qs(url.query).items()}
        with self.state.lock:
            if self.state.failing:
                self.state.failing -= 1
                return self._answer(503, b'{"detail": "busy"}')
            code, content, headers = self._act(url.path, options, body)
        return self._answer(code, content, headers)

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815

    def _act(self, path: str, options: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if path == "/v1/cp/cluster/reset":
            self.state.namespaces.clear()
            return _json({"status": "reset"})
        if match := re.fullmatch(r"/v1/cp/namespaces/([^/]+)", path):
            return self._namespace(match[1], options)
        match = re.fullmatch(r"/v1/cp/checkpoints/([^/]+)/(?:(latest)|(\d+)/(\d+))", path)
        if not match or match[1] not in self.state.namespaces:
            return _json({"detail": "Not found"}, 404)
        namespace = self.state.namespaces[match[1]]
        if match[2]:
            steps = {step for shards in namespace.shards.values() for step in shards}
            return _json(sorted(steps, reverse=True)[: int(options.get("limit", "5"))])
        return self._shard(namespace, int(match[3]), int(match[4]), body)

    def _namespace(self, name: str, options: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        known = self.state.namespaces
        if self.command == "POST":
            if name in known:
                return _json({"detail": "exists"}, 409)
            known[name] = Namespace(int(options["num_ranks"]), int(options.get("steps_retained", "3")))
            return _json({"status": "created"})
        if name not in known:
            return _json({"detail": "Not found"}, 404)
        if self.command == "DELETE":
            del known[name]
            return _json({"status": "deleted"})
        one = known[name]
        return _json({"num_ranks": one.num_ranks, "steps_to_retain_per_rank": one.steps_retained})

    def _shard(self, namespace: Namespace, rank: int, step: int, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        shards = namespace.shards.setdefault(rank, {})
        if self.command == "POST":
            if rank >= namespace.num_ranks:
                return _json({"detail": f"rank {rank} of {namespace.num_ranks}"}, 400)
            shards[step] = (body, self.headers.get("Shard-Meta", ""))
            for old in sorted(shards)[: -namespace.steps_retained]:
                del shards[old]
            return _json({"status": "ok"})
        if step not in shards:
            return _json({"detail": "Not found"}, 404)
        if self.command == "DELETE":
            del shards[step]
            return _json({"status": "deleted"})
        content, meta = shards[step]
        return 200, content, {"Content-Type": "application/octet-stream", "Shard-Meta": meta}

    def _answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


def _json(value: Any, code: int = 200) -> tuple[int, bytes, dict[str, str]]:
    return code, json.dumps(value).encode(), {"Content-Type": "application/json"}
