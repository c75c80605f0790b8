"""What is wrong with data, as a user meets it: one message, exit code 2, nothing left behind; a look at a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.conftest import json_lines, texts
from windlass.cli.main import run_command
from windlass.data.build.tokenizing import tokenize
from windlass.data.sources.source import FileSource
from windlass.data.tokenizers.chat import encoder
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import UserError
from windlass.spec.data import DataSection

CHATML = (
    "{% for m in messages %}<|{{m.role}}|>{{m.content}}{{eos_token}}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [{"role": "user", "content": "How often does it turn?"}, {"role": "assistant", "content": "Nobody counts."}]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_file(tmp_path: Path, **data: Any) -> Path:
    path = tmp_path / "my.yaml"
    values = {
        "name": "my",
        "model": {"preset": "llama3.2-tiny"},
        "data": {"tokenizer": "tiny", "sequence_length": 32, **data},
        "train": {"steps": 2, "global_batch": 2},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def chatty(tmp_path: Path, tiny: Tokenizer) -> Path:
    tiny.save(tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text(CHATML)
    return tmp_path / "chatty"


def said(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int) -> str:
    found = run_command([str(one) for one in arguments])
    output = capsys.readouterr()
    assert found == code, output.out + output.err
    return output.out + output.err


def test_plan_of_data_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path, source="nothere.jsonl")
    assert "there is no file or folder nothere.jsonl" in said(capsys, "plan", path, "--gpu", "H200", code=2)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_bytes(json_lines(texts(40)))
    (tmp_path / "texts" / "b.arrow").write_text("x")
    assert "b.arrow" in said(capsys, "plan", path, "data.source=texts", "--gpu", "H200", code=0)


def test_plan_names_chats_without_an_end(tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    path = run_file(tmp_path, source="chats.jsonl", format="chat", tokenizer="chatty")
    assert "where to stop" not in said(capsys, "plan", path, "--gpu", "H200", code=0)
    (chatty / "chat_template.jinja").write_text("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    assert "the model does not learn where to stop" in said(capsys, "plan", path, "--gpu", "H200", code=0)


@pytest.mark.parametrize(
    ("content", "data", "message"),
    [
        (json_lines(texts(9)) + b'{"text": "torn\n', {}, "own.jsonl:10 is not valid JSON"),
        (json_lines(texts(9)) + b'{"text": "half \\ud83d"}\n', {}, "own.jsonl:10 holds half a character, U+D83D"),
        (json_lines(["little"]), {}, "fewer than one sequence of 32 needs"),
        ('{"text": "caf\xe9"}\n'.encode("latin-1"), {}, "own.jsonl:1 is not UTF-8 text"),
        (
            b"".join(json.dumps({"messages": CHAT}).encode() + b"\n" for _ in range(200))
            + json.dumps({"messages": [{"role": "narrator", "content": "x"}, *CHAT]}).encode(),
            {"format": "chat", "tokenizer": "chatty"},
            "own.jsonl:201: message 1 has the role 'narrator'",
        ),
    ],
)
def test_a_run_on_bad_data_starts_nothing(
    content: bytes,
    data: dict[str, Any],
    message: str,
    tmp_path: Path,
    chatty: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own.jsonl").write_bytes(content)
    path = run_file(tmp_path, source="own.jsonl", **data)
    assert message in said(capsys, "run", path, "--yes", code=2)
    assert not (tmp_path / "runs").exists()


def test_a_run_without_a_cache_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.jsonl").write_bytes(json_lines(texts(40)))
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "own.jsonl" / "cache"))
    found = said(capsys, "run", run_file(tmp_path, source="own.jsonl"), "--yes", code=2)
    assert "own.jsonl/cache/tokens cannot be written to" in found
    assert "export WINDLASS_CACHE=FOLDER" in found
    assert not (tmp_path / "runs").exists()


def test_bad_records_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_bytes(json_lines(texts(9)) + b'{"text": "torn\n{"text": 5}\n')
    found = said(capsys, "data", "tokenize", "own.jsonl", "-o", "out", "--workers", 1, "--bad-records", "skip", code=0)
    assert "left out: 2 bad records" in found
    assert "9 documents" in found
    assert "data.bad_records=skip" in said(capsys, "data", "tokenize", "own.jsonl", "-o", "out2", code=2)
    assert not (tmp_path / "out2").exists()


def test_the_text_of_a_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = texts(40)
    (tmp_path / "own.jsonl").write_bytes(json_lines(some))
    path = run_file(tmp_path, source="own.jsonl")
    found = json.loads(said(capsys, "data", "inspect", path, "--sequence", "window:0", "--json", code=0))
    assert found["documents"][0][0] == 0
    assert found["documents"][0][1].startswith(some[0][:20])
    assert (found["num_tokens"], found["num_trained"]) == (33, 32)
    shown = said(capsys, "data", "inspect", path, "--sequence", "window:1", code=0)
    assert "document " in shown
    assert "there is no window:100000" in said(capsys, "data", "inspect", path, "--sequence", "window:100000", code=2)
    assert "names no sequence" in said(capsys, "data", "inspect", path, "--sequence", "row:1", code=2)
    assert "belongs to a run file" in said(capsys, "data", "inspect", "own.jsonl", "--sequence", "row:1", code=2)


def test_a_chat_with_its_loss_mask(tmp_path: Path, chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(5)))
    expected = "<|user|>How often does it turn?<|end|>\n<|assistant|>⟦Nobody counts.<|end|>\n⟧"
    arguments = ("--format", "chat", "--tokenizer", "chatty", "--samples", 1)
    found = json.loads(said(capsys, "data", "inspect", "chats.jsonl", *arguments, "--json", code=0))
    assert found["samples"] == [expected]
    assert expected in said(capsys, "data", "inspect", "chats.jsonl", *arguments, code=0)
    section = DataSection(format="chat")
    source = FileSource((tmp_path / "chats.jsonl",), "@chat:messages", "chats")
    tokenize([source], tmp_path / "shards", encoder(load_tokenizer("chatty"), section), workers=1)
    found = json.loads(said(capsys, "data", "inspect", "shards", "--samples", 1, "--json", code=0))
    assert found["samples"] == [expected]
    path = run_file(tmp_path, source="shards", format="chat", tokenizer="chatty")
    row = json.loads(said(capsys, "data", "inspect", path, "--sequence", "row:0", "--json", code=0))
    assert row["documents"][0] == [0, expected]
    assert "needs a tokenizer" in said(capsys, "data", "inspect", "chats.jsonl", "--format", "chat", code=2)


def test_the_fix_is_not_what_was_set(tmp_path: Path, tiny: Tokenizer) -> None:
    """A template that rewrites what came before even the last turn: `train_on=last` would not help who has it."""
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tiny.save(tmp_path / "odd")
    (tmp_path / "odd" / "chat_template.jinja").write_text(template)
    one = encoder(load_tokenizer("odd"), DataSection(format="chat", train_on="last"))
    with pytest.raises(UserError, match="renders a message differently") as caught:
        one.encode_documents([json.dumps({"messages": CHAT})])
    assert "train_on=last" not in str(caught.value)
    assert "{% generation %}" in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_utf_16_is_named(tmp_path: Path, capsys: Any, name: str, encoding: str) -> None:
    text = {"a.jsonl": '{"text": "Größe"}\n', "a.csv": "text,id\nGröße,1\n", "a.txt": "Größe\n"}[name]
    mark = "\ufeff" if encoding == "utf-16-be" else ""  # the other writes it itself
    (tmp_path / name).write_bytes((mark + text).encode(encoding))
    assert run_command(["data", "inspect", name]) == 2
    told = capsys.readouterr().err
    assert f"{name} is UTF-16 text" in told
    assert f"iconv -f utf-16 -t utf-8 {name}" in told
    assert "cp1252" not in told


def test_a_bad_record_is_told_with_commands_that_exist(tmp_path: Path, capsys: Any) -> None:
    """`inspect` takes --text-field, and cannot leave records out itself."""
    (tmp_path / "bad.jsonl").write_text('{"body": "a"}\n')
    assert run_command(["data", "inspect", "bad.jsonl"]) == 2
    told = capsys.readouterr().err
    assert "--text-field body" in told
    assert "windlass data tokenize … --bad-records skip" in told
    assert "tokenize: --" not in told


def test_tables_of_other_programs(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.csv").write_text("id;text\n1;hello\n")
    assert run_command(["data", "inspect", "a.csv"]) == 2
    told = capsys.readouterr().err
    assert "its columns are separated by ';'" in told
    assert "delimiter=';'" in told
    (tmp_path / "b.csv").write_text("id , text\n1,hello\n")
    assert run_command(["data", "inspect", "b.csv"]) == 0
    assert "hello" in capsys.readouterr().out
