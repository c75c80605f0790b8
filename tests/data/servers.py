"""Servers on this machine: files over HTTP with faults on demand, and what of the Hub's protocol reading takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Fault = Callable[[str, int], str | None]  # (path, how often it was asked for before) -> "503", "cut" or None


@dataclass
class Served:
    """What a server has and what it was asked for."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fault: Fault = lambda path, times: None
    faults: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class FileHandler(BaseHTTPRequestHandler):
    """Files with byte ranges."""

    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        content = self.served.files.get(path.lstrip("/"))
        if content is None:
            self.send(404, b"not found", body)
        else:
            self.send_file(path, content, body)

    def send_file(self, path: str, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        fault = None
        if body:
            with self.served.lock:
                times = self.served.counts.get(path, 0)
                self.served.counts[path] = times + 1
                fault = self.served.fault(path, times)
                self.served.faults += fault is not None
        if fault == "503":
            self.send(503, b"busy", body)
            return
        status, part, extra = 200, content, {"Accept-Ranges": "bytes", **(headers or {})}
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(len(content), int(last) + 1 if last else len(content))
            if begin >= len(content):
                self.send(416, b"", body)
                return
            status, part = 206, content[begin:end]
            extra["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.send(status, part, body, extra, cut=fault == "cut")

    def send(
        self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()


class HubHandler(FileHandler):
    """One dataset repository: its information, its tree, and its files under resolve/."""

    repository = "allenai/c4"
    kind, folder = "datasets", "/datasets"
    gated: str | bool = False  # "manual": access must be granted first
    tokens: ClassVar[dict[str, str]] = {}  # by token: "granted" or "stranger"; any other is not accepted
    impatience: ClassVar[list[int]] = []  # seconds to ask for, one for every request that is put off

    def barred(self, body: bool) -> bool:
        """Answer a request that is not let through, as the Hub does."""
        with self.served.lock:
            delay = self.impatience.pop(0) if self.impatience else None
        if delay is not None:
            self.send(429, b"slow down", body, {"Retry-After": str(delay)})
            return True
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
        who = self.tokens.get(token)
        if token and self.tokens and who is None:
            self.send(401, b'{"error": "Invalid user token"}', body, {"X-Error-Message": "Invalid user token"})
            return True
        path = unquote(urlsplit(self.path).path)
        content = "/resolve/" in path or path.endswith("/auth-check")
        if self.gated and content and who != "granted" and self.repository in path:
            message = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {self.repository} is restricted."}
            self.send(403 if token else 401, b"", body, message)
            return True
        return False

    def answer(self, body: bool) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.served.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        if self.barred(body):
            return
        api = f"/api/{self.kind}/{self.repository}"
        resolve = f"{self.folder}/{self.repository}/resolve/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.served.files]
            facts = {
                "_id": "1",
                "id": self.repository,
                "sha": COMMIT,
                "private": False,
                "gated": self.gated,
                "tags": [],
            }
            self.json({**facts, "disabled": False, "downloads": 0, "likes": 0, "siblings": siblings}, body)
        elif path.startswith(f"{api}/revision/"):
            self.send(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
        elif path == f"{api}/auth-check":
            self.json({}, body)
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() in ("true", "1")
            self.json(self.tree(folder, recursive), body)
        elif path.startswith(resolve):
            name = path.removeprefix(resolve).partition("/")[2]
            if name not in self.served.files:
                self.send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                content = self.served.files[name]
                headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT}
                self.send_file(name, content, body, headers)
        else:
            self.send(404, b"", body, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        self.served.requests.append(f"POST {self.path}")
        sent = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        is_json = "json" in self.headers.get("Content-Type", "")
        paths = json.loads(sent)["paths"] if is_json else parse_qs(sent).get("paths", [])
        paths = [paths] if isinstance(paths, str) else paths
        entries = {entry["path"]: entry for entry in self.tree("", recursive=True)}
        self.json([entries[path] for path in paths if path in entries], body=True)

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, content in self.served.files.items():
            if folder and not name.startswith(folder + "/"):
                continue
            parts = name[len(folder) + 1 if folder else 0 :].split("/")
            for depth in range(1, len(parts)):
                path = "/".join([*([folder] if folder else []), *parts[:depth]])
                if recursive or depth == 1:
                    entries[path] = {"type": "directory", "oid": digest(path.encode()), "size": 0, "path": path}
            if recursive or len(parts) == 1:
                entries[name] = {"type": "file", "oid": digest(content), "size": len(content), "path": name}
        return list(entries.values())

    def json(self, value: Any, body: bool) -> None:
        headers = {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}
        self.send(200, json.dumps(value).encode(), body, headers)


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(kind: type[FileHandler], files: dict[str, bytes]) -> Iterator[Served]:
    served = Served(files=files)
    handler = type("Handler", (kind,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
