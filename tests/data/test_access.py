"""What the hub says to a run, before it starts and while it fetches: told apart, waited for, asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.data.servers import COMMIT, HubHandler, Served, serving
from windlass.common import hub as hub_module
from windlass.common.hub import check_access, fetch, fetched, is_hub_id, with_retries
from windlass.data.build.tokenizing import tokenize
from windlass.data.checks import check_hub, repositories
from windlass.data.sources.source import FileSource
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.errors import ExitCode, UserError
from windlass.plan import resolve
from windlass.spec import parse_run

pytest.importorskip("huggingface_hub")

MODEL = "acme/tiny-llama"
Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a hub with one model on it, and point the library there."""
    import huggingface_hub.constants as constants

    with ExitStack() as stack:

        def begin(files: dict[str, bytes] | None = None, **settings: Any) -> Served:
            values = {"repository": MODEL, "kind": "models", "folder": "", "tokens": {}, "impatience": [], **settings}
            handler = type("ModelHub", (HubHandler,), values)
            served = stack.enter_context(serving(handler, files or {"config.json": b"{}", "other.txt": b"no"}))
            monkeypatch.setattr(constants, "ENDPOINT", served.url)
            monkeypatch.setattr(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
            )
            monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
            return served

        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield begin


def refused(**settings: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        check_access(settings.pop("name", MODEL), what="model", **settings)
    return caught.value


def test_an_open_model_is_given(start: Start) -> None:
    served = start()
    check_access(MODEL, what="model")
    assert not [request for request in served.requests if "resolve" in request], "nothing is downloaded"


def test_a_name_that_is_not_there(start: Start) -> None:
    start()
    error = refused(name="acme/no-such-model")
    assert "there is no model acme/no-such-model on the hub, or it is private" in str(error)
    assert error.exit_code == ExitCode.BAD_INPUT


def test_a_revision_that_is_not_there(start: Start) -> None:
    start()
    assert "has no such revision" in str(refused(revision="v9"))


def test_a_gated_model_without_a_token(start: Start) -> None:
    start(gated="manual")
    error = refused()
    assert "access to it must be granted first" in str(error)
    assert "no token was sent" in str(error)
    assert "hf auth login" in str(error)


def test_a_gated_model_with_a_strangers_token(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(gated="manual", tokens={"hf_stranger": "stranger", "hf_friend": "granted"})
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "belongs to no one with access" in str(refused())
    monkeypatch.setenv("HF_TOKEN", "hf_friend")
    check_access(MODEL, what="model")


def test_a_token_that_is_not_accepted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tokens={"hf_friend": "granted"})
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    error = refused()
    assert "does not accept the token" in str(error)
    assert "hf_revoked" not in str(error)


def test_rate_limits_are_waited_for(start: Start) -> None:
    served = start(impatience=[0, 0, 0])
    check_access(MODEL, what="model")
    assert len(served.requests) >= 4


def test_it_waits_as_long_as_it_is_told() -> None:
    class Response:
        status_code = 429

        def __init__(self, delay: str) -> None:
            self.headers = {"Retry-After": delay}

    class LimitError(Exception):
        def __init__(self, delay: str) -> None:
            super().__init__("429 too many requests")
            self.response = Response(delay)

    waited: list[float] = []
    delays = iter(["7", "41"])

    def action() -> str:
        for delay in delays:
            raise LimitError(delay)
        return "given"

    assert with_retries(action, MODEL, "model", sleep=waited.append) == "given"
    assert waited == [7.0, 41.0]

    def never() -> None:
        raise LimitError("86400")

    with pytest.raises(UserError, match="cannot be fetched") as caught:
        with_retries(never, MODEL, "model", sleep=waited.append)
    assert "HF_TOKEN raises the limit" in str(caught.value)
    assert len(waited) == 2, "a day is not waited for"


def test_files_are_fetched_once(start: Start) -> None:
    served = start(impatience=[0])
    folder = fetch(MODEL, ("config.json",), what="model")
    assert (folder / "config.json").read_bytes() == b"{}"
    assert not (folder / "other.txt").exists()
    assert folder.name == COMMIT
    before = len(served.requests)
    assert fetched(MODEL, ("config.json",)) == folder
    assert fetched("acme/another", ("config.json",)) is None
    assert len(served.requests) == before, "what is here is found without asking"


def test_a_tokenizer_is_fetched_by_its_hub_id(start: Start, tmp_path: Path) -> None:
    tiny = load_tokenizer("tiny")
    tiny.save(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    start(files | {"model.safetensors": b"not for a tokenizer"})
    found = load_tokenizer(MODEL)
    assert (found.name, found.fingerprint, found.eos_token) == (MODEL, tiny.fingerprint, tiny.eos_token)
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    with pytest.raises(UserError, match="there is no tokenizer acme/other on the hub, or it is private"):
        load_tokenizer("acme/other")


def test_a_repository_without_a_tokenizer(start: Start) -> None:
    start()
    with pytest.raises(UserError, match="acme/tiny-llama on the hub holds no tokenizer"):
        load_tokenizer(MODEL)


def test_a_hub_that_cannot_be_reached_is_a_warning_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that submits may be shut off from the hub; those that train may not be."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    run = resolve(parse_run({"model": {"path": MODEL}, "data": {"source": "corpus:austen", "tokenizer": "tiny"}}))
    (warning,) = check_hub(run)
    assert MODEL in warning
    assert "not known whether the ranks can fetch it" in warning


def test_offline_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "HF_HUB_OFFLINE forbids asking" in str(refused())


def test_what_a_run_takes_from_a_hub() -> None:
    values = {
        "model": {"path": MODEL, "init": "pretrained", "revision": "v1"},
        "data": {"source": "hf:acme/chats", "validation_source": "hf:acme/chats"},
    }
    found = [(taken.name, taken.what, taken.revision) for taken in repositories(resolve(parse_run(values)))]
    assert found[:2] == [(MODEL, "model", "v1"), ("acme/chats", "dataset", None)]
    preset = resolve(parse_run({"model": {"preset": "llama3.2-tiny"}, "data": {"source": "corpus:austen"}}))
    assert list(repositories(preset)) == []


def datasets_and_tokenizers(**data: Any) -> list[str]:
    run = resolve(parse_run({"model": {"preset": "llama3.2-tiny"}, "data": {"tokenizer": "acme/tokens", **data}}))
    return [repository.name for repository in repositories(run)]


def test_a_mixture_takes_what_it_reads_and_nothing_else(tmp_path: Path) -> None:
    """`data.source` has a default on the hub, which a run with `data.sources` never reads."""
    text = tmp_path / "novel.txt"
    text.write_text("It was a dark and stormy night. " * 200)
    tokenize([FileSource((text,), "text", "novel")], tmp_path / "shards", load_tokenizer("tiny"), workers=1)
    shards = {"source": str(tmp_path / "shards")}
    assert datasets_and_tokenizers(sources=[shards, shards]) == []
    assert datasets_and_tokenizers(sources=[shards, {"source": str(text)}]) == ["acme/tokens"]
    mixed = [shards, {"source": "hf:acme/chats", "weight": 3}, {"source": "hf:json", "files": ["a.jsonl"]}]
    assert datasets_and_tokenizers(sources=mixed) == ["acme/chats", "acme/tokens"]
    assert datasets_and_tokenizers(**shards, validation_source=str(text)) == ["acme/tokens"]


@pytest.mark.parametrize(
    ("path", "expected"), [("acme/x", True), ("./x", False), ("/a/b", False), ("tiny", False), ("a/b/c", False)]
)
def test_hub_ids(path: str, expected: bool) -> None:
    assert is_hub_id(path) is expected
    assert hub_module.TRIES > 1


def test_a_run_is_refused_before_it_is_submitted(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.api.preparation import prepare
    from windlass.spec import load_run

    start(gated="manual")
    monkeypatch.setenv("WINDLASS_RUNS", str(tmp_path / "runs"))
    file = tmp_path / "gated.yaml"
    file.write_text(
        f"model: {{path: {MODEL}, init: pretrained}}\n"
        "data: {source: 'corpus:austen', tokenizer: tiny}\nresources: {gpus_per_node: 0}\n"
    )
    with pytest.raises(UserError, match="access to it must be granted first") as caught:
        prepare(load_run(file))
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not (tmp_path / "runs").exists()
