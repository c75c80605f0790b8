"""`windlass data tokenize`: text to token shards."""

from __future__ import annotations

import time
from typing import Any, Literal

import click

from windlass.cli.data.options import count, progress_bar, record_options
from windlass.cli.output import print_json, warn
from windlass.errors import UserError
from windlass.spec.data import DataSection


@click.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("-o", "--out", required=True, help="Folder or s3://BUCKET/PREFIX to write; must not exist yet.")
@click.option("--tokenizer", default="tiny", show_default=True, help="tiny, a folder with tokenizer.json, or a hub id.")
@record_options
@click.option(
    "--bad-records",
    type=click.Choice(["refuse", "skip"]),
    default="refuse",
    show_default=True,
    help="Name a record that cannot be read and end, or leave such records out and count them.",
)
@click.option("--special-token", "special_tokens", multiple=True, help="Token to add to the tokenizer; repeat it.")
@click.option("--workers", type=click.IntRange(1), help="Processes.  [default: one per core]")
@click.option("--shard-tokens", callback=count, default="100M", show_default=True, help="Tokens per shard.")
@click.option("--config", help="Configuration of a hf: source.")
@click.option("--split", default="train", show_default=True, help="Split of a hf: source.")
@click.option("--file", "files", multiple=True, help="Data file of hf:json, hf:text, hf:parquet, hf:csv; repeat it.")
@click.option("--limit", callback=count, help="Stop after this many documents.")
@click.option("--dedup", is_flag=True, help="Leave out documents whose text came before.")
@click.option(
    "--validation",
    type=click.FloatRange(0.0, 0.5, min_open=True),
    help="Put this share of the documents into OUT/validation, chosen by their text.",
)
@click.option("--overwrite", is_flag=True, help="Replace a folder of shards that is there.")
@click.option("--yes", is_flag=True, help="Ask nothing; this command never does.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def tokenize(
    sources: tuple[str, ...],
    out: str,
    tokenizer: str,
    records: dict[str, Any],
    bad_records: Literal["refuse", "skip"],
    special_tokens: tuple[str, ...],
    workers: int | None,
    shard_tokens: int,
    config: str | None,
    split: str,
    files: tuple[str, ...],
    limit: int | None,
    dedup: bool,
    validation: float | None,
    overwrite: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Turn text into memory-mapped token shards.

    SOURCE is a file, a folder or a glob of .jsonl, .csv, .txt or .parquet files (all but the last also as .gz, .zst,
    .bz2 or .xz), the same as s3://…, corpus:austen, or hf:NAME for a `datasets` source. A line of .jsonl and a row of
    .csv or .parquet is a document; so is a whole .txt file. Every document ends with the tokenizer's end token. The
    result does not depend on the number of workers. After a kill the same command goes on where it stopped.
    """
    from windlass.data.build.tokenizing import require_free
    from windlass.data.build.tokenizing import tokenize as run
    from windlass.data.sources.records import selector
    from windlass.data.sources.source import FileSource, HubSource, source_named
    from windlass.data.tokenizers.chat import encoder
    from windlass.data.tokenizers.tokenizer import load_tokenizer

    require_free(out, overwrite)
    section = DataSection(**records, special_tokens=special_tokens)
    opened: list[FileSource | HubSource] = []
    for name in sources:
        source = source_named(
            name,
            config=config,
            split=split,
            files=files if name.startswith("hf:") else (),
            text_field=selector(section),
            skip_bad=bad_records == "skip",
        )
        if not isinstance(source, FileSource | HubSource):
            raise UserError(f"{name} holds token shards already", fix=f"windlass data inspect {name}")
        opened.append(source)
        unread = source.about_ignored() if isinstance(source, FileSource) else None
        if unread:
            warn(unread)
    begin = time.perf_counter()
    with progress_bar("tokenizing", shown=not as_json) as progress:
        index = run(
            opened,
            out,
            encoder(load_tokenizer(tokenizer), section),
            workers=workers,
            shard_tokens=shard_tokens,
            limit=limit,
            dedup=dedup,
            validation=validation or 0.0,
            overwrite=overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - begin
    validation_folder = f"{out.rstrip('/')}/validation" if validation else None
    if as_json:
        print_json(
            {
                "folder": out,
                "tokens": index.num_tokens,
                "documents": index.num_documents,
                "shards": len(index.shards),
                "dtype": index.dtype,
                "tokenizer": index.tokenizer.name,
                "vocab_size": index.tokenizer.vocab_size,
                "left_out": index.left_out,
                "validation": validation_folder,
                "seconds": round(seconds, 3),
            }
        )
        return
    speed = f"{index.num_tokens / seconds:,.0f} tokens/s"
    click.echo(
        f"{out}: {index.num_tokens:,} tokens, {index.num_documents:,} documents, "
        f"{len(index.shards)} shard{'s' * (len(index.shards) != 1)}; {seconds:.1f} s, {speed}"
    )
    for reason, number in index.left_out.items():
        click.echo(f"left out: {number:,} {reason}")
    also = f" data.validation_source={validation_folder}" if validation_folder else ""
    also += f" data.format={section.format}" if section.format != "text" else ""
    click.echo(f"train on it with data.source={out}{also}")
