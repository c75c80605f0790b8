"""Pushing to a hub, with its own client against a server on this machine: refused early, killed, repeated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys

import pytest

from tests.hub import PART, Repository, writable_hub
from windlass.api import publishing
from windlass.errors import UserError

PROGRAM = """
import sys
from pathlib import Path
from windlass.api.publishing import Repository, make_repository, push
repository = Repository("ann/little", private=True)
make_repository(repository)
print(push(Path(sys.argv[1]), repository, message="step 6"))
"""
TARGET = publishing.Repository("ann/little")


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: unknown\n---\n")
    (folder / "model-00001-of-00002.safetensors").write_bytes(random.Random(1).randbytes(1000))
    (folder / "model-00002-of-00002.safetensors").write_bytes(random.Random(2).randbytes(3 * PART + 7))
    return folder


@pytest.fixture
def hub(monkeypatch):
    with writable_hub(monkeypatch) as (kind, _):
        yield kind


@pytest.mark.slow
def test_killed_half_way_and_repeated(hub, export):
    def kill_while_it_sends(self, method, path):
        if path.endswith("/3"):  # of the second shard two parts are there
            os.kill(victim.pid, signal.SIGKILL)

    hub.fault = kill_while_it_sends
    with subprocess.Popen([sys.executable, "-c", PROGRAM, export], stderr=subprocess.PIPE, text=True) as victim:
        said = victim.stderr.read()
    assert victim.returncode == -signal.SIGKILL, said
    assert hub.repositories["ann/little"].private
    assert hub.repositories["ann/little"].branches == {"main": {}}  # nobody sees half of it
    first = [path for path in hub.puts if path.count("/") == 2]
    assert len(first) == 1  # the small shard, whole

    hub.repositories["ann/little"].branches["main"] |= {"model.safetensors": b"of before", "notes.txt": b"mine"}
    throttled = []

    def throttle_once(self, method, path):
        if "/commit/" in path and not throttled:
            throttled.append(path)
            return 429
        return None

    hub.fault = throttle_once
    publishing.make_repository(TARGET)
    commit = publishing.push(export, TARGET, message="step 6")
    assert (len(commit), len(throttled)) == (40, 1)
    written = {path.name: path.read_bytes() for path in export.iterdir()}
    assert hub.repositories["ann/little"].branches["main"] == {**written, "notes.txt": b"mine"}
    assert hub.puts.count(first[0]) == 1
    assert len(hub.repositories["ann/little"].commits) == 1

    branch = publishing.Repository("ann/little", revision="v1")
    publishing.make_repository(branch)
    sent = len(hub.puts)
    (export / "README.md").write_text("---\nlicense: mit\n---\n")
    publishing.push(export, branch, message="again")
    assert len(hub.puts) == sent  # the weights are there
    assert b"mit" in hub.repositories["ann/little"].branches["v1"]["README.md"]
    assert b"mit" not in hub.repositories["ann/little"].branches["main"]["README.md"]
    assert branch.url.endswith("/ann/little/tree/v1")


@pytest.mark.parametrize(
    ("token", "words", "what"),
    [
        ("", ["ann/new"], "needs a token"),
        ("hf_unknown", ["ann/new"], "does not accept the token"),
        ("hf_reader", ["ann/new"], "may not write"),
        ("hf_writer", ["bob/new"], "may not make it"),
        ("hf_stranger", ["ann/public"], "may not write"),
        ("hf_writer", ["ann/public", "--private"], "is public"),
        ("hf_writer", ["little"], "no name of a repository"),
        ("hf_writer", ["ann/new/", "--dry-run"], "no name of a repository"),
    ],
)
def test_what_may_not_be_pushed_is_refused_before_the_export(hub, windlass, monkeypatch, tmp_path, token, words, what):
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("name: small\nmodel: {preset: llama-tiny}\ndata: {source: 'corpus:austen'}\n")
    hub.repositories["ann/public"] = Repository(private=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", token)
    refused = windlass("ckpt", "export", "small", "--push", *words)
    assert refused.code == 2
    assert what in refused.err
    assert not token or token not in refused.err + refused.out
    assert list(hub.repositories) == ["ann/public"]


@pytest.mark.slow
def test_answers_that_do_not_pass_are_said_at_once(hub, export, monkeypatch):
    publishing.make_repository(TARGET)
    for status, what in ((409, "somebody else"), (403, "may not write"), (413, "the hub refused")):
        hub.fault = lambda self, method, path, status=status: status if "/commit/" in path else None
        with pytest.raises(UserError, match=what):
            publishing.push(export, TARGET, message="x")
    monkeypatch.setattr(publishing, "TRIES", 2)
    hub.fault = lambda self, method, path: 429 if path.endswith("whoami-v2") else None
    with pytest.raises(UserError, match="does not take ann/little now") as refused:
        publishing.check_repository(TARGET)
    assert "limits how often" in (refused.value.cause or "")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="does not take ann/little now"):
        publishing.check_repository(TARGET)
