"""A process that tokenizes units of text, spoken to over its standard streams.

It is started anew, not as a fork or a spawned copy of the caller, who may hold threads, a GPU or a `__main__` that
trains. It ends when its standard input does, so none is left behind by a caller that was killed.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from windlass.data.reading import Unit, documents
from windlass.data.shards import DTYPES, dtype_for
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError

DOCUMENTS_AT_ONCE = 256
CHARACTERS_AT_ONCE = 1 << 20
LENGTH_DTYPE = np.dtype("<u8")


@dataclass(frozen=True)
class Job:
    """One unit to tokenize into OUT.tokens and OUT.lengths."""

    unit: Unit
    out: Path
    limit: int | None  # documents


@dataclass(frozen=True)
class Done:
    num_tokens: int
    num_documents: int


def run(job: Job, tokenizer: Tokenizer) -> Done:
    dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
    num_tokens = num_documents = 0
    with job.out.with_suffix(".tokens").open("wb") as tokens, job.out.with_suffix(".lengths").open("wb") as lengths:
        texts = (text for piece in job.unit for text in documents(piece))
        for some in batches(islice(texts, job.limit)):
            encoded = tokenizer.encode_documents(some)
            counts = np.fromiter(map(len, encoded), dtype=LENGTH_DTYPE, count=len(encoded))
            flat = np.fromiter(chain.from_iterable(encoded), dtype=dtype, count=int(counts.sum()))
            tokens.write(flat.tobytes())
            lengths.write(counts.tobytes())
            num_tokens += len(flat)
            num_documents += len(counts)
    return Done(num_tokens, num_documents)


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in lists that are neither long nor large."""
    some: list[str] = []
    characters = 0
    for text in texts:
        some.append(text)
        characters += len(text)
        if len(some) >= DOCUMENTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield some
            some, characters = [], 0
    if some:
        yield some


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The first request is the tokenizer, every other one a job."""
    tokenizer: Tokenizer = pickle.load(requests)
    while True:
        try:
            job: Job = pickle.load(requests)
        except EOFError:
            return
        answer: Any
        try:
            answer = run(job, tokenizer)
        except UserError as error:
            answer = error.as_dict()
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # a library that prints must not get between the answers
    serve(sys.stdin.buffer, out)
