"""A hub on this machine that takes repositories: accounts, branches, LFS in one or several parts, commits."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from tests.data.servers import FileHandler, Served, serving

PART = 200_000  # bytes of one part of an LFS object that is larger


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[dict[str, Any]] = field(default_factory=list)


class WritableHub(FileHandler):
    """State is of the class: make a subclass for each test.

    Tokens: writer's and reader's are ann's, stranger's is bob's. `fault(method, path)` may name a status to answer.
    """

    accounts: ClassVar[dict[str, tuple[str, str]]] = {
        "hf_writer": ("ann", "write"),
        "hf_reader": ("ann", "read"),
        "hf_stranger": ("bob", "write"),
    }
    repositories: dict[str, Repository]
    objects: dict[str, bytes]
    parts: dict[str, dict[int, bytes]]
    puts: list[str]

    @classmethod
    def fresh(cls, **attributes: Any) -> type[WritableHub]:
        state = {"repositories": {}, "objects": {}, "parts": {}, "puts": []}
        return type("Fresh", (cls,), {**state, **attributes})

    def fault(self, method: str, path: str) -> int | None:
        return None

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.headers.get("Content-Length") and "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = self.chunks()
        self.served.requests.append(f"{self.command} {self.path}")
        status = self.fault(self.command, path)
        if status is not None:
            self.send(status, b'{"error": "not now"}', True, {"Retry-After": "0", "Content-Type": "application/json"})
            return
        if path.startswith("/storage/"):  # presigned: no token goes there
            assert "Authorization" not in self.headers
            self.store(path, content)
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in self.accounts:
            self.answer_json({"error": "Invalid username or password."}, 401)
            return
        self.route(path, content, *self.accounts[token])

    def do_POST(self) -> None:  # noqa: N802
        self.answer(body=True)

    def do_PUT(self) -> None:  # noqa: N802
        self.answer(body=True)

    def chunks(self) -> bytes:
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def route(self, path: str, content: bytes, owner: str, role: str) -> None:
        body: Any = json.loads(content) if content and "ndjson" not in self.headers.get("Content-Type", "") else {}
        if path == "/api/whoami-v2":
            self.answer_json({"name": owner, "orgs": [], "auth": {"accessToken": {"role": role}}})
            return
        if path == "/api/validate-yaml":
            self.answer_json({"warnings": [], "errors": []})
            return
        if path == "/api/repos/create":
            name = f"{body['organization']}/{body['name']}"
            if name in self.repositories:
                url = f"{self.served.url}/{name}"
                self.answer_json({"error": "You already created this model repo", "url": url}, 409)
            elif role != "write" or body["organization"] != owner:
                self.answer_json({"error": "You don't have the rights to create a model here"}, 403)
            else:
                self.repositories[name] = Repository(private=body.get("visibility") == "private")
                self.answer_json({"url": f"{self.served.url}/{name}"})
            return
        name = "/".join(path.removeprefix("/api/models/").lstrip("/").split("/")[:2]).removesuffix(".git")
        repository = self.repositories.get(name)
        may_write = role == "write" and name.startswith(f"{owner}/")
        if repository is None or (repository.private and not may_write):
            self.send(404, b"", True, {"X-Error-Code": "RepoNotFound"})
            return
        rest = path.partition(name)[2].removeprefix(".git").strip("/")
        if not may_write and self.command != "GET":
            self.answer_json({"error": "forbidden"}, 403)
            return
        self.of_repository(rest, name, repository, body, content, may_write)

    def of_repository(
        self, rest: str, name: str, repository: Repository, body: Any, content: bytes, may_write: bool
    ) -> None:
        verb, _, revision = rest.partition("/")
        if verb == "auth-check":
            self.answer_json({} if may_write else {"error": "forbidden"}, 200 if may_write else 403)
        elif verb == "branch":
            exists = revision in repository.branches
            repository.branches.setdefault(revision, dict(repository.branches["main"]))
            self.answer_json({}, 409 if exists else 200)
        elif verb in ("", "revision"):
            files = repository.branches[revision or "main"]
            facts = {"_id": "1", "id": name, "private": repository.private, "tags": [], "downloads": 0, "likes": 0}
            self.answer_json({**facts, "sha": "0" * 40, "siblings": [{"rfilename": path} for path in files]})
        elif verb == "tree":
            files = repository.branches[revision]
            self.answer_json([{"type": "file", "path": path, "size": len(files[path]), "oid": "0"} for path in files])
        elif verb == "preupload":
            files = [(file["path"], file["size"]) for file in body["files"]]
            large = [(path, path.endswith(".safetensors")) for path, _ in files]
            modes = [{"path": path, "uploadMode": "lfs" if lfs else "regular"} for path, lfs in large]
            self.answer_json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif verb == "info":
            self.answer_json({"transfer": "basic", "objects": [self.batch(item) for item in body["objects"]]})
        elif verb == "commit":
            self.commit(name, repository, revision, [json.loads(line) for line in content.splitlines() if line])
        else:
            self.answer_json({"error": f"no such thing: {rest}"}, 400)

    def batch(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["oid"] in self.objects:
            return item
        place = f"{self.served.url}/storage/{item['oid']}"
        if item["size"] <= PART:
            return {**item, "actions": {"upload": {"href": place}}}
        number = -(-item["size"] // PART)
        header = {"chunk_size": str(PART), **{str(part): f"{place}/{part}" for part in range(1, number + 1)}}
        return {**item, "actions": {"upload": {"href": f"{place}/complete", "header": header}}}

    def store(self, path: str, content: bytes) -> None:
        oid, _, part = path.removeprefix("/storage/").partition("/")
        self.puts.append(path)
        if part == "complete":
            content = b"".join(value for _, value in sorted(self.parts[oid].items()))
        elif part:
            self.parts.setdefault(oid, {})[int(part)] = content
            self.send(200, b"", True, {"ETag": f'"{part}"'})
            return
        assert hashlib.sha256(content).hexdigest() == oid
        self.objects[oid] = content
        self.answer_json({})

    def commit(self, name: str, repository: Repository, revision: str, lines: list[dict[str, Any]]) -> None:
        files = dict(repository.branches[revision])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.branches[revision] = files
        repository.commits.append({"revision": revision, "summary": lines[0]["value"]["summary"]})
        oid = hashlib.sha1(str(len(repository.commits)).encode()).hexdigest()
        self.answer_json({"success": True, "commitOid": oid, "commitUrl": f"{self.served.url}/{name}/commit/{oid}"})

    def answer_json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), True, {"Content-Type": "application/json"})


@contextmanager
def writable_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[WritableHub], Served]]:
    """A hub for this process and for those that it starts, with a token that may write as ann."""
    from huggingface_hub import constants

    hub = WritableHub.fresh()
    with serving(hub, {}) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # the Hub's other protocol, of which there is no open server
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub, served
