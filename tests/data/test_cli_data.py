"""`windlass data` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import json_lines, texts
from windlass.cli.main import run_command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "novel.jsonl"
    path.write_bytes(json_lines(texts(30)))
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> Any:
    assert run_command(["data", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_tokenize_and_inspect(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    made = answer(capsys, "tokenize", text, "-o", out, "--workers", 1, "--shard-tokens", "0.5K")
    assert made["documents"] == 30
    assert made["shards"] > 1
    seen = answer(capsys, "inspect", out, "--samples", 2)
    assert seen["num_tokens"] == made["tokens"]
    assert seen["facts"]["checksums"] == "all fit"
    assert seen["samples"][0] == texts(30)[0] + "<|end|>"
    assert len(seen["samples"]) == 2
    files = answer(capsys, "inspect", text)
    assert (files["num_documents"], files["samples"][2]) == (30, texts(30)[2])
    assert run_command(["data", "inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"{made['tokens']:,}" in shown
    assert "sample 3" in shown


def test_what_is_printed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run_command(["data", "tokenize", str(text), "-o", str(out), "--limit", "5", "--workers", "1"]) == 0
    shown = capsys.readouterr().out
    assert "5 documents, 1 shard;" in shown
    assert f"data.source={out}" in shown


def test_errors(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "there is no file" in answer(capsys, "tokenize", tmp_path / "none.jsonl", "-o", out, code=2)["error"]
    assert "no field 'body'" in answer(capsys, "tokenize", text, "-o", out, "--text-field", "body", code=2)["error"]
    assert "not a count" in answer(capsys, "tokenize", text, "-o", out, "--shard-tokens", "many", code=2)["error"]
    assert "there is no tokenizer" in answer(capsys, "tokenize", text, "-o", out, "--tokenizer", "./x", code=2)["error"]
    assert "exists" in answer(capsys, "tokenize", text, "-o", tmp_path, code=2)["error"]
    assert "there is no file" in answer(capsys, "inspect", out, code=2)["error"]
    assert not out.exists()


def test_damage_is_found(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    answer(capsys, "tokenize", text, "-o", out, "--workers", 1)
    path = out / "shard-00000.tokens"
    content = bytearray(path.read_bytes())
    content[0] ^= 4
    path.write_bytes(content)
    assert "is damaged" in answer(capsys, "inspect", out, code=2)["error"]
    assert "holds token shards already" in answer(capsys, "tokenize", out, "-o", tmp_path / "b", code=2)["error"]


@pytest.mark.slow
def test_duplicates_validation_and_a_mixture(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_bytes(json_lines([*texts(60), *texts(20)]))
    out = tmp_path / "out"
    made = answer(capsys, "tokenize", text, "-o", out, "--workers", 1, "--dedup", "--validation", 0.2)
    assert made["left_out"] == {"duplicates": 20}
    held = answer(capsys, "inspect", made["validation"])
    assert made["documents"] + held["num_documents"] == 60
    assert sum(bar["count"] for bar in held["lengths"]["histogram"]) == held["num_documents"]
    run = tmp_path / "mix.yaml"
    sources = [{"source": str(out), "weight": 3}, {"source": str(text), "weight": 1}]
    run.write_text(json.dumps({"model": {"preset": "llama-tiny"}, "data": {"sources": sources, "sequence_length": 16}}))
    found = answer(capsys, "inspect", run, "train.steps=10", "train.global_batch=8")
    assert [(one["share"], one["sequences_read"]) for one in found] == [(0.75, 60), (0.25, 20)]
    wrong = answer(capsys, "tokenize", text, "-o", tmp_path / "no", "--validation", 0.9, code=2)
    assert "0.9 is not in the range" in wrong["error"]
    assert not (tmp_path / "no").exists()
