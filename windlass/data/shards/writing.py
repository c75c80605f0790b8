"""Write token shards: documents in order, cut into shards at document ends, the index last; resumable at any point."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.common.files import write_atomically
from windlass.data.shards.blocks import block_digest
from windlass.data.shards.folder import (
    BLOCK_BYTES,
    DOCUMENT_DTYPE,
    DTYPES,
    VERSION,
    Index,
    ShardFacts,
    TokenizerFacts,
)
from windlass.data.sources.source import INDEX_NAME
from windlass.data.tokenizers.tokenizer import SHARD_TOKENIZER, Tokenizer

State = dict[str, Any]


class DamagedWorkError(Exception):
    """What an earlier process left is not what it said it left."""


class ShardWriter:
    """Appends documents to a folder; `finish` makes it readable. `closed` gets every shard that is complete."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int,
        closed: Callable[[ShardFacts], None] | None = None,
        state: State | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._shard_tokens = shard_tokens
        self._tokenizer = tokenizer
        self._closed = closed or (lambda facts: None)
        self._facts = TokenizerFacts(
            tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.require_eos()
        )
        self._dtype = DTYPES[tokenizer.dtype]
        self._shards = [ShardFacts(**facts) for facts in state["shards"]] if state else []
        self._shard = _OpenShard(folder, len(self._shards), self._dtype, state["open"] if state else None)

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self._shards) + self._shard.num_tokens

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self._shards) + self._shard.num_documents

    def append(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Add documents: their tokens one after another, and the length of each."""
        ends = np.cumsum(lengths, dtype=np.int64)
        first = 0
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            room = self._shard_tokens - self._shard.num_tokens
            # Documents up to and with the one that fills the shard.
            last = min(len(ends), int(np.searchsorted(ends, begin + room)) + 1)
            end = int(ends[last - 1])
            self._shard.append(tokens[begin:end].astype(self._dtype, copy=False), lengths[first:last])
            if self._shard.num_tokens >= self._shard_tokens:
                self._close()
                self._shard = _OpenShard(self.folder, len(self._shards), self._dtype, None)
            first = last

    def _close(self) -> None:
        facts = self._shard.close()
        self._closed(facts)
        self._shards.append(facts)

    def state(self) -> State:
        """What another process needs to go on from here, as JSON; all that was appended is in the files by then."""
        return {"shards": [asdict(shard) for shard in self._shards], "open": self._shard.state()}

    def finish(self, left_out: dict[str, int] | None = None) -> Index:
        if self._shard.num_tokens or not self._shards:
            self._close()
        else:
            self._shard.remove()
        self._tokenizer.save(self.folder / SHARD_TOKENIZER)
        index = Index(
            version=VERSION,
            dtype=self._tokenizer.dtype,
            tokenizer=self._facts,
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=sum(shard.num_documents for shard in self._shards),
            shards=tuple(self._shards),
            block_bytes=BLOCK_BYTES,
            left_out=left_out or {},
            loss_bit=self._tokenizer.marks_loss,
        )
        for leftover in self.folder.glob(f".{INDEX_NAME}.*.tmp"):  # of a process killed in the middle of this
            leftover.unlink()
        write_atomically(self.folder / INDEX_NAME, index.to_json())
        return index


class _OpenShard:
    """The shard that is being filled: tokens and document starts go to their files as they come."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any], state: State | None) -> None:
        self.name = f"shard-{number:05d}"
        self.num_tokens = self.num_documents = 0
        self._blocks_path = folder / f"{self.name}.blocks"
        self._blocks = _Blocks()
        self._tokens = _HashedFile(folder / f"{self.name}.tokens", self._blocks.update)
        self._documents = _HashedFile(folder / f"{self.name}.documents")
        if state:
            self.num_tokens, self.num_documents = state["num_tokens"], state["num_documents"]
        self._tokens.open(self.num_tokens * dtype.itemsize, state["tokens_sha256"] if state else "")
        sha256 = state["documents_sha256"] if state else ""
        self._documents.open(self.num_documents * DOCUMENT_DTYPE.itemsize, sha256)

    def append(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        ends = np.cumsum(lengths, dtype=np.int64) + self.num_tokens
        starts = np.concatenate([[self.num_tokens], ends[:-1]]).astype(DOCUMENT_DTYPE)
        self._tokens.write(np.ascontiguousarray(tokens).tobytes())
        self._documents.write(starts.tobytes())
        self.num_tokens = int(ends[-1])
        self.num_documents += len(starts)

    def state(self) -> State:
        return {
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "tokens_sha256": self._tokens.flush(),
            "documents_sha256": self._documents.flush(),
        }

    def close(self) -> ShardFacts:
        digests = self._blocks.finish()
        self._blocks_path.write_bytes(digests)
        return ShardFacts(
            name=self.name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokens_sha256=self._tokens.close(),
            documents_sha256=self._documents.close(),
            blocks_sha256=hashlib.sha256(digests).hexdigest(),
        )

    def remove(self) -> None:
        self._tokens.remove()
        self._documents.remove()


class _Blocks:
    """Digests of a file's blocks, for readers that fetch it block by block."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._rest = bytearray()

    def update(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= BLOCK_BYTES:
            self._digests.append(block_digest(bytes(self._rest[:BLOCK_BYTES])))
            del self._rest[:BLOCK_BYTES]

    def finish(self) -> bytes:
        rest = [block_digest(bytes(self._rest))] if self._rest else []
        return b"".join([*self._digests, *rest])


class _HashedFile:
    """A file that grows and knows its sha256."""

    def __init__(self, path: Path, written: Callable[[bytes], None] = lambda data: None) -> None:
        self._path, self._written = path, written
        self._hash = hashlib.sha256()

    def open(self, size: int, sha256: str) -> None:
        """Begin the file, or take it up again as it was at `size`; what was written after that is cut off."""
        if not size:
            self._file = self._path.open("wb")
            return
        try:
            with self._path.open("rb+") as file:
                file.truncate(size)
                while data := file.read(BLOCK_BYTES):
                    self._hash.update(data)
                    self._written(data)
                length = file.tell()
        except FileNotFoundError:
            raise DamagedWorkError(f"{self._path.name} is gone") from None
        if length != size or self._hash.hexdigest() != sha256:
            raise DamagedWorkError(f"{self._path.name} is not as it was left")
        self._file = self._path.open("ab")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._written(data)

    def flush(self) -> str:
        self._file.flush()
        return self._hash.hexdigest()

    def close(self) -> str:
        self._file.close()
        return self._hash.hexdigest()

    def remove(self) -> None:
        self._file.close()
        self._path.unlink()
