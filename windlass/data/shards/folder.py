"""Token shards on disk: raw tokens and document starts, memory-mapped, with an index that is written last.

FOLDER/index.json             what is here: dtype, tokenizer, counts and checksums
       shard-00000.tokens     little-endian uint16 or uint32, one after another
       shard-00000.documents  little-endian uint64: where each document begins, counted from the shard's first token
       shard-00000.blocks     a digest of every block of the tokens, for those who read them block by block
       tokenizer/             the tokenizer that made them
"""

from __future__ import annotations

import json
import re
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.common.files import sha256_of
from windlass.data.shards.block_cache import BlockCache, CachedArray
from windlass.data.sources.source import INDEX_NAME
from windlass.errors import UserError

VERSION = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DOCUMENT_DTYPE = np.dtype("<u8")
LOSS_BIT = np.int64(1 << 31)
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenizerFacts:
    """Which tokenizer made the tokens."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int


@dataclass(frozen=True)
class ShardFacts:
    """One shard as the index describes it."""

    name: str
    num_tokens: int
    num_documents: int
    tokens_sha256: str
    documents_sha256: str
    blocks_sha256: str = ""

    @property
    def tokens_file(self) -> str:
        return f"{self.name}.tokens"

    @property
    def documents_file(self) -> str:
        return f"{self.name}.documents"

    @property
    def blocks_file(self) -> str:
        return f"{self.name}.blocks"

    def checksums(self) -> dict[str, str]:
        """The shard's files with what their content should hash to."""
        sums = {self.tokens_file: self.tokens_sha256, self.documents_file: self.documents_sha256}
        return {**sums, self.blocks_file: self.blocks_sha256} if self.blocks_sha256 else sums


@dataclass(frozen=True)
class Index:
    version: int
    dtype: str
    tokenizer: TokenizerFacts
    num_tokens: int
    num_documents: int
    shards: tuple[ShardFacts, ...]
    block_bytes: int = 0  # 0: there are no digests of blocks
    left_out: dict[str, int] = field(default_factory=dict)  # documents that are not here, by the reason
    loss_bit: bool = False  # the top bit of a token says that it is trained on; the documents are examples

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return DTYPES[self.dtype].itemsize

    def file_sizes(self) -> dict[str, int]:
        """Bytes of every shard's tokens and documents, by the names of the files."""
        tokens = {shard.tokens_file: shard.num_tokens * self.itemsize for shard in self.shards}
        return tokens | {shard.documents_file: shard.num_documents * DOCUMENT_DTYPE.itemsize for shard in self.shards}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Index:
        value = json.loads(text)
        tokenizer = TokenizerFacts(**value.pop("tokenizer"))
        shards = tuple(ShardFacts(**shard) for shard in value.pop("shards"))
        return cls(tokenizer=tokenizer, shards=shards, **value)


@dataclass(frozen=True)
class RemoteShards:
    """The files behind shards in a store: tokens by the block, smaller files whole."""

    whole: Callable[[str], Path]  # a file of the store, brought here
    cache: BlockCache = field(repr=False)


@dataclass(frozen=True)
class TokenShards:
    """The tokens of all shards of a folder as one stream."""

    folder: Path  # of shards in an object store: what is here of them
    index: Index
    remote: RemoteShards | None = None

    @classmethod
    def open(cls, folder: Path | str) -> TokenShards:
        """The shards of a folder, each file's size checked against the index."""
        folder = Path(folder)
        shards = cls(folder, read_index(folder))
        for name, expected in shards.index.file_sizes().items():
            path = folder / name
            check_size(str(path), path.stat().st_size if path.exists() else None, expected)
        return shards

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.index.dtype]

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    @property
    def num_documents(self) -> int:
        return self.index.num_documents

    @property
    def vocab_size(self) -> int:
        return self.index.tokenizer.vocab_size

    @cached_property
    def _tokens(self) -> list[NDArray[Any] | CachedArray]:
        allow_open_files(2 * len(self.index.shards))
        if self.remote:
            return [self.remote.cache.array(number, self.dtype) for number in range(len(self.index.shards))]
        return [map_file(self.folder / shard.tokens_file, self.dtype, shard.num_tokens) for shard in self.index.shards]

    @cached_property
    def _mapped_documents(self) -> dict[int, NDArray[Any]]:
        return {}

    def _documents(self, shard: int) -> NDArray[Any]:
        if shard not in self._mapped_documents:
            facts = self.index.shards[shard]
            path = self.remote.whole(facts.documents_file) if self.remote else self.folder / facts.documents_file
            self._mapped_documents[shard] = map_file(path, DOCUMENT_DTYPE, facts.num_documents)
        return self._mapped_documents[shard]

    def _copy_tokens(self, shard: int, begin: int, end: int, out: NDArray[Any]) -> None:
        array = self._tokens[shard]
        if isinstance(array, np.ndarray):
            out[:] = array[begin:end]
        else:
            array.read_into(out, begin, end)

    @property
    def worth_prefetching(self) -> bool:
        """Whether tokens may still have to be fetched from a store."""
        return self.remote is not None and not self.remote.cache.all_here()

    def prefetch(self, begin: int, end: int) -> None:
        """Fetch the tokens [begin, end) in the background: they will be read soon."""
        if self.remote:
            shard = bisect_right(self._bounds, begin) - 1
            while begin < end:
                base, stop = self._bounds[shard], min(end, self._bounds[shard + 1])
                self._tokens[shard].prefetch(begin - base, stop - base)  # type: ignore[union-attr]
                begin = stop
                shard += 1

    @cached_property
    def _bounds(self) -> list[int]:
        """The first token of every shard, and the end."""
        return [0, *accumulate(shard.num_tokens for shard in self.index.shards)]

    def read(self, begin: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens [begin, end) of the stream, and the offsets from `begin` at which documents start."""
        tokens, starts, _ = self.read_marked(begin, end)
        return tokens, starts

    def read_marked(
        self, begin: int, end: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]:
        """The same, and which of the tokens are trained on; None: all of them."""
        if not 0 <= begin <= end <= self.num_tokens:
            raise IndexError(f"tokens [{begin}, {end}) of {self.num_tokens}")
        tokens = np.empty(end - begin, dtype=np.int64)
        starts = [np.empty(0, dtype=np.int64)]
        shard = bisect_right(self._bounds, begin) - 1
        here = begin
        while here < end:
            base, stop = self._bounds[shard], min(end, self._bounds[shard + 1])
            self._copy_tokens(shard, here - base, stop - base, tokens[here - begin : stop - begin])
            documents = self._documents(shard)
            low, high = np.searchsorted(documents, np.array([here - base, stop - base], dtype=DOCUMENT_DTYPE))
            starts.append(documents[low:high].astype(np.int64) + (base - begin))
            here = stop
            shard += 1
        if not self.index.loss_bit:
            return tokens, np.concatenate(starts), None
        return tokens & ~LOSS_BIT, np.concatenate(starts), tokens >= LOSS_BIT

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, its end token included."""
        lengths = [
            np.diff(self._documents(number).astype(np.int64), append=shard.num_tokens)
            for number, shard in enumerate(self.index.shards)
        ]
        return np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)

    def document_span(self, number: int) -> tuple[int, int]:
        """The tokens [begin, end) of the stream that are one document, counted over all shards."""
        lengths = self.document_lengths()
        begin = int(lengths[:number].sum())
        return begin, begin + int(lengths[number])

    def document(self, number: int) -> NDArray[np.int64]:
        return self.read(*self.document_span(number))[0]

    def verify(self) -> Iterator[tuple[str, int]]:
        """Compare every file with its checksum; yields each file's name and size once it is found right."""
        for shard in self.index.shards:
            for name, expected in shard.checksums().items():
                path = self.folder / name
                actual = sha256_of(path)
                if actual != expected:
                    raise UserError(
                        f"{path} is damaged: its content does not fit the index",
                        evidence=f"sha256 {actual[:16]}…, the index says {expected[:16]}…",
                        fix="make the shards again: windlass data tokenize … --overwrite",
                    )
                yield name, path.stat().st_size


def read_index(folder: Path) -> Index:
    path = folder / INDEX_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{folder} holds no token shards",
            evidence=f"{path} does not exist",
            fix="windlass data tokenize FILES -o FOLDER",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read", evidence=str(error)) from None
    return parse_index(text, str(path))


def parse_index(text: str, path: str) -> Index:
    try:
        version = json.loads(text)["version"]
        if version != VERSION:
            raise UserError(f"{path} is of version {version}; this windlass reads version {VERSION}")
        index = Index.from_json(text)
        check_index(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not an index of token shards", evidence=reason) from None
    sums = (sum(shard.num_tokens for shard in index.shards), sum(shard.num_documents for shard in index.shards))
    if sums != (index.num_tokens, index.num_documents):
        raise UserError(
            f"{path} contradicts itself",
            evidence=f"{index.num_tokens} tokens and {index.num_documents} documents in all, but the shards' sums are "
            f"{sums[0]} and {sums[1]}",
        )
    return index


SHARD_NAME = re.compile(r"shard-[0-9]{1,9}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def check_index(index: Index) -> None:
    """An index may come from a store: its names become paths here, and its numbers sizes of what is mapped."""
    if index.dtype not in DTYPES or (index.loss_bit and index.dtype != "uint32"):
        raise ValueError(f"dtype {index.dtype!r}")
    facts = index.tokenizer
    counts = [index.num_tokens, index.num_documents, index.block_bytes, facts.vocab_size, *index.left_out.values()]
    for shard in index.shards:
        counts += [shard.num_tokens, shard.num_documents]
        if not SHARD_NAME.fullmatch(shard.name):
            raise ValueError(f"shard name {shard.name!r}")
        for digest in shard.checksums().values():
            if not SHA256.fullmatch(digest):
                raise ValueError(f"checksum {digest!r}")
    for count in counts:
        if type(count) is not int or not 0 <= count < 1 << 62:
            raise ValueError(f"count {count!r}")
    if len({shard.name for shard in index.shards}) < len(index.shards):
        raise ValueError("a shard is named twice")
    if not isinstance(facts.name, str) or not isinstance(facts.fingerprint, str):
        raise ValueError("the tokenizer's name")


def check_size(file: str, size: int | None, expected: int) -> None:
    """`size` is None where there is no such file."""
    if size != expected:
        wrong = "missing" if size is None else "truncated" if size < expected else "too long"
        raise UserError(
            f"the shard file {file} is {wrong}",
            evidence=None if size is None else f"{size:,} bytes; the index says {expected:,}",
            fix="copy the folder again, or tokenize again",
        )


def allow_open_files(count: int) -> None:
    """Every mapped file counts as an open one, and the usual limit is made for programs with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def map_file(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def require_same_tokenizer(shards: TokenShards, fingerprint: str, name: str) -> None:
    made_by = shards.index.tokenizer
    if made_by.fingerprint != fingerprint:
        raise UserError(
            f"{shards.folder} was made with another tokenizer than the run's",
            evidence=f"shards: {made_by.name} ({made_by.fingerprint[:12]}); run: {name} ({fingerprint[:12]})",
            fix=f"windlass data tokenize … --tokenizer {name}, or data.tokenizer={made_by.name}",
        )
