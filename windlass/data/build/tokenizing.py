"""Tokenize sources into a folder of shards with several processes; the same bytes whatever their number or deaths."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windlass.data.build.assembling import Assembly, Recipe
from windlass.data.build.destinations import SHARDS, destination
from windlass.data.build.processes import cores, tokenized
from windlass.data.build.progress import clear, clear_remains, published_before, work_in
from windlass.data.shards.folder import VERSION, Index, parse_index
from windlass.data.sources import reading
from windlass.data.sources.files import file_fingerprint
from windlass.data.sources.reading import units_of
from windlass.data.sources.source import FileSource, HubSource
from windlass.data.tokenizers.tokenizer import Tokenizer

SHARD_TOKENS = 100_000_000
Progress = Callable[[int, int], None]  # (done, total), in bytes of text


def tokenize(
    sources: Sequence[FileSource | HubSource],
    out: Path | str,
    tokenizer: Tokenizer,
    *,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    limit: int | None = None,
    dedup: bool = False,
    validation: float = 0.0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Write the shards of all documents of the sources to `out`, which appears when it is complete.

    A process that was killed leaves its finished parts beside `out`; the same call takes them up.
    """
    tokenizer.require_eos()
    place = destination(out, SHARDS)
    require_free(out, overwrite)
    units = units_of(sources)
    sizes = [sum(piece.size for piece in unit) for unit in units]
    report = progress or (lambda done, total: None)
    report(0, sum(sizes))
    recipe = Recipe(shard_tokens, limit, dedup, validation)
    plan = plan_of(sources, len(units), tokenizer, recipe)
    published = place.published() if place.work.exists() else None
    index = parse_index(published, f"{place.name}/{SHARDS.marker}") if published else None
    if index is not None and proof_of(index) == published_before(place.work, plan):
        clear(place.work)  # all that a killed process had left to do
        return index
    place.require_free(overwrite)
    with work_in(place.work, plan, what=place.name) as work:
        assembly = Assembly(work, tokenizer, recipe, place)
        if work.progress() is None:
            place.begin()
        spool = work.path / "spool"
        spool.mkdir(exist_ok=True)
        waiting = list(enumerate(units))[assembly.next_unit :] if not assembly.full else []
        for number, _, part in tokenized(
            waiting, spool, tokenizer, workers=workers or cores(), limit=limit, digests=recipe.digests
        ):
            assembly.add(number, part)
            report(sum(sizes[: number + 1]), sum(sizes))
            if assembly.full:
                break
        assembly.save()
        index = assembly.finish(", ".join(source.name for source in sources))
        work.publishing(proof_of(index))
        place.publish(assembly.result, overwrite)
    report(sum(sizes), sum(sizes))
    return index


def plan_of(
    sources: Sequence[FileSource | HubSource], num_units: int, tokenizer: Tokenizer, recipe: Recipe
) -> dict[str, Any]:
    """Everything the result depends on: only work with the same plan is taken up."""
    return {
        "version": VERSION,
        "tokenizer": [tokenizer.name, tokenizer.fingerprint],
        "recipe": asdict(recipe),
        "units": [num_units, reading.UNIT_BYTES],
        "sources": [
            [source.text_field, source.skip_bad, *map(file_fingerprint, source.files)]
            if isinstance(source, FileSource)
            else asdict(source)
            for source in sources
        ],
    }


def require_free(out: Path | str, overwrite: bool) -> None:
    """Early and cheap: what is there is not to be written over, unless a killed process was about to finish it."""
    place = destination(out, SHARDS)
    clear_remains(place.work)
    if not place.work.exists():
        place.require_free(overwrite)


def proof_of(index: Index) -> str:
    return hashlib.sha256(index.to_json().encode()).hexdigest()
