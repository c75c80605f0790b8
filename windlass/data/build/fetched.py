"""A dataset straight to token shards: its text is kept in the cache until the shards are there."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace

from windlass.common.cache import cache_root, name_digest
from windlass.data.build.tokenizing import tokenize
from windlass.data.shards.destination import destination
from windlass.data.shards.folder import Index
from windlass.data.sources.fetch_destination import MANIFEST, LocalParts
from windlass.data.sources.fetching import Progress, Wanted, fetch
from windlass.data.sources.source import FileSource, HubSource
from windlass.data.tokenizers.tokenizer import load_tokenizer


def fetch_shards(
    source: HubSource,
    out: str,
    wanted: Wanted,
    tokenizer: str,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Both halves are resumable: the text that was fetched is found again, and so are the units that were tokenized."""
    destination(out).require_free(overwrite)
    loaded = load_tokenizer(tokenizer)
    loaded.require_eos()
    wanted = replace(wanted, fields=(source.text_field,), compress=False)
    text = cache_root() / "fetched" / name_digest(f"{out} {asdict(source)} {asdict(wanted)}")
    if not (text / MANIFEST).exists():
        fetch(source, LocalParts(text), wanted, progress=progress)
    parts = tuple(sorted(text.glob("part-*.jsonl")))
    index = tokenize(
        [FileSource(parts, source.text_field, source.name)],
        out,
        loaded,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
    )
    shutil.rmtree(text)
    return index
