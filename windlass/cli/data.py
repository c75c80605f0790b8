"""`windlass data`: text to token shards, and a look at what is in them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from windlass.cli.output import console, print_json, print_pairs


@click.group()
def data() -> None:
    """Data: tokenize to shards, inspect."""


def count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A number with an optional K, M or G."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", value.strip().upper())
    number = int(float(found[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[found[2]]) if found else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is not a count such as 5000, 10K or 100M", ctx, param)
    return number


@data.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to write; must not exist yet."
)
@click.option("--tokenizer", default="tiny", show_default=True, help="tiny, a folder with tokenizer.json, or a hub id.")
@click.option("--text-field", default="text", show_default=True, help="Field of a record that holds the text.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option("--shard-tokens", callback=count, default="100M", show_default=True, help="Tokens per shard.")
@click.option("--config", help="Configuration of a hf: source.")
@click.option("--split", default="train", show_default=True, help="Split of a hf: source.")
@click.option("--file", "files", multiple=True, help="Data file of hf:json, hf:text, hf:parquet, hf:csv; repeat it.")
@click.option("--limit", callback=count, help="Stop after this many documents.")
@click.option("--overwrite", is_flag=True, help="Replace a folder of shards that is there.")
@click.option("--yes", is_flag=True, help="Ask nothing; this command never does.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def tokenize(
    sources: tuple[str, ...],
    out: Path,
    tokenizer: str,
    text_field: str,
    workers: int | None,
    shard_tokens: int,
    config: str | None,
    split: str,
    files: tuple[str, ...],
    limit: int | None,
    overwrite: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Turn text into memory-mapped token shards.

    SOURCE is a file, a folder or a glob of .jsonl, .txt or .parquet files (.jsonl and .txt also as .gz), corpus:austen,
    or hf:NAME for a `datasets` source. A line of .jsonl and a row of .parquet is a document; so is a whole .txt file.
    Every document ends with the tokenizer's end token. The result does not depend on the number of workers.
    """
    from windlass.data.sources import ShardSource, source_named
    from windlass.data.tokenizer import load_tokenizer
    from windlass.data.tokenizing import require_free
    from windlass.data.tokenizing import tokenize as run
    from windlass.errors import UserError

    require_free(out, overwrite)
    opened = []
    for one in sources:
        source = source_named(
            one,
            config=config,
            split=split,
            files=files if one.startswith("hf:") else (),
            text_field=text_field,
        )
        if isinstance(source, ShardSource):
            raise UserError(f"{one} holds token shards already", fix=f"windlass data inspect {one}")
        opened.append(source)
    begin = time.perf_counter()
    with progress_bar("tokenizing", shown=not as_json) as progress:
        index = run(
            opened,
            out,
            load_tokenizer(tokenizer),
            workers=workers,
            shard_tokens=shard_tokens,
            limit=limit,
            overwrite=overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - begin
    if as_json:
        print_json(
            {
                "folder": str(out),
                "tokens": index.num_tokens,
                "documents": index.num_documents,
                "shards": len(index.shards),
                "dtype": index.dtype,
                "tokenizer": index.tokenizer.name,
                "vocab_size": index.tokenizer.vocab_size,
                "seconds": round(seconds, 3),
            }
        )
        return
    speed = f"{index.num_tokens / seconds:,.0f} tokens/s"
    click.echo(
        f"{out}: {index.num_tokens:,} tokens, {index.num_documents:,} documents, "
        f"{len(index.shards)} shard{'s' * (len(index.shards) != 1)}; {seconds:.1f} s, {speed}"
    )
    click.echo(f"train on it with data.source={out}")


@data.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="Documents to show.")
@click.option("--text-field", default="text", show_default=True, help="Field of a record that holds the text.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def inspect(path: Path, samples: int, text_field: str, as_json: bool) -> None:
    """Show what a folder of shards or a text file holds.

    Of shards, every file is compared with its checksum.
    """
    from dataclasses import asdict

    from windlass.data.inspecting import inspect as look

    found = look(path, samples=samples, text_field=text_field)
    if as_json:
        print_json(asdict(found))
        return
    lengths = found.lengths
    pairs = [("path", found.path), ("kind", found.kind), ("documents", f"{found.num_documents:,}")]
    if found.num_tokens is not None:
        pairs.append(("tokens", f"{found.num_tokens:,}"))
    pairs.append(
        (
            f"{lengths.unit} per document",
            f"mean {lengths.mean:,.0f} · smallest {lengths.smallest:,} · median {lengths.median:,} · "
            f"90 % up to {lengths.ninetieth:,} · largest {lengths.largest:,}",
        )
    )
    pairs += [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in found.facts.items()]
    print_pairs(pairs)
    for number, sample in enumerate(found.samples, start=1):
        console().rule(f"sample {number}", align="left")
        click.echo(sample)


@contextmanager
def progress_bar(title: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal's stderr that a callback (done, total) moves."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    terminal = console(stderr=True)
    if not shown or not terminal.is_terminal:
        yield None
        return
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
