"""Tokenizers load from everywhere, mark documents by the stated rule, and chunking changes no id."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.data.conftest import texts
from windlass.data.tokenizers.chunking import CHUNK, KNOWN_PATTERNS
from windlass.data.tokenizers.tokenizer import Tokenizer as Loaded
from windlass.data.tokenizers.tokenizer import load_tokenizer
from windlass.errors import UserError

TEXT = "It is a truth universally acknowledged"


def definition_of(tiny: Loaded) -> Tokenizer:
    return Tokenizer.from_str(tiny.definition)


def folder_with(path: Path, fast: Tokenizer, **sides: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    for name, content in sides.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def with_bos(fast: Tokenizer) -> Tokenizer:
    fast.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    return fast


def test_tiny(tiny: Loaded) -> None:
    assert (tiny.vocab_size, tiny.eos_id, tiny.prefix) == (1024, 1, ())
    (ids,) = tiny.encode_batch([TEXT])
    assert ids[-1] == 1
    assert 0 not in ids
    assert tiny.decode(ids[:-1]) == TEXT
    assert tiny.encode_batch([]) == []
    assert [ids.tolist() for ids in tiny.encode_batch([""])] == [[1]]


def test_saved_folder_loads_here_and_in_transformers(tiny: Loaded, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    assert load_tokenizer(str(tmp_path)).fingerprint == tiny.fingerprint
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint == tiny.fingerprint
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [*theirs(TEXT)["input_ids"], theirs.eos_token_id] == tiny.encode_batch([TEXT])[0].tolist()


def test_it_travels_to_other_processes(tiny: Loaded) -> None:
    tiny.encode_batch([TEXT])
    copy = pickle.loads(pickle.dumps(replace(tiny)))
    assert copy.encode_documents([TEXT]) == tiny.encode_documents([TEXT])


def test_the_post_processor_decides_about_the_prefix_and_there_is_one_end(tiny: Loaded, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, with_bos(definition_of(tiny)), tokenizer_config={"eos_token": "<|end|>"})
    ids = load_tokenizer(str(folder)).encode_documents([TEXT])[0]
    assert ids == [0, *tiny.encode_documents([TEXT])[0]]
    assert ids.count(1) == 1


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("template", [True, False])
def test_add_bos_token_decides_where_it_is_given(tiny: Loaded, tmp_path: Path, wanted: bool, template: bool) -> None:
    fast = with_bos(definition_of(tiny)) if template else definition_of(tiny)
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "add_bos_token": wanted}
    loaded = load_tokenizer(str(folder_with(tmp_path, fast, tokenizer_config=config)))
    assert loaded.prefix == ((0,) if wanted else ())


@pytest.mark.parametrize(
    ("side", "content"),
    [
        ("special_tokens_map", {"eos_token": "<|end|>"}),
        ("generation_config", {"eos_token_id": [1, 5]}),
        ("config", {"eos_token_id": 1}),
    ],
)
def test_the_end_token_may_be_named_elsewhere(tiny: Loaded, tmp_path: Path, side: str, content: dict[str, Any]) -> None:
    assert load_tokenizer(str(folder_with(tmp_path, definition_of(tiny), **{side: content}))).eos_id == 1


def test_no_end_token(tiny: Loaded, tmp_path: Path) -> None:
    loaded = load_tokenizer(str(folder_with(tmp_path, definition_of(tiny))))
    with pytest.raises(UserError, match="names no end token"):
        loaded.encode_batch([TEXT])


def test_fingerprints_tell_tokenizers_apart(tiny: Loaded, tmp_path: Path) -> None:
    config = {"eos_token": "<|begin|>"}
    other = load_tokenizer(str(folder_with(tmp_path, definition_of(tiny), tokenizer_config=config)))
    assert other.fingerprint != tiny.fingerprint


def test_errors_name_what_is_wrong(tmp_path: Path, tiny: Loaded) -> None:
    with pytest.raises(UserError, match="there is no tokenizer") as caught:
        load_tokenizer(str(tmp_path / "nothing"))
    assert "hub id" in str(caught.value)
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path))
    folder = folder_with(tmp_path / "odd", definition_of(tiny), tokenizer_config={"eos_token": "<missing>"})
    with pytest.raises(UserError, match="not in its vocabulary"):
        load_tokenizer(str(folder)).require_eos()


def test_a_hub_that_is_not_reachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("windlass.common.hub.FIRST_DELAY_S", 0.01)
    with pytest.raises(UserError, match="cannot be fetched from the hub"):
        load_tokenizer("meta-llama/Llama-3.2-1B")


@pytest.fixture(scope="module")
def chunkable(tiny: Loaded) -> list[tuple[Tokenizer, Loaded]]:
    """The tokenizers of each known pattern, as they are and as we use them."""
    found = [definition_of(tiny)]
    for pattern in sorted(KNOWN_PATTERNS):
        fast = definition_of(tiny)
        fast.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        found.append(fast)
    return [(fast, replace(tiny, definition=fast.to_str())) for fast in found]


PARTS = [*"ab Z9'.,-\n\r\t\u00a0é漢\u0301\x1c\u2028s", "<|end|>", "'s ", " a", "  b", ", a"]
ODD = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


@settings(max_examples=300, deadline=None)
@given(some=st.lists(st.one_of(ODD, st.text(max_size=40)), min_size=1, max_size=4))
def test_chunks_give_the_ids_of_the_whole(chunkable: list[tuple[Tokenizer, Loaded]], some: list[str]) -> None:
    assert all("".join(CHUNK.findall(text)) == text for text in some)
    for fast, loaded in chunkable:
        assert loaded._chunks is not None
        plain = [encoding.ids for encoding in fast.encode_batch(some, add_special_tokens=False)]
        assert loaded._chunks.encode(some) == plain


def test_chunks_on_real_text(tiny: Loaded) -> None:
    some = [*texts(200), (Path(__file__).read_text())]
    plain = definition_of(tiny).encode_batch(some, add_special_tokens=False)
    assert [ids[:-1] for ids in tiny.encode_documents(some)] == [one.ids for one in plain]


def test_other_tokenizers_are_encoded_whole(tiny: Loaded) -> None:
    fast = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    loaded = Loaded("words", fast.to_str(), {}, None, "</s>")
    assert loaded._chunks is None
    assert loaded.encode_documents(["a b a"]) == [[1, 0, 1, 2]]
