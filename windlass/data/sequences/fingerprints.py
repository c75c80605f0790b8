"""What a run's data is, by its content: so that a run goes on with the data it was trained on and with no other.

Of shards, and of files that were tokenized into the cache, it is made of the SHA-256 of every shard, which the index
holds. Streams are not read for it: files of a hub count by the hub's own digests, files behind other URLs by what their
server says of them (ETag), files here by their size and a digest of their content, which is kept in the cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from windlass.common.files import cache_root, json_digest, sha256_of, write_atomically
from windlass.data.sequences.mixing import Mixture
from windlass.data.sequences.own import OwnDataset
from windlass.data.sequences.sequences import Sequences
from windlass.data.sequences.stream import Stream
from windlass.data.sequences.windows import Windows
from windlass.data.shards.folder import TokenShards
from windlass.data.sources.hub import DataFile, HubFiles
from windlass.spec.data import DataSection

log = logging.getLogger(__name__)

WHOLE_BYTES = 1 << 30  # a larger file here counts by blocks that lie far apart
BLOCK_BYTES = 1 << 20
BLOCKS = 64

Fingerprint = str | dict[str, str | None] | None  # None: it cannot be known


def data_fingerprint(sequences: Sequences, data: DataSection) -> Fingerprint:
    """Equal for data with the same tokens in the same order; of several sources one each."""
    if isinstance(sequences, Mixture):
        names = [source.source for source in data.sources]
        return {
            f"{number} {name}": part_fingerprint(part)
            for number, (name, part) in enumerate(zip(names, sequences.parts, strict=True))
        }
    return part_fingerprint(sequences)


def tokenizer_fingerprint(sequences: Sequences) -> str | None:
    first = sequences.parts[0] if isinstance(sequences, Mixture) else sequences
    return first.tokenizer[1] if isinstance(first, Windows | Stream | OwnDataset) else None


def part_fingerprint(part: Sequences) -> str | None:
    if isinstance(part, OwnDataset):
        return part.fingerprint()
    if isinstance(part, Windows):
        return shards_fingerprint(part.shards)
    if isinstance(part, Stream) and isinstance(part.files, HubFiles):
        return files_fingerprint(part.files.data_files)
    return None


def shards_fingerprint(shards: TokenShards) -> str:
    index = shards.index
    return json_digest(
        [
            index.dtype,
            index.loss_bit,
            [
                [shard.num_tokens, shard.num_documents, shard.tokens_sha256, shard.documents_sha256]
                for shard in index.shards
            ],
        ]
    )


def files_fingerprint(files: list[DataFile]) -> str | None:
    on_hub = hub_digests([file.url for file in files if file.url.startswith("hf://")])
    digests: list[Any] = []
    for file in files:
        path = Path(file.url)
        if file.url in on_hub:
            digests.append(on_hub[file.url])
        elif "://" not in file.url and path.is_file():
            digests.append(file_digest(path))
        else:
            digests.append(file.origin or None)
    if not digests or None in digests:
        return None
    return json_digest(digests)


def hub_digests(urls: list[str]) -> dict[str, str]:
    """Digests of files on a hub, as it gives them; of none where it cannot be asked."""
    if not urls:
        return {}
    try:
        from huggingface_hub import HfApi, HfFileSystem

        files: dict[tuple[str, str], dict[str, str]] = {}
        for url in urls:
            place: Any = HfFileSystem().resolve_path(url)
            files.setdefault((place.repo_id, place.revision), {})[place.path_in_repo] = url
        digests: dict[str, str] = {}
        for (repository, revision), paths in files.items():
            for info in HfApi().get_paths_info(repository, list(paths), revision=revision, repo_type="dataset"):
                lfs = getattr(info, "lfs", None)
                digests[paths[info.path]] = str(lfs.sha256 if lfs else info.blob_id)  # type: ignore[union-attr]
    except Exception as error:  # the library raises many kinds; the commit that was read is known anyway
        log.info("the hub gives no digests of %s: %s", urls[0], error)
        return {}
    return digests


def file_digest(path: Path) -> str:
    """Of a file's content, kept in the cache for as long as its size and time are the same."""
    status = path.stat()
    key = json_digest([str(path.resolve()), status.st_size, status.st_mtime_ns, BLOCKS, BLOCK_BYTES, WHOLE_BYTES])
    kept = cache_root() / "digests" / key
    try:
        return kept.read_text()
    except OSError:
        digest = f"{status.st_size}:{content_digest(path, status.st_size)}"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, digest)
    except OSError:  # only slower the next time
        pass
    return digest


def content_digest(path: Path, size: int) -> str:
    if size <= WHOLE_BYTES:
        return sha256_of(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in range(BLOCKS):
            file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
