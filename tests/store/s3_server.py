"""An S3 for tests: moto's server as a process of its own, behind a proxy that fails on demand.

with running_s3() as s3:             # sets nothing in the environment; s3.environment does, where it is wanted
    s3.make_bucket("bucket")
    s3.inject(Fault("SlowDown", method="PUT", times=3))
"""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STATUS = {
    "403": (403, "AccessDenied"),
    "500": (500, "InternalError"),
    "503": (503, "ServiceUnavailable"),
    "SlowDown": (503, "SlowDown"),
    "NoSuchUpload": (404, "NoSuchUpload"),
}
KINDS = (*STATUS, "latency", "truncated", "dropped", "dropped-after")


@dataclass
class Fault:
    """What happens to the next `times` matching requests.

    403, 500, 503, SlowDown, NoSuchUpload: answered so, without asking the store.   latency: `seconds` late.
    truncated: the answer's body breaks off half way.   dropped: the connection is closed before the store hears of it;
    dropped-after: it did hear of it, but the answer is lost.
    """

    kind: str
    method: str = ""  # "": any
    path: str = ""  # a regular expression found in path and query
    times: int = 1
    seconds: float = 0.2
    met: int = 0  # how often it happened

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    def matches(self, method: str, path: str) -> bool:
        return self.met < self.times and self.method in ("", method) and bool(re.search(self.path, path))


@dataclass
class FaultyS3:
    server: str  # the moto server itself, without faults
    endpoint: str  # the proxy in front of it
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method, path and query, of all that came
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # method and headers
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use this S3."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def inject(self, *faults: Fault) -> None:
        with self.lock:
            self.faults.extend(faults)

    def clear(self) -> None:
        with self.lock:
            self.faults.clear()

    def headers(self, method: str) -> list[dict[str, str]]:
        """The headers of every request of this method, names in lower case."""
        with self.lock:
            return [headers for value, headers in self.seen if value == method]

    def received(self) -> list[tuple[str, str, dict[str, str]]]:
        """Method, path and headers of every request since this was last asked."""
        with self.lock:
            taken = [
                (method, path, headers) for (method, path), (_, headers) in zip(self.requests, self.seen, strict=True)
            ]
            self.requests.clear()
            self.seen.clear()
        return taken

    def take(self, method: str, path: str, headers: dict[str, str]) -> Fault | None:
        with self.lock:
            self.requests.append((method, path))
            self.seen.append((method, headers))
            for fault in self.faults:
                if fault.matches(method, path):
                    fault.met += 1
                    return fault
        return None

    def client(self) -> Any:
        """A plain client past the proxy, to look and to meddle."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.server,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def reset(self) -> None:
        """As it was when it started: an empty bucket, no uploads, no faults."""
        self.clear()
        urllib.request.urlopen(f"{self.server}/moto-api/reset", data=b"").close()
        self.make_bucket("bucket")
        self.requests.clear()
        self.seen.clear()

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]


@contextlib.contextmanager
def running_s3() -> Iterator[FaultyS3]:
    """A new, empty S3; gone with everything in it at the end."""
    program = (
        "import logging, sys\n"
        "logging.disable()\n"
        "from moto.server import ThreadedMotoServer\n"
        "server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)\n"
        "server.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\n"
        "sys.stdin.read()\n"  # until the test that started it closes the pipe, or is no more
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    proxy: ThreadingHTTPServer | None = None
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "moto's server did not start: is moto[server] installed?"
        port = int(line)
        proxy = _Proxy(("127.0.0.1", 0), _Handler)
        s3 = FaultyS3(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy.server_address[1]}")
        proxy.s3 = s3
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield s3
    finally:
        if proxy:
            proxy.shutdown()
            proxy.server_close()
        process.kill()
        process.wait()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    s3: FaultyS3

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self.upstream:
            self.upstream.close()
        super().finish()

    def _serve(self) -> None:
        body = self._body()
        fault = self.server.s3.take(
            self.command, self.path, {key.lower(): value for key, value in self.headers.items()}
        )
        kind = fault.kind if fault else ""
        if fault and kind == "latency":
            time.sleep(fault.seconds)
        if kind == "dropped":
            return self._hang_up()
        if kind in STATUS:
            return self._refuse(*STATUS[kind])
        status, headers, content = self._forward(body)
        if kind == "dropped-after":
            return self._hang_up()
        self.send_response_only(status)
        for key, value in headers:
            self.send_header(key, value)
        self.end_headers()
        if kind == "truncated":
            self.wfile.write(content[: len(content) // 2])
            return self._hang_up()
        self.wfile.write(content)
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        if self.upstream is None or select.select([self.upstream.sock], [], [], 0)[0]:
            address = urllib.parse.urlsplit(self.server.s3.server)
            self.upstream = http.client.HTTPConnection(address.hostname or "", address.port)
            self.upstream.connect()
        skipped = {"transfer-encoding", "content-length", "expect", "connection"}
        headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
        headers["Content-Length"] = str(len(body))
        self.upstream.request(self.command, self.path, body=body, headers=headers)
        answer = self.upstream.getresponse()
        content = answer.read()
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection", "date")]
        if not any(key.lower() == "content-length" for key, _ in kept):
            kept.append(("Content-Length", str(len(content))))
        if answer.will_close or answer.getheader("Connection", "").lower() == "close":
            self.upstream.close()
            self.upstream = None
        return answer.status, kept, content

    def _refuse(self, status: int, code: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""
