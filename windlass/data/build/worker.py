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
from dataclasses import asdict, dataclass, field
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from windlass.common.files import write_atomically
from windlass.data.shards.folder import DTYPES
from windlass.data.sources.reading import HubPiece, Skipped, Unit, documents
from windlass.data.tokenizers.chat import TRAINED
from windlass.data.tokenizers.templates import ChatTemplateError
from windlass.data.tokenizers.tokenizer import Tokenizer
from windlass.errors import ExitCode, UserError

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
    left_out: dict[str, int] = field(default_factory=dict)  # records that became no document, by the reason
    reasons: list[str] = field(default_factory=list)  # of the first records that could not be read


BAD_RECORDS = "bad records"
WITHOUT_COMPLETION = "examples without a token to train on"


def run(job: Job, tokenizer: Tokenizer) -> Done:
    dtype = DTYPES[tokenizer.dtype]
    num_tokens = num_documents = 0
    skipped, unlabelled = Skipped(), 0
    with Columns(job.out, ("tokens", "lengths", *(["digests"] if job.digests else []))) as columns:
        texts = (text for piece in job.unit for text in documents(piece, skipped))
        skip_bad = any(piece.source.skip_bad if isinstance(piece, HubPiece) else piece.skip_bad for piece in job.unit)
        for some in batches(islice(texts, job.limit)):
            kept, encoded = encode(tokenizer, some, skipped if skip_bad else None)
            if tokenizer.marks_loss:
                labelled = [has_label(ids) for ids in encoded]
                unlabelled += labelled.count(False)
                kept, encoded = list(compress(kept, labelled)), list(compress(encoded, labelled))
            counts = np.fromiter(map(len, encoded), dtype=LENGTH_DTYPE, count=len(encoded))
            flat = np.fromiter(chain.from_iterable(encoded), dtype=dtype, count=int(counts.sum()))
            columns.write("tokens", flat.tobytes())
            columns.write("lengths", counts.tobytes())
            if job.digests:
                columns.write("digests", b"".join(map(text_digest, kept)))
            num_tokens += len(flat)
            num_documents += len(counts)
    left_out = {BAD_RECORDS: skipped.count, WITHOUT_COMPLETION: unlabelled}
    left_out = {reason: count for reason, count in left_out.items() if count}
    done = Done(num_tokens, num_documents, columns.sha256, left_out, skipped.reasons)
    write_atomically(job.out.with_suffix(".done"), json.dumps(asdict(done)))
    return done


def encode(tokenizer: Tokenizer, texts: list[str], skipped: Skipped | None) -> tuple[list[str], list[list[int]]]:
    """The texts and their tokens; those that the chat template refuses are left out where such records are skipped."""
    try:
        return texts, tokenizer.encode_documents(texts)
    except ChatTemplateError as error:
        if skipped is None:
            raise
        if len(texts) == 1:
            skipped.add(error)
            return [], []
    encodings = [encode(tokenizer, [text], skipped) for text in texts]
    return [text for kept, _ in encodings for text in kept], [ids for _, encoded in encodings for ids in encoded]


def has_label(ids: list[int]) -> bool:
    """Whether a token is trained on that another one comes before."""
    return any(number & TRAINED for number in islice(ids, 1, None))


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
        return {suffix: digest.hexdigest() for suffix, digest in self._hashes.items()}


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
        except Exception as error:  # of the tokenizer: the library raises plain ones
            names = ", ".join(dict.fromkeys(str(getattr(piece, "path", piece)) for piece in job.unit))
            answer = UserError(
                f"a text of {names} cannot be tokenized", evidence=f"{type(error).__name__}: {error}"
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
