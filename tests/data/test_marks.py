"""Which tokens are trained on, compared with a reference that counts characters and trusts no tokenizer's offsets.

The reference spells every token out (bytes of a byte-level piece, `▁` as a space, `<0xNN>` as a byte, `##` as nothing)
and walks through the text with it. A token is trained exactly if one of its bytes is of a completion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer

from windlass.data.tokenizers.chat import TRAINED, ExampleTokenizer, completions, encoder
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.spec.data import DataSection

CORPUS = [
    "Is it good? yes, no, naïve café — Sentiment: good\n\tindent\n    return x\n\n\nUSER: Hi ASSISTANT: fine",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n" * 4,
    "the good answer is no more than yes or no; the yes is good and the no is good " * 4,
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def byte_level(*, trim: bool, pattern: str | None = None, prefix_space: bool = False, bos: bool = False) -> Any:
    fast = FastTokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    fast.pre_tokenizer = pre_tokenizers.Sequence([*split, level])  # type: ignore[assignment]
    fast.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
        ),
    )
    after: list[Any] = [processors.ByteLevel(trim_offsets=trim)]
    if bos:
        after.append(processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]))
    fast.post_processor = processors.Sequence(after)  # type: ignore[assignment]
    return fast


def roberta() -> Any:
    fast = byte_level(trim=True)
    fast.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True)
    return fast


def metaspace(scheme: str) -> Any:
    fast = FastTokenizer(models.Unigram())
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    fast.train_from_iterator(CORPUS, trainer)
    return fast


def byte_fallback(*, prepend: bool) -> Any:
    """As Llama 2: no pre-tokenizer, spaces replaced, characters out of the vocabulary as bytes."""
    fast = FastTokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps: list[Any] = [normalizers.Prepend("▁")] if prepend else []
    fast.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    fast.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    fast.train_from_iterator(CORPUS, trainer)
    definition = json.loads(fast.to_str())
    definition["pre_tokenizer"] = None
    definition["added_tokens"] = [one for one in definition["added_tokens"] if one["content"] in SPECIAL]
    return FastTokenizer.from_str(json.dumps(definition))


def word_piece() -> Any:
    fast = FastTokenizer(models.WordPiece(unk_token="<unk>"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=SPECIAL, show_progress=False, initial_alphabet=list(LETTERS.lower())
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))  # type: ignore[assignment]
    return fast


def with_added() -> Any:
    fast = byte_level(trim=False)
    fast.add_tokens([AddedToken("good", single_word=True), AddedToken("  ", normalized=False)])
    return fast


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:?!()+='-—|<>/_"
KINDS: dict[str, tuple[str, Any]] = {
    "byte-level": ("bytes", lambda: byte_level(trim=False)),
    "byte-level, trimmed": ("bytes", lambda: byte_level(trim=True)),
    "byte-level, trimmed, a prefix space": ("prefixed bytes", lambda: byte_level(trim=True, prefix_space=True)),
    "llama 3": ("bytes", lambda: byte_level(trim=True, pattern=LLAMA3, bos=True)),
    "roberta": ("bytes", roberta),
    "added tokens": ("bytes", with_added),
    "unigram, metaspace always": ("pieces", lambda: metaspace("always")),
    "unigram, metaspace first": ("pieces", lambda: metaspace("first")),
    "unigram, metaspace never": ("pieces", lambda: metaspace("never")),
    "llama 2": ("prepended pieces", lambda: byte_fallback(prepend=True)),
    "byte fallback, no prefix": ("pieces", lambda: byte_fallback(prepend=False)),
    "wordpiece": ("words", word_piece),
}
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "vicuna": "{{bos_token}}{% for m in messages %}{% if m.role=='user' %}USER: {{m.content}} "
    "{% elif m.role=='system' %}{{m.content}} {% else %}ASSISTANT: {{m.content}}{{eos_token}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}",
    "spaces": "{% for m in messages %}[{{m.role}}]  {{m.content}}   {% endfor %}"
    "{% if add_generation_prompt %}[assistant]  {% endif %}",
    "generation": "{% for m in messages %}{{m.role}}: {% if m.role=='assistant' %}{% generation %}{{m.content}}"
    "{% endgeneration %} {% else %}{{m.content}} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}


@cache
def tokenizer(kind: str, template: str = "chatml") -> Tokenizer:
    definition = KINDS[kind][1]().to_str()
    return Tokenizer(kind, definition, {"chat_template": TEMPLATES[template]}, bos_token="<s>", eos_token="</s>")


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + place) for place in range(256))
    return {chr(number) if number in plain else next(others): number for number in range(256)}


ALPHABET = byte_alphabet()


def spelt(token: str, kind: str) -> bytes:
    """The bytes of the text that a token stands for."""
    if token in (*SPECIAL, "  ", "good"):
        return token.encode()
    if kind.endswith("bytes"):
        return bytes(ALPHABET[character] for character in token)
    if kind == "words":
        return token.removeprefix("##").encode()
    if token in BYTES:
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def places(tokens: list[str], text: str, kind: str) -> Iterator[tuple[int, int]]:
    """The characters [begin, end) that each token has a byte of; a token that adds none stands before a character."""
    lowered = normalizers.BertNormalizer(lowercase=True).normalize_str
    shown = [lowered(one) if kind == "words" else one for one in text]
    # Every byte of the text as the tokenizer sees it, with the character it comes from.
    whole = b"".join(one.encode() for one in shown)
    owner = [place for place, value in enumerate(shown) for _ in value.encode()] + [len(text)]
    at, fresh = 0, True  # at the beginning, and after a special token
    for token in tokens:
        piece = spelt(token, kind)
        if kind == "prepended pieces":
            piece, fresh = piece[1:] if fresh and token not in SPECIAL else piece, token in SPECIAL
        while kind == "words" and whole[at : at + 1].isspace():
            at += 1
        if kind == "words" and token == "<unk>":  # a word that no pieces make up
            piece = re.match(rb"\w+|.", whole[at:])[0]  # type: ignore[index]
        if kind in ("pieces", "prefixed bytes") and not whole.startswith(piece, at) and piece.startswith(b" "):
            piece = piece[1:]  # a space that was put there
        assert whole.startswith(piece, at), (token, piece, whole[at : at + 20], tokens)
        yield owner[at], owner[at + len(piece) - 1] + 1 if piece else owner[at] + 1
        at += len(piece)


def reference(one: ExampleTokenizer, kind: str, text: str, spans: list[tuple[int, int]]) -> list[tuple[int, bool]]:
    encoding = one._fast.encode(text, add_special_tokens=False)
    return [
        (number, any(begin < high and low < end for low, high in spans))
        for number, (begin, end) in zip(encoding.ids, places(encoding.tokens, text, kind), strict=True)
    ]


def marked(one: ExampleTokenizer, example_: dict[str, Any]) -> list[tuple[int, bool]]:
    (ids,) = one.encode_documents([json.dumps(example_)])
    if one.form == "instruction":
        assert ids[: len(one.prefix)] == list(one.prefix)
        assert ids[-1] == one.require_eos() | TRAINED
        ids = ids[len(one.prefix) : -1]
    return [(number & ~TRAINED, bool(number & TRAINED)) for number in ids]


WORDS = [
    "good",
    " ",
    "  ",
    "\n",
    "\t",
    "yes",
    "no",
    "Is it",
    ".",
    "x",
    "naive",
    "\n    return x",
    "—",
    "A:",
    "  \n",
    "I",
]
ODD = ["é", "😀", "漢", "naïve", "👩‍👧"]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join)
ODD_TEXT = st.lists(st.sampled_from(WORDS + ODD), min_size=1, max_size=8).map("".join)


def text_for(kind: str, plain: str, odd: str) -> str:
    """Unigram and wordpiece have one `<unk>` for what they do not know, which spells nothing: plain letters there."""
    return plain if KINDS[kind][0] == "words" or kind.startswith("unigram") else odd


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(prompts=st.tuples(TEXT, ODD_TEXT), answers=st.tuples(TEXT, ODD_TEXT))
@example(prompts=("Is it good? A: ",) * 2, answers=("yes",) * 2)
@example(prompts=("Is it good? A:",) * 2, answers=(" yes",) * 2)
@example(prompts=("no\n",) * 2, answers=("  \n    return x\n  \tno\n",) * 2)
@example(prompts=("no",) * 2, answers=("no  ", "😀"))
def test_instructions(kind: str, prompts: tuple[str, str], answers: tuple[str, str]) -> None:
    one = encoder(tokenizer(kind), DataSection(format="instruction"))
    assert isinstance(one, ExampleTokenizer)
    prompt, answer = text_for(kind, *prompts), text_for(kind, *answers)
    spans = [(len(prompt), len(prompt) + len(answer))]
    expected = reference(one, KINDS[kind][0], prompt + answer, spans)
    assert marked(one, {"prompt": prompt, "completion": answer}) == expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(contents=st.lists(st.tuples(TEXT, ODD_TEXT), min_size=2, max_size=4))
@example(contents=[("Hi", "Hi"), ("good  yes,\n\n  no\n", "Good 😀 day,\n\n  you\n"), ("x", "x"), ("no yes", "no yes")])
def test_chats(kind: str, template: str, contents: list[tuple[str, str]]) -> None:
    one = encoder(tokenizer(kind, template), DataSection(format="chat"))
    assert isinstance(one, ExampleTokenizer)
    roles = ["user", "assistant"] * 2
    messages = [
        {"role": role, "content": text_for(kind, *content)} for role, content in zip(roles, contents, strict=False)
    ]
    text, spans = completions(one._template, {"messages": messages}, last_only=False)
    assert len(spans) == sum(message["role"] == "assistant" for message in messages)
    expected = reference(one, KINDS[kind][0], text, spans)
    assert marked(one, {"messages": messages}) == expected
