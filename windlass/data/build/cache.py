"""Text files tokenized once per host: shards in a cache folder, made by whichever process comes first."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from windlass.common.files import CACHE_VARIABLE, cache_root, json_digest
from windlass.common.locks import locked
from windlass.data.build.tokenizing import Progress, tokenize
from windlass.data.shards.folder import VERSION, TokenShards
from windlass.data.shards.store_shards import open_store_shards
from windlass.data.sources.files import file_fingerprint
from windlass.data.sources.source import FileSource, ShardSource, StoreShardSource, file_format
from windlass.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from windlass.errors import UserError

log = logging.getLogger(__name__)


def open_shards(
    source: ShardSource | StoreShardSource | FileSource,
    *,
    tokenizer: str,
    progress: Progress | None = None,
    cache_gib: float | None = None,
    load: Callable[[str], Tokenizer] = load_tokenizer,
) -> TokenShards:
    """The tokens of a source. Of text files: from the cache, where the first process to ask puts them."""
    if isinstance(source, ShardSource):
        return TokenShards.open(source.folder)
    if isinstance(source, StoreShardSource):
        return open_store_shards(source, cache_gib)
    loaded = load(tokenizer)
    folder = cache_root() / "tokens" / cache_key(source, loaded.fingerprint)
    check_cache()
    with locked(folder.with_suffix(".lock")):
        if folder.exists():
            try:
                return TokenShards.open(folder)
            except UserError as error:
                log.warning("tokenizing %s again: %s", source.name, error.what)
                shutil.rmtree(folder)
        tokenize([source], folder, loaded, progress=progress)
        return TokenShards.open(folder)


def cache_key(source: FileSource, tokenizer_fingerprint: str) -> str:
    facts = [VERSION, tokenizer_fingerprint, source.text_field, *map(file_fingerprint, source.files)]
    if any(file_format(Path(file.name)) == "text" for file in source.files):
        facts.append("no byte order marks")  # what earlier versions cached has them
    if source.skip_bad:
        facts.append("without bad records")
    return json_digest(facts)[:32]


def check_cache() -> None:
    """Raise a UserError where nothing could be kept on this machine."""
    folder = cache_root() / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the cache folder {folder} cannot be written to",
            evidence=str(error),
            fix=f"export {CACHE_VARIABLE}=FOLDER",
        ) from None
