"""What is said to a registry, and to whom: against a server that wants tokens and redirects, as large ones do."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from windlass.errors import UserError
from windlass.image.build.builders import Docker
from windlass.image.registry.credentials import Credentials
from windlass.image.registry.push import is_local_image
from windlass.image.registry.reference import ImageReference
from windlass.image.registry.registry import Manifest, Repository

BODY = b'{"layers": []}'


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, said = self.server, self.headers.get("Authorization")
        server.heard.append((self.path.partition("?")[0], said))
        if self.path.startswith("/token"):
            server.tokens += 1
            self.answer(200 if server.gives_tokens else 404, json.dumps({"token": f"t{server.tokens}"}).encode())
        elif self.path.startswith("/store/"):
            self.answer(200, BODY)
        elif said != f"Bearer t{server.tokens}" or server.expired:
            server.expired = False
            self.answer(401, b"", ("WWW-Authenticate", f'Bearer realm="{server.root}/token",service="s"'))
        elif self.path.endswith("/missing"):
            self.answer(404, b"")
        else:
            self.answer(307, b"", ("Location", f"http://localhost:{server.server_port}/store/x"))

    do_HEAD = do_GET  # noqa: N815

    def answer(self, code, body, *headers):
        self.send_response(code)
        for header in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments): ...


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.root, server.heard = f"http://127.0.0.1:{server.server_port}", []
        server.tokens, server.gives_tokens, server.expired = 0, True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def repository(server):
    image = ImageReference.parse(f"127.0.0.1:{server.server_port}/team/train")
    return Repository(image, Credentials("u", "p"))


def test_a_token_is_for_the_registry_alone_and_fetched_anew_when_it_has_expired(server):
    asked = repository(server)
    assert asked.manifest("v1").body == BODY
    basic = f"Basic {Credentials('u', 'p').basic}"
    place = "/v2/team/train/manifests/v1"
    assert server.heard == [(place, basic), ("/token", basic), (place, "Bearer t1"), ("/store/x", None)]
    assert asked.manifest("missing") is None
    server.expired = True
    assert asked.has_blob("sha256:1")
    assert server.tokens == 2


def test_a_server_of_tokens_that_has_none_is_no_missing_image(server):
    server.gives_tokens = False
    with pytest.raises(UserError, match="answers 404"):
        repository(server).manifest("v1")


def test_docker_knows_an_image_by_its_manifest_or_by_its_configuration(tmp_path, monkeypatch):
    """By its manifest where docker keeps images in containerd, as docker 29 does unless told otherwise."""
    manifest = Manifest(json.dumps({"config": {"digest": f"sha256:{'c' * 64}"}, "layers": []}).encode())
    program = tmp_path / "docker"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for id, same in ((manifest.digest, True), (f"sha256:{'c' * 64}", True), (f"sha256:{'d' * 64}", False)):
        program.write_text(f"#!/bin/sh\necho {id}\n")
        program.chmod(0o755)
        assert is_local_image(Docker(), "team/train:1", manifest) == same
