"""Encode text chunk by chunk, each distinct chunk once: what makes byte-level BPE fast on natural language.

Byte-level BPE tokenizers split a text by a pattern and encode each part on its own. All the patterns known here split
- between a visible ASCII character and a space that is followed by an ASCII letter: no alternative of theirs matches a
  space except as its first character, or within a run of white space;
- between an ASCII letter and an ASCII punctuation mark that is no apostrophe: no alternative goes on from one to the
  other.
None looks behind, or ahead from a visible character. So encoding the chunks between such places gives the ids of the
whole text, exactly.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

MARK = r"[!-&(-/:-@\[-`{-~]"  # ASCII punctuation without the apostrophe
# A chunk: a word that ends at a safe place, or else everything up to the next one.
CHUNK = re.compile(
    rf" ?[A-Za-z]+(?= [A-Za-z]|{MARK})|.(?:(?!(?<=[!-~]) [A-Za-z]|(?<=[A-Za-z]){MARK}).)*",
    re.DOTALL,
)
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_PATTERNS = frozenset(
    f"{CONTRACTIONS}|[^\\r\\n\\p{{L}}\\p{{N}}]?\\p{{L}}+|{numbers}|{REST}" for numbers in (r"\p{N}{1,3}", r"\p{N}")
)
LONGEST_KEPT = 48  # characters; longer chunks hardly ever come again
MOST_KEPT = 250_000


class ChunkEncoder:
    """Ids of texts by way of their chunks; of texts that spell out an added token, as a whole."""

    def __init__(self, fast: Any, added_tokens: Sequence[str]) -> None:
        self._fast = fast
        self._kept: dict[str, list[int]] = {"": []}
        self._lock = threading.Lock()  # lanes of a stream are read by several threads
        self._added = re.compile("|".join(map(re.escape, added_tokens))) if added_tokens else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        with self._lock:
            return self._encode(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        kept = self._kept
        whole = [text for text in texts if self._added and self._added.search(text)]
        apart = dict(zip(whole, self._plain(whole), strict=True))
        chunks = [[] if text in apart else CHUNK.findall(text) for text in texts]
        missing = list(set(chain.from_iterable(chunks)).difference(kept))
        kept.update(zip(missing, self._plain(missing), strict=True))
        ids = [
            apart[text] if text in apart else list(chain.from_iterable(map(kept.__getitem__, some)))
            for text, some in zip(texts, chunks, strict=True)
        ]
        for chunk in missing:
            if len(chunk) > LONGEST_KEPT:
                del kept[chunk]
        if len(kept) > MOST_KEPT:
            self._kept = {"": []}
        return ids

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]


def chunk_encoder(fast: Any, definition: str) -> ChunkEncoder | None:
    """An encoder by chunks for a tokenizer that is known to allow it."""
    parts = json.loads(definition)
    if (
        parts["model"].get("type") != "BPE"
        or parts.get("normalizer")
        or not splits_at_words(parts.get("pre_tokenizer"))
    ):
        return None
    return ChunkEncoder(fast, [token["content"] for token in parts.get("added_tokens") or []])


def splits_at_words(pre_tokenizer: dict[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern in KNOWN_PATTERNS
        case _:
            return False
