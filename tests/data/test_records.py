"""Every kind of file is read or named; a bad record is refused with its place, or left out and counted."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.conftest import json_lines, refusal, run_on, texts
from windlass.data.build.tokenizing import tokenize
from windlass.data.checks import check_data
from windlass.data.sequences.packing import PackedRows
from windlass.data.shards.folder import TokenShards, parse_index
from windlass.data.sources.reading import Skipped, documents, file_pieces, units_of
from windlass.data.sources.records import example_text
from windlass.data.sources.source import FileSource, source_named
from windlass.data.tokenizers.chat import encoder
from windlass.data.tokenizers.tokenizer import Tokenizer, from_folder, load_tokenizer
from windlass.errors import ExitCode, UserError
from windlass.spec.data import DataSection


def read(path: Path | str, skipped: Skipped | None = None, **options: Any) -> list[str]:
    source = source_named(str(path), **options)
    assert isinstance(source, FileSource)
    return [text for unit in units_of([source]) for piece in unit for text in documents(piece, skipped)]


def zstd(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


CSV = b'text,n\n"one, with a comma",1\n"two\nlines",2\n"a ""quote""",3\n'
ROWS = ["one, with a comma", "two\nlines", 'a "quote"']


def test_every_kind_and_compression(tmp_path: Path) -> None:
    some = texts(4)
    plain = json_lines(some)
    kinds = {
        "a.jsonl": plain,
        "b.JSONL.GZ": gzip.compress(plain),
        "c.json.zst": zstd(plain[:50]) + zstd(plain[50:]),
        "d.jsonl.bz2": bz2.compress(plain),
        "e.Jsonl.Xz": lzma.compress(plain),
    }
    for name, data in kinds.items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == some, name
    for name, data in {"f.csv": CSV, "g.csv.gz": gzip.compress(CSV), "h.CSV": b"\xef\xbb\xbf" + CSV}.items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == ROWS, name
    (tmp_path / "i.tsv").write_bytes(b"n\ttext\n1\tone, two\n")
    assert read(tmp_path / "i.tsv") == ["one, two"]
    (tmp_path / "j.txt").write_bytes(b"\xef\xbb\xbfEmma")
    assert read(tmp_path / "j.txt") == ["Emma"]  # without the byte order mark
    (tmp_path / "k.jsonl").write_bytes(b"\xef\xbb\xbf" + plain)
    assert read(tmp_path / "k.jsonl") == some


def test_linked_folders_are_read_and_unknown_files_named(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "texts"
    (elsewhere / "deeper").mkdir(parents=True)
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (elsewhere / "deeper" / "b.txt").write_text("two")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(folder)  # a circle
    (folder / "c.txt").symlink_to(elsewhere / "deeper" / "b.txt")
    for name in ("d.arrow", "e.zip", "fetched.yaml", ".hidden"):
        (folder / name).write_text("x")
    source = source_named(str(folder))
    assert isinstance(source, FileSource)
    assert sorted(read(folder)) == ["one", "two", "two"]
    assert source.ignored == ("d.arrow", "e.zip")
    warning = " ".join(check_data(run_on(str(folder))))
    assert "2 files: d.arrow, e.zip" in warning


BAD_LINES = {
    '{"text": "torn': "is not valid JSON",
    '{"body": "x"}': "has no field 'text'",
    '{"text": 5}': "the field 'text' is no text",
    "[1]": "is list",
    '{"text": "cut \\ud83d here"}': r"holds half a character, U\+D83D",
    b'{"text": "caf\xe9"}': "is not UTF-8 text",
    "[" * 100_000: "is not valid JSON",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_or_left_out(line: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    good = json_lines(texts(20))
    path.write_bytes(good + (line.encode() if isinstance(line, str) else line) + b"\n" + good)
    with pytest.raises(UserError, match=rf"some\.jsonl:21:? {BAD_LINES[line]}") as caught:
        check_data(run_on(str(path)), thorough=True)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert "data.bad_records=skip" in str(caught.value)
    skipped = Skipped()
    assert read(path, skipped, skip_bad=True) == texts(20) * 2
    assert skipped.count == 1
    (warning,) = check_data(run_on(str(path), bad_records="skip"), thorough=True)
    assert "1 bad records" in warning
    assert "some.jsonl:21" in warning


def test_bad_rows_of_tables(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.csv"
    path.write_bytes(CSV + b'"caf\xe9",4\n"short"\n"x",1,2\n"fine",5\n')
    with pytest.raises(UserError, match=r"a\.csv:6 is not UTF-8 text"):
        read(path)
    skipped = Skipped()
    assert read(path, skipped, skip_bad=True) == [*ROWS, "fine"]
    assert skipped.count == 3
    assert skipped.reasons[1:] == [
        f"{path}:7 has 1 fields, the first line 2",
        f"{path}:8 has 3 fields, the first line 2",
    ]
    with pytest.raises(UserError, match=r"a\.csv:2 has no field 'body'"):
        read(path, text_field="body")
    (tmp_path / "b.csv").write_bytes(b'text\n"open\n')
    with pytest.raises(UserError, match=r"b\.csv:2 is not valid CSV"):
        read(tmp_path / "b.csv")
    column = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(b"\x00\0\0\0\x02\0\0\0\x04\0\0\0"), pyarrow.py_buffer(b"ok\xff\xfe")
    )
    table = pyarrow.table({"meta": [{"text": "x"}, None], "n": [1, 2], "body": column})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(UserError, match="has no field 'text'") as caught:
        read(tmp_path / "c.parquet")
    assert "data.text_field=body" in str(caught.value)  # the one that is a text
    with pytest.raises(UserError, match=r"'meta' of .* is no text") as caught:
        read(tmp_path / "c.parquet", text_field="meta")
    assert "data.text_field=body" in str(caught.value)
    with pytest.raises(UserError, match=r"c\.parquet, row group 0, row 1 is not UTF-8 text"):
        read(tmp_path / "c.parquet", text_field="body")
    assert read(tmp_path / "c.parquet", text_field="body", skip_bad=True) == ["ok"]


SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Good day"}]
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day"}]


def test_sharegpt_and_messages_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [
        {"conversations": SHAREGPT},
        {"conversations": SHAREGPT, "system": "Be kind."},
        {"messages": SHAREGPT},
        {"messages": MESSAGES},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    expected = [MESSAGES, [{"role": "system", "content": "Be kind."}, *MESSAGES], MESSAGES, MESSAGES]
    assert [json.loads(message)["messages"] for message in read(path, text_field="@chat:messages")] == expected
    quoted = json.dumps(MESSAGES).replace('"', '""')
    (tmp_path / "b.csv").write_text(f'messages\n"{quoted}"\n')
    assert [json.loads(message)["messages"] for message in read(tmp_path / "b.csv", text_field="@chat:messages")] == [
        MESSAGES
    ]
    (tmp_path / "c.csv").write_text("question,answer\nHi,Good day\n")
    (one,) = read(tmp_path / "c.csv", text_field="@instruction:question:answer")
    assert json.loads(one) == {"prompt": "Hi", "completion": "Good day"}
    path.write_text(json.dumps({"conversations": [*SHAREGPT, {"from": "alien", "value": "?"}]}) + "\n")
    with pytest.raises(UserError, match=r"a\.jsonl:1: message 3 has the role 'alien'"):
        read(path, text_field="@chat:messages")


def instructions(path: Path, *prompts: int) -> Path:
    """Records with prompts of so many words."""
    path.write_text("".join(json.dumps({"prompt": "the " * words, "completion": "of"}) + "\n" for words in prompts))
    return path


ALPACA = "@instruction:instruction:output"
TRANSLATE = {"instruction": "Translate.", "input": "Hallo", "output": "Hello"}


def refused(path: Path, field: str) -> UserError:
    with pytest.raises(UserError) as caught:
        [text for piece in file_pieces(path, field, skip_bad=True) for text in documents(piece)]
    return caught.value


def test_half_of_alpacas_prompt_is_no_prompt(tmp_path: Path) -> None:
    """Also where bad records are skipped: these would be every other one."""
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text(json.dumps({**TRANSLATE, "input": ""}) + "\n" + json.dumps(TRANSLATE))
    pq.write_table(pa.table({key: [value] for key, value in TRANSLATE.items()}), table)
    for path in (lines, table):
        error = refused(path, ALPACA)
        assert "would be left out of the prompt" in error.what
        assert "data.prompt_field=prompt" in str(error.fix)
    lines.write_text(json.dumps({**TRANSLATE, "input": ""}))
    assert [text for piece in file_pieces(lines, ALPACA) for text in documents(piece)]


@pytest.mark.parametrize(
    ("value", "indent", "query"), [([TRANSLATE], 2, ".[]"), ([TRANSLATE], None, ".[]"), (TRANSLATE, 2, ".")]
)
def test_one_value_in_a_file_of_lines(value: Any, indent: int | None, query: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(value, indent=indent))
    error = refused(path, ALPACA)
    assert "is one JSON value" in error.what
    # A shell empties the file that it writes to before it is read.
    assert error.fix == f"jq -c '{query}' {path} > {tmp_path / 'a.lines.jsonl'}"


def test_a_table_without_any_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array([b"bytes"], pa.binary())}), path)
    assert "is no text" in refused(path, "text").what


def test_weights_and_parts_of_chats(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]
    path.write_text(json.dumps({"conversations": said}))
    (text,) = [text for piece in file_pieces(path, "@chat:messages") for text in documents(piece)]
    assert json.loads(text)["messages"][1] == {"role": "assistant", "content": "a", "weight": 0}
    empty = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "text", "text": " "}]}]
    with pytest.raises(UserError, match="message 2 is empty"):
        example_text({"messages": empty}, "@chat:messages", "here")


def test_prompts_that_fill_a_sequence_are_left_out(tmp_path: Path, tiny: Tokenizer) -> None:
    path = instructions(tmp_path / "some.jsonl", 3, 200, 4, 300)
    data = DataSection(format="instruction")
    source = source_named(str(path), text_field="@instruction:prompt:completion")
    assert isinstance(source, FileSource)
    tokenize([source], tmp_path / "shards", encoder(tiny, data), workers=1)
    rows = PackedRows.packed(TokenShards.open(tmp_path / "shards"), "some", 32, "truncate")
    assert rows.packing.num_unlabelled == 2
    assert "2 left out: their prompts alone are too long" in rows.description
    assert [one for row in rows.packing.rows for one in row] == [0, 2]
    assert all(rows.sequence(row).loss[1:].any() for row in range(rows.num_sequences))  # type: ignore[index]
    long = instructions(tmp_path / "long.jsonl", 200, 300)
    with pytest.raises(UserError, match="no example with a completion within 32 tokens") as caught:
        check_data(run_on(str(long), format="instruction", sequence_length=32, tokenizer="tiny"), thorough=True)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    check_data(run_on(str(path), format="instruction", sequence_length=32, tokenizer="tiny"), thorough=True)


def test_what_is_found_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, **data: Any) -> str:
        return refusal(path, thorough=True, **{"tokenizer": "tiny", **data})

    little = tmp_path / "little.jsonl"
    little.write_bytes(json_lines(["a few words"]))
    (ids,) = load_tokenizer("tiny").encode_documents(["a few words"])
    words = len(ids)
    assert "fewer than one sequence of 64 needs" in fails(little, sequence_length=64)
    assert "leaves nothing to train on" in fails(little, sequence_length=words - 1, holdout=0.5)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    assert "is not UTF-8 text" in fails(latin)
    chats = tmp_path / "chats.jsonl"
    strange = [{"role": "narrator", "content": "x"}, *MESSAGES]
    chats.write_text("".join(json.dumps({"messages": one}) + "\n" for one in [*[MESSAGES] * 200, strange]))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    load_tokenizer("tiny").save(tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text(template)
    found = fails(chats, format="chat", tokenizer=str(tmp_path / "chatty"))
    assert "chats.jsonl:201: message 1 has the role 'narrator'" in found
    monkeypatch.setattr("windlass.data.checks.SCAN_BYTES", 100)
    warning = " ".join(check_data(run_on(str(chats), format="chat", tokenizer=str(tmp_path / "chatty")), thorough=True))
    assert "were not looked at beforehand" in warning
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "file" / "cache"))
    assert "cannot be written to" in fails(little)


INDEX = {
    "version": 1,
    "dtype": "uint16",
    "tokenizer": {"name": "tiny", "fingerprint": "ab", "vocab_size": 10, "eos_id": 0},
    "num_tokens": 5,
    "num_documents": 1,
    "shards": [
        {
            "name": "shard-00000",
            "num_tokens": 5,
            "num_documents": 1,
            "tokens_sha256": "a" * 64,
            "documents_sha256": "b" * 64,
            "blocks_sha256": "c" * 64,
        }
    ],
    "block_bytes": 1024,
    "left_out": {},
    "loss_bit": False,
}
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.lists(st.none()), st.just({})
)


def changed(value: Any, path: list[Any], new: Any) -> Any:
    if not path:
        return new
    head, *rest = path
    if isinstance(value, list):
        return [changed(one, rest, new) if place == head else one for place, one in enumerate(value)]
    return {**value, head: changed(value[head], rest, new)}


PATHS: list[list[Any]] = [
    *[[key] for key in INDEX],
    *[["tokenizer", key] for key in ("name", "fingerprint", "vocab_size")],
    *[["shards", 0, key] for key in INDEX["shards"][0]],  # type: ignore[index]
    ["shards", 0],
]


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), new=ODD)
@example(path=["shards", 0, "name"], new="../../etc/passwd")
@example(path=["shards", 0, "name"], new="/etc/passwd")
@example(path=["shards", 0, "num_tokens"], new=-5)
@example(path=["shards", 0, "num_tokens"], new=True)
def test_an_index_is_read_or_refused(path: list[Any], new: Any) -> None:
    """Whatever a store holds in its place: names never leave the folder, numbers are numbers."""
    assert parse_index(json.dumps(INDEX), "x").num_tokens == 5
    try:
        index = parse_index(json.dumps(changed(INDEX, path, new)), "x")
    except UserError:
        return
    assert all("/" not in shard.name and ".." not in shard.name for shard in index.shards)
    assert sum(shard.num_tokens for shard in index.shards) == index.num_tokens >= 0


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["json", "cut", "flip"]), st.integers(0, 1 << 16))
@example(b"[" * 200, "json", 0)
def test_noise_in_an_index(noise: bytes, how: str, place: int) -> None:
    text = json.dumps(INDEX)
    at = place % len(text)
    text = {
        "json": noise.decode("utf-8", "replace"),
        "cut": text[:at],
        "flip": text[:at] + noise[:1].decode("latin-1") + text[at + 1 :],
    }[how]
    with contextlib.suppress(UserError):
        parse_index(text, "x")


def outcome(path: Path, **options: Any) -> tuple[list[str], str | None]:
    """What was read, or what was said; anything but a UserError is a defect."""
    try:
        return read(path, **options), None
    except UserError as error:
        return [], error.what


SUFFIXES = [".jsonl", ".csv", ".txt", ".parquet", ".jsonl.gz", ".csv.zst", ".txt.bz2", ".jsonl.xz"]


@settings(max_examples=200, deadline=None)
@given(
    suffix=st.sampled_from(SUFFIXES), data=st.binary(min_size=1, max_size=300), chat=st.booleans(), skip=st.booleans()
)
@example(suffix=".csv", data=b'text\n"\x00"\n', chat=False, skip=True)
@example(suffix=".jsonl", data=b'{"text": "\\udfff"}', chat=False, skip=False)
def test_noise_in_data_files(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: bytes, chat: bool, skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / f"noise{suffix}"
    path.write_bytes(data)
    found, error = outcome(path, text_field="@chat:messages" if chat else "text", skip_bad=skip)
    assert error is None or path.name in error
    assert all(one.encode("utf-8") for one in found)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.sampled_from(["user", "assistant", "gpt"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "messages", "text", "tools"]), inner, max_size=4
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(record=VALUES, field=st.sampled_from(["text", "@chat:messages", "@instruction:text:value"]))
def test_any_json_is_a_record_or_refused(tmp_path_factory: pytest.TempPathFactory, record: Any, field: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(record) + "\n")
    found, error = outcome(path, text_field=field)
    assert error is None or f"{path.name}:1" in error
    assert all(isinstance(one, str) for one in found)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]), st.one_of(st.binary(max_size=60), VALUES))
def test_noise_in_a_tokenizer(tmp_path_factory: pytest.TempPathFactory, name: str, noise: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    load_tokenizer("tiny").save(folder)
    (folder / name).write_bytes(noise if isinstance(noise, bytes) else json.dumps(noise).encode())
    with contextlib.suppress(UserError):
        from_folder(folder, "some")
