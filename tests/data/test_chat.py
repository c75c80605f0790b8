"""Chats and instructions become the tokens transformers makes of them, and exactly the completions are trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.data.build.tokenizing import tokenize
from windlass.data.sequences.packing import PackedRows, pack
from windlass.data.shards.folder import TokenShards
from windlass.data.sources.reading import documents, units_of
from windlass.data.sources.records import example_text
from windlass.data.sources.source import FileSource, parse_source
from windlass.data.tokenizers.chat import TRAINED, ExampleTokenizer, encoder
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import UserError
from windlass.spec.data import DataSection

PLAIN = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}{{ eos_token }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{%- for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}" + PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
)
CONCATENATES = PLAIN.replace(
    "{{ m['content'] }}",
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}",
)
PRINTS = CONCATENATES.replace("c.function.name + c.function.arguments", "c.function.name }}{{ c.function.arguments")
TWO_BLOCKS = (  # the text and its end are marked each for itself
    "{%- for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% endgeneration %}{% generation %}{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THOUGHTFUL = PLAIN.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
ENDED = (  # a token ends the whole chat, beside those that end its messages
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
PARTS_ONLY = (  # of models that see pictures: a content is a list
    "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}{{ part.text }}{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (  # shows what the assistant thought in its last message alone
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' and loop.last %}(thinking){% endif %}"
    "{{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How often does a windlass turn?"},
    {"role": "assistant", "content": "Nobody counts."},
    {"role": "user", "content": "And the chain?"},
    {"role": "assistant", "content": "It comes up from dark green water, link by link."},
]


def tokenizer(template: str | None = PLAIN) -> Tokenizer:
    tiny = load_tokenizer("tiny")
    config = {key: value for key, value in tiny.config.items() if key != "chat_template"}
    return replace(tiny, config=config | ({"chat_template": template} if template else {}))


def encoded(text: str, template: str | None = PLAIN, **data: Any) -> tuple[ExampleTokenizer, list[int], list[str]]:
    """The tokens of one example, and the texts of its runs of trained tokens."""
    one = encoder(tokenizer(template), DataSection(format=data.pop("format", "chat"), **data))
    assert isinstance(one, ExampleTokenizer)
    (ids,) = one.encode_documents([text])
    trained = [number & TRAINED != 0 for number in ids]
    runs, here = [], []
    for number, yes in zip([*ids, 0], [*trained, False], strict=True):
        if yes:
            here.append(number & ~TRAINED)
        elif here:
            runs.append(one.decode(here))
            here = []
    return one, [number & ~TRAINED for number in ids], runs


def chat(messages: Any = CHAT, **more: Any) -> str:
    return example_text({"messages": messages, **more}, "@chat:messages", "here")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_turns_are_trained_on(template: str) -> None:
    one, _ids, runs = encoded(chat(), template)
    end = str(one.eos_token)
    assert [run.rstrip("\n") for run in runs] == [message["content"] + end for message in CHAT[2::2]]
    _, _, last = encoded(chat(), template, train_on="last")
    assert last == runs[-1:]


@pytest.mark.train  # imports transformers
@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_tokens_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    one, ids, _ = encoded(chat(), template)
    one.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(CHAT, tokenize=False) == one.decode(ids)
    made = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=template == MARKED)
    assert list(made["input_ids"]) == ids
    if template == MARKED:
        (marked,) = one.encode_documents([chat()])
        assert [int(number & TRAINED != 0) for number in marked] == list(made["assistant_masks"])


def test_tools_go_to_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "turn", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "turn it"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "turn", "arguments": {}}}]},
        {"role": "tool", "content": "turned"},
        {"role": "assistant", "content": "Done."},
    ]
    one, ids, runs = encoded(chat(messages, tools=tools), TOOLS)
    text = one.decode(ids)
    assert text.startswith("<|tools|>[{")
    assert '"name": "turn"' in text
    assert "turned" not in "".join(runs)
    assert "Done." in runs[-1]


def call(arguments: Any, name: str = "turn") -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "user", "content": "turn it"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
    ]


@pytest.mark.parametrize("template", [TOOLS, CONCATENATES, PRINTS])
@pytest.mark.parametrize("arguments", [{"by": 3}, '{"by": 3}'])
def test_arguments_of_tool_calls_are_written_once(template: str, arguments: Any) -> None:
    """As an object or, as OpenAI has it, as a text: the template gets what it is made for."""
    _, _, (run,) = encoded(chat(call(arguments)), template)
    assert '{"by": 3}' in run


def test_what_a_template_leaves_out_is_not_trained_on_as_nothing() -> None:
    with pytest.raises(UserError, match="leaves out the tool calls"):
        encoded(chat(call({})), PLAIN)
    with pytest.raises(UserError, match="leaves out the text"):
        encoded(chat(), PARTS_ONLY)
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in CHAT]
    assert len(encoded(chat(parts), PARTS_ONLY)[2]) == 2


@pytest.mark.parametrize("template", [PLAIN, MARKED, TWO_BLOCKS, THOUGHTFUL, ENDED])
def test_which_turns_are_trained_on(template: str) -> None:
    texts = [message["content"] for message in CHAT[2::2]]

    def trained(**data: Any) -> list[str]:
        messages = data.pop("messages", CHAT)
        one, _, runs = encoded(chat(messages), template, **data)
        return [run.replace("<|end|>", "").replace(str(one.eos_token), "").rstrip("\n") for run in runs]

    assert trained() == texts
    assert trained(train_on="last") == texts[1:]
    # A turn of weight 0 is what somebody answered, and not what should be learnt.
    assert trained(messages=[*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]]) == texts[1:]
    assert trained(messages=[*CHAT[:4], {**CHAT[4], "weight": 0}]) == texts[:1]
    assert trained(messages=[*CHAT[:4], {**CHAT[4], "weight": 0}], train_on="last") == []


def test_an_answer_that_begins_as_the_prompt_goes_on() -> None:
    messages = [{"role": "user", "content": "a table"}, {"role": "assistant", "content": "<th>one</th>"}]
    _, _, (run,) = encoded(chat(messages), THOUGHTFUL)
    assert run.startswith("<th>one")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(UserError, match="renders a message differently when others follow") as caught:
        encoded(chat(), FORGETFUL)
    assert "data.train_on=last" in str(caught.value)
    _, _, runs = encoded(chat(), FORGETFUL, train_on="last")
    assert len(runs) == 1
    assert runs[0].startswith("(thinking)It comes up")


def test_a_tokenizer_without_a_template() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        encoded(chat(), None)


def test_a_tokenizer_with_several_templates() -> None:
    several = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]
    both = replace(tokenizer(None), config={"chat_template": several})
    with_tools = {"messages": CHAT[:3], "tools": [{"name": "turn"}]}
    for name, holds in (("default", False), ("tool_use", True)):
        section = DataSection(source="x", format="chat", chat_template=name)
        (ids,) = encoder(both, section).encode_documents([json.dumps(with_tools)])
        assert ("<|tools|>" in both.decode(number & ~TRAINED for number in ids)) == holds
    with pytest.raises(UserError, match="has no chat template 'rag'") as caught:
        encoder(both, DataSection(source="x", format="chat", chat_template="rag"))
    assert "it has default, tool_use" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        *[
            (template, True)
            for template in (PLAIN, MARKED, TWO_BLOCKS, THOUGHTFUL, FORGETFUL, "{{ raise_exception() }}")
        ],
        (PLAIN.replace("{{ eos_token }}", ""), False),
        (MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}"), False),
    ],
)
def test_whether_a_model_learns_where_to_stop(template: str, ends: bool) -> None:
    made = encoder(tokenizer(template), DataSection(source="x", format="chat"))
    assert isinstance(made, ExampleTokenizer)
    assert made.ends_answers == ends


def test_a_template_that_fails_says_so() -> None:
    with pytest.raises(UserError, match="does not take these messages") as caught:
        encoded(chat(), "{{ raise_exception('only users speak') }}")
    assert "only users speak" in str(caught.value)


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(UserError, match="does not take these messages"):
        encoded(chat(), "{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_a_date_in_a_template_is_always_the_same() -> None:
    _, ids, _ = encoded(chat(), "{{ strftime_now('%d %b %Y') }}" + PLAIN)
    assert encoded(chat(), "26 Jul 2024" + PLAIN)[1] == ids


def test_instructions() -> None:
    text = example_text({"q": "2 + 2 = ", "a": "4", "x": 1}, "@instruction:q:a", "here")
    one, ids, runs = encoded(text, None, format="instruction")
    assert runs == ["4" + str(one.eos_token)]
    assert one.decode(ids) == one.decode(one.prefix) + "2 + 2 = 4" + str(one.eos_token)


BAD = {
    "no field": ({"message": []}, "no field 'messages'"),
    "no list": ({"messages": "hello"}, "a chat is a list of messages"),
    "empty": ({"messages": []}, "a chat is a list of messages"),
    "no role": ({"messages": [{"content": "x"}]}, "message 1 has no role"),
    "bad role": ({"messages": [{"role": "human", "content": "x"}]}, "message 1 has the role 'human'"),
    "no content": ({"messages": [{"role": "user"}]}, "message 1 has no content"),
    "number": ({"messages": [{"role": "user", "content": 7}]}, "message 1 has a content that is no text"),
    "no assistant": ({"messages": [{"role": "user", "content": "x"}]}, "no message of the assistant"),
    "empty answer": ({"messages": [*CHAT[:2], {"role": "assistant", "content": " "}]}, "message 3 is empty"),
    "no record": ([], "not a JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_records_are_named_by_their_line(case: str, tmp_path: Path) -> None:
    record, said = BAD[case]
    file = tmp_path / "chats.jsonl"
    good = json.dumps({"messages": CHAT})
    file.write_text(f"{good}\n{good}\n{json.dumps(record)}\n")
    data = DataSection(source=str(file), format="chat")
    with pytest.raises(UserError) as caught:
        [text for unit in units_of([file_source(data)]) for piece in unit for text in documents(piece)]
    assert f"{file}:3" in str(caught.value)
    assert said in str(caught.value)


def test_a_bad_record_leaves_no_shards(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + '\n{"messages": []}\n')
    data = DataSection(source=str(file), format="chat")
    with pytest.raises(UserError, match=r"chats.jsonl:2: a chat is a list of messages"):
        tokenize([file_source(data)], tmp_path / "out", encoder(tokenizer(), data), workers=1)
    assert not (tmp_path / "out").exists()


def test_records_of_a_table(tmp_path: Path) -> None:
    """Parquet fills what a message lacks with nulls; the template does not see them."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    called = {"role": "assistant", "content": "Done.", "name": "winch"}
    rows = [{"messages": CHAT}, {"messages": [CHAT[1], called]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    data = DataSection(source=str(tmp_path / "chats.parquet"), format="chat")
    texts = [text for unit in units_of([file_source(data)]) for piece in unit for text in documents(piece)]
    assert [json.loads(text)["messages"] for text in texts] == [CHAT, [CHAT[1], called]]


def file_source(data: DataSection) -> FileSource:
    source = parse_source(data, "train")
    assert isinstance(source, FileSource)
    return source


def test_an_empty_completion_is_refused() -> None:
    with pytest.raises(UserError, match="here is empty: there is nothing to train on"):
        example_text({"prompt": "x", "completion": ""}, "@instruction:prompt:completion", "here")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Chats of many lengths, as shards."""
    root = tmp_path_factory.mktemp("chats")
    with (root / "chats.jsonl").open("w") as file:
        for number in range(40):
            answer = {"role": "assistant", "content": "link by link " * (number % 7 + 1)}
            file.write(json.dumps({"messages": [*CHAT[: 2 + number % 4], answer], "id": number}) + "\n")
    data = DataSection(source=str(root / "chats.jsonl"), format="chat")
    tokenize([file_source(data)], root / "out", encoder(tokenizer(MARKED), data), workers=1)
    return TokenShards.open(root / "out")


def test_marks_travel_with_the_shards(shards: TokenShards) -> None:
    assert shards.index.loss_bit
    tokens, starts, loss = shards.read_marked(0, shards.num_tokens)
    assert loss is not None
    assert 0 < loss.sum() < len(loss)
    assert tokens.max() < shards.vocab_size
    assert np.array_equal(shards.read(0, shards.num_tokens)[0], tokens)
    assert np.array_equal(shards.document(0), tokens[: starts[1]])


def test_rows_hold_whole_examples_once_each(shards: TokenShards) -> None:
    rows = PackedRows.packed(shards, "chats", 128, "drop")
    lengths = shards.document_lengths()
    seen = [example for row in rows.packing.rows for example in row]
    assert sorted(seen) == [number for number, length in enumerate(lengths) if length <= 129]
    for window in range(rows.num_sequences):
        sequence = rows.sequence(window)
        assert sequence.loss is not None
        bounds = [*sequence.document_starts.tolist(), 129]
        for example, begin, end in zip(rows.packing.rows[window], bounds, bounds[1:], strict=False):
            assert np.array_equal(sequence.tokens[begin:end], shards.document(example))
            whole = shards.read_marked(*rows.packing.place(example))[2]
            assert whole is not None
            assert np.array_equal(sequence.loss[begin + 1 : end], whole[1:])


def test_what_is_too_long_is_cut_or_left_out_and_counted(shards: TokenShards) -> None:
    lengths = shards.document_lengths()
    room = int(np.median(lengths)) - 1
    long = int((lengths > room + 1).sum())
    cut, dropped = (PackedRows.packed(shards, "chats", room, one) for one in ("truncate", "drop"))
    assert f"{long} too long: cut" in cut.description
    assert f"{long} too long: left out" in dropped.description
    assert sum(map(len, cut.packing.rows)) == len(lengths)
    assert sum(map(len, dropped.packing.rows)) == len(lengths) - long
    with pytest.raises(UserError, match="no example that fits"):
        PackedRows.packed(shards, "chats", 3, "drop")


@given(st.lists(st.integers(1, 60), max_size=300), st.integers(2, 50), st.booleans())
def test_packing_loses_nothing(lengths: list[int], room: int, drop: bool) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), room, drop=drop)
    fits = [n for n, length in enumerate(lengths) if length >= 2 and not (drop and length > room)]
    assert sorted(example for row in rows for example in row) == fits
    assert all(sum(min(lengths[example], room) for example in row) <= room for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_special_tokens_are_added_once() -> None:
    tiny = load_tokenizer("tiny")
    grown = tiny.with_added(["<|tool|>", "<|stop|>"])
    assert grown.ids_of_added(["<|tool|>", "<|stop|>"]) == (tiny.vocab_size, tiny.vocab_size + 2)
    assert grown.with_added(["<|tool|>"]).vocab_size == grown.vocab_size
    assert grown.fingerprint != tiny.fingerprint
    assert grown.encode_documents(["a<|tool|>"])[0].count(tiny.vocab_size) == 1
    with pytest.raises(UserError, match="do not follow one another"):
        tiny.with_added(["<|tool|>"]).ids_of_added(["<|tool|>", str(tiny.eos_token)])


def test_the_command_makes_shards_of_chats(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from windlass.cli.data import data

    tokenizer(MARKED).save(tmp_path / "tokenizer")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"turns": CHAT}) + "\n")
    arguments = ["tokenize", str(tmp_path / "chats.jsonl"), "-o", str(tmp_path / "out"), "--workers", "1"]
    arguments += ["--tokenizer", str(tmp_path / "tokenizer"), "--format", "chat", "--messages-field", "turns"]
    done = CliRunner().invoke(data, [*arguments, "--special-token", "<|tool|>", "--train-on", "last"])
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "data.format=chat" in done.output
    shards = TokenShards.open(tmp_path / "out")
    tokens, _, loss = shards.read_marked(0, shards.num_tokens)
    assert loss is not None
    assert load_tokenizer(str(tmp_path / "out" / "tokenizer")).decode(tokens[loss]).startswith(CHAT[-1]["content"])
    assert shards.vocab_size == load_tokenizer("tiny").vocab_size + 1
