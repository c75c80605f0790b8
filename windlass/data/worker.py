"""A process that tokenizes units of text, spoken to over its standard streams.

It is started anew, not as a fork or a spawned copy of the caller, who may hold threads, a GPU or a `__main__` that
trains. It ends when its standard input does, so none is left behind by a caller that was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from windlass.data.reading import Unit, documents
from windlass.data.shards import DTYPES
from windlass.data.tokenizer import Tokenizer
from windlass.errors import ExitCode, UserError
from windlass.runfolder import write_atomically

DOCUMENTS_AT_ONCE = 256
CHARACTERS_AT_ONCE = 1 << 20
LENGTH_DTYPE = np.dtype("<u8")


DIGEST_BYTES = 16  # of a document's text: enough that no two texts of any corpus share one


@dataclass(frozen=True)
class Job:
    """One unit to tokenize into OUT.tokens, OUT.lengths and, where asked for, OUT.digests; then OUT.done."""

    unit: Unit
    out: Path
    limit: int | None  # documents
    digests: bool = False


@dataclass(frozen=True)
class Done:
    """A finished unit: what OUT.done says of the files beside it."""

    num_tokens: int
    num_documents: int
    sha256: dict[str, str]  # by suffix


def run(job: Job, tokenizer: Tokenizer) -> Done:
    dtype = DTYPES[tokenizer.dtype]
    num_tokens = num_documents = 0
    with Columns(job.out, ("tokens", "lengths", *(["digests"] if job.digests else []))) as columns:
        texts = (text for piece in job.unit for text in documents(piece))
        for some in batches(islice(texts, job.limit)):
            encoded = tokenizer.encode_documents(some)
            counts = np.fromiter(map(len, encoded), dtype=LENGTH_DTYPE, count=len(encoded))
            flat = np.fromiter(chain.from_iterable(encoded), dtype=dtype, count=int(counts.sum()))
            columns.write("tokens", flat.tobytes())
            columns.write("lengths", counts.tobytes())
            if job.digests:
                columns.write("digests", b"".join(map(text_digest, some)))
            num_tokens += len(flat)
            num_documents += len(counts)
    done = Done(num_tokens, num_documents, columns.sha256)
    write_atomically(job.out.with_suffix(".done"), json.dumps(asdict(done)))
    return done


class Columns:
    """The files of a unit, hashed as they are written."""

    def __init__(self, out: Path, suffixes: tuple[str, ...]) -> None:
        self._files = {suffix: out.with_suffix(f".{suffix}").open("wb") for suffix in suffixes}
        self._hashes = {suffix: hashlib.sha256() for suffix in suffixes}

    def __enter__(self) -> Columns:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, suffix: str, data: bytes) -> None:
        self._files[suffix].write(data)
        self._hashes[suffix].update(data)

    @property
    def sha256(self) -> dict[str, str]:
        return {suffix: one.hexdigest() for suffix, one in self._hashes.items()}


def text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


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
        except OSError as error:
            answer = UserError(
                f"{job.out.parent} cannot be written", evidence=str(error), exit_code=ExitCode.FAILED
            ).as_dict()
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # whoever asked was killed
            os._exit(0)


def main() -> None:
    out = sys.stdout.buffer
    sys.stdout = sys.stderr  # a library that prints must not get between the answers
    serve(sys.stdin.buffer, out)
