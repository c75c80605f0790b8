"""Every mistake in a run's data that can be known beforehand is one clear error."""

from __future__ import annotations

import gzip
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.conftest import json_lines, refusal, run_on, texts
from windlass.data.build.tokenizing import tokenize
from windlass.data.checks import check_data
from windlass.data.sequences.opening import open_sequences, tokenizer_of
from windlass.data.shards.folder import TokenShards
from windlass.data.sources.source import FileSource
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.spec import parse_run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "novel.jsonl"
    path.write_bytes(json_lines(texts(20)))
    return path


@pytest.fixture
def shards(text: Path, tmp_path: Path, tiny: Tokenizer) -> Path:
    tokenize([FileSource((text,), "text", "novel")], tmp_path / "shards", tiny, workers=1)
    return tmp_path / "shards"


def test_good_data(text: Path, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("text")
    for source in (
        text,
        shards,
        tmp_path / "plain.txt",
        tmp_path,
        tmp_path / "*.jsonl",
        "corpus:austen",
        "hf:allenai/c4",
    ):
        check_data(run_on(str(source)))
    check_data(run_on(str(shards), tokenizer="tiny", holdout=0.1, validation_source=None))
    check_data(run_on("hf:json", files=["a.jsonl"], validation_source=str(text)))


def test_data_that_is_read_hundreds_of_times(text: Path, shards: Path) -> None:
    """All steps of a run on 20 short documents; counted of shards, estimated of text."""
    run = run_on(str(shards), steps=1000)
    reads = run.train.steps * run.train.global_batch
    num_sequences = (TokenShards.open(shards).num_tokens - 1) // 16
    (warning,) = check_data(run)
    assert f"reads shards {reads / num_sequences:,.0f} times" in warning
    assert f"train.steps={10 * num_sequences // run.train.global_batch} reads it 10 times" in warning
    (warning,) = check_data(run_on(str(text), steps=1000))
    assert "reads novel.jsonl about " in warning
    mixed = {"sources": [{"source": str(shards)}, {"source": "hf:allenai/c4"}], "sequence_length": 16}
    (warning,) = check_data(parse_run({"name": "test", "model": {"preset": "any"}, "data": mixed}))
    assert f"{reads / 2 / num_sequences:,.0f} times" in warning
    assert check_data(run_on("corpus:austen")) == check_data(run_on("hf:allenai/c4")) == []


def test_one_pair_is_one_sequence(tmp_path: Path) -> None:
    """Examples are padded to whole sequences: one that is shorter is no part of a sequence."""
    pair = tmp_path / "pair.jsonl"
    pair.write_text(json.dumps({"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}) + "\n")
    many, few = (
        check_data(run_on(str(pair), format="preference", sequence_length=4096, steps=steps, tokenizer="tiny"))
        for steps in (1000, 1)
    )
    batch = run_on(str(pair)).train.global_batch
    assert f"reads pair.jsonl about {1000 * batch:,} times" in many[0]
    assert f"train.steps=1 reads it about {batch} times" in many[0]
    assert few == []


def test_a_tokenizer_that_was_fetched_is_still_the_runs(shards: Path, tiny: Tokenizer, tmp_path: Path, caplog) -> None:
    """Ranks open a hub's tokenizer by the folder that it was fetched into; shards know it by its name."""
    tiny.save(tmp_path / "fetched")
    open_sequences(run_on(str(shards), tokenizer="tiny"), "train", tokenizer=str(tmp_path / "fetched"))
    assert "was made with the tokenizer" not in caplog.text
    open_sequences(run_on(str(shards), tokenizer="acme/other"), "train", tokenizer=str(tmp_path / "fetched"))
    assert "was made with the tokenizer tiny; the run's is acme/other" in caplog.text


def test_missing_file(text: Path) -> None:
    message = refusal(text.with_name("novl.jsonl"))
    assert "there is no file or folder" in message
    assert f"data.source={text}" in message
    assert "the folder /no/where does not exist".replace("/where", "") in refusal("/no/where/x.jsonl")
    assert "hf:owner/name" in refusal("owner/name")


def test_nothing_there(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is an empty folder" in refusal(empty)
    assert "no file matches" in refusal(tmp_path / "*.jsonl")
    (empty / "blank.jsonl").write_text("")
    assert "blank.jsonl is empty" in refusal(empty / "blank.jsonl")
    (empty / "other.txt").write_text("")
    assert "all 2 files of empty are empty" in refusal(empty)
    (empty / "blank.jsonl").write_text('{"text": ""}\n')
    assert "holds no text in the field 'text'" in refusal(empty / "blank.jsonl")
    assert "data.source is empty" in refusal(" ")


def test_other_folders_and_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("x")
    message = refusal(tmp_path)
    assert "holds neither token shards nor text files" in message
    assert "model.safetensors" in message
    assert "is of no known kind" in refusal(tmp_path / "model.safetensors")


def test_records(tmp_path: Path, text: Path) -> None:
    message = refusal(text, text_field="body")
    assert "novel.jsonl:1 has no field 'body'" in message
    assert "fields there: text, id" in message
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(b'{"text": "x'))
    assert "torn.jsonl.gz:1 is not valid JSON" in refusal(torn)
    noise = tmp_path / "noise.parquet"
    noise.write_bytes(b"noise")
    assert "is not a parquet file" in refusal(noise)
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), noise)
    assert "fields there: body" in refusal(noise)


def test_shard_folders(shards: Path, tmp_path: Path, tiny: Tokenizer) -> None:
    assert "fewer than one sequence" in refusal(shards, sequence_length=100_000)
    other = tmp_path / "other-tokenizer"
    tiny.save(other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<|begin|>"}))
    message = refusal(shards, tokenizer=str(other))
    assert "made with another tokenizer" in message
    assert "data.tokenizer=tiny" in message
    path = shards / "shard-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    assert "shard-00000.tokens is truncated" in refusal(shards)
    (shards / "index.json").write_text("{}")
    assert "not an index of token shards" in refusal(shards)


def test_holdout_of_little(tmp_path: Path, tiny: Tokenizer) -> None:
    path = tmp_path / "little.txt"
    path.write_text("It is a truth universally acknowledged, that a single man")
    tokenize([FileSource((path,), "text", "little")], tmp_path / "out", tiny)
    assert "leaves nothing to train on" in refusal(tmp_path / "out", holdout=0.5)


def test_names(text: Path) -> None:
    assert "there is no corpus 'bronte'" in refusal("corpus:bronte")
    assert "names no dataset" in refusal("hf:")
    assert "names no dataset" in refusal("hf:a/b/c")
    assert "needs data.files" in refusal("hf:json")
    assert "data.files is for hf:json" in refusal("hf:allenai/c4", files=["x"])
    assert "data.files belongs to a hf: source" in refusal(text, files=["x"])
    assert "cannot be taken from the stream" in refusal("hf:allenai/c4", holdout=0.1)
    assert "names no files" in refusal("hf:json", files=["x"], validation_source="hf:json")
    assert "there is no file or folder" in refusal(text, validation_source="nowhere.txt")


def test_datasets_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs the `datasets` library" in refusal("hf:allenai/c4")


def test_it_imports_no_heavy_library(tmp_path: Path) -> None:
    import subprocess
    import sys

    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n')
    code = (
        "import sys; from windlass.data.checks import check_data; from tests.data.conftest import run_on\n"
        "check_data(run_on('corpus:austen')); check_data(run_on('hf:allenai/c4'))\n"
        "print({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules))\n"
        "from windlass.data.sources.hub import load; from windlass.data.sources.source import hub_source\n"
        "source = hub_source('hf:json', config=None, split='train', files=(sys.argv[1],), text_field='text')\n"
        "print([record['text'] for record in load(source)[0]])\n"
        "print({'torch', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "['a']", "set()"]


@pytest.fixture
def hub_shards(text: Path, tmp_path: Path, tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards made with a hub's tokenizer, on a machine that no longer reaches the hub."""
    folder = tmp_path / "hub-shards"
    tokenize([FileSource((text,), "text", "novel")], folder, replace(tiny, name="acme/words"), workers=1)

    def unreachable(name: str) -> Tokenizer:
        raise UserError(f"the tokenizer {name} cannot be fetched from the hub")

    monkeypatch.setattr("windlass.data.tokenizers.tokenizer.from_hub", unreachable)
    return folder


def test_shards_of_the_hubs_tokenizer_need_no_hub(hub_shards: Path, tiny: Tokenizer) -> None:
    run = run_on(str(hub_shards), tokenizer="acme/words")
    check_data(run)
    assert tokenizer_of(run.data).fingerprint == tiny.fingerprint  # what an export writes beside the weights


def test_shards_of_another_name_are_not_taken_at_their_word(hub_shards: Path) -> None:
    assert "cannot be fetched" in refusal(hub_shards, tokenizer="acme/others")
    check_data(run_on(str(hub_shards), tokenizer="tiny"))  # another name, the same tokens


def test_a_missing_file_is_likened_to_its_name_not_to_its_ending(tmp_path):
    from windlass.data.sources.source import closest

    for name in ("short.jsonl", "chats.jsonl.gz", "chats.jsonl"):
        (tmp_path / name).touch()
    assert closest(tmp_path / "nothere.jsonl") is None
    assert closest(tmp_path / "chat.jsonl") == tmp_path / "chats.jsonl"
    assert closest(tmp_path / "chats.json") == tmp_path / "chats.jsonl"
