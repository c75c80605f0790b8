"""Write token shards: documents in order, cut into shards at document ends, the index last."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.data.shards import DOCUMENT_DTYPE, DTYPES, VERSION, Index, ShardFacts, TokenizerFacts, dtype_for
from windlass.data.sources import INDEX_NAME
from windlass.data.tokenizer import SHARD_TOKENIZER, Tokenizer
from windlass.runfolder import write_atomically


class ShardWriter:
    """Appends documents to a folder; `finish` makes it readable."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, shard_tokens: int) -> None:
        self.folder = folder
        self.num_tokens = 0
        self.num_documents = 0
        self._shard_tokens = shard_tokens
        self._tokenizer = tokenizer
        self._facts = TokenizerFacts(
            tokenizer.name, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.require_eos()
        )
        self._dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
        self._shards: list[ShardFacts] = []
        self._shard = _OpenShard(folder, 0)

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
                self._shards.append(self._shard.close())
                self._shard = _OpenShard(self.folder, len(self._shards))
            first = last
        self.num_tokens += int(ends[-1]) if len(ends) else 0
        self.num_documents += len(ends)

    def finish(self) -> Index:
        if self._shard.num_tokens or not self._shards:
            self._shards.append(self._shard.close())
        else:
            self._shard.remove()
        self._tokenizer.save(self.folder / SHARD_TOKENIZER)
        index = Index(
            version=VERSION,
            dtype=dtype_for(self._tokenizer.vocab_size),
            tokenizer=self._facts,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            shards=tuple(self._shards),
        )
        write_atomically(self.folder / INDEX_NAME, index.to_json())
        return index


class _OpenShard:
    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"shard-{number:05d}"
        self.num_tokens = 0
        self._starts: list[NDArray[Any]] = []
        self._documents_path = folder / f"{self.name}.documents"
        self._tokens_path = folder / f"{self.name}.tokens"
        self._file = self._tokens_path.open("wb")
        self._digest = hashlib.sha256()

    def append(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        data = np.ascontiguousarray(tokens).tobytes()
        self._file.write(data)
        self._digest.update(data)
        ends = np.cumsum(lengths, dtype=np.int64) + self.num_tokens
        self._starts.append(np.concatenate([[self.num_tokens], ends[:-1]]).astype(DOCUMENT_DTYPE))
        self.num_tokens = int(ends[-1])

    def close(self) -> ShardFacts:
        self._file.close()
        starts = np.concatenate(self._starts) if self._starts else np.empty(0, dtype=DOCUMENT_DTYPE)
        data = starts.tobytes()
        self._documents_path.write_bytes(data)
        return ShardFacts(
            name=self.name,
            num_tokens=self.num_tokens,
            num_documents=len(starts),
            tokens_sha256=self._digest.hexdigest(),
            documents_sha256=hashlib.sha256(data).hexdigest(),
        )

    def remove(self) -> None:
        self._file.close()
        self._tokens_path.unlink()
