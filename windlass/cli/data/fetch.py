"""`windlass data fetch`: records of a dataset to JSON lines or token shards."""

from __future__ import annotations

import time

import click

from windlass.cli.data.options import count, progress_bar, size
from windlass.cli.output import print_json
from windlass.errors import UserError


@click.command()
@click.argument("dataset")
@click.option("-o", "--out", required=True, help="Folder, FILE.jsonl, FILE.jsonl.gz, or either as s3://….")
@click.option("--samples", callback=count, help="Fetch this many records.")
@click.option("--bytes", "num_bytes", callback=size, help="Fetch so much JSON: 500MB, 10GB.")
@click.option("--config", help="Configuration of the dataset.  [default: en for allenai/c4]")
@click.option("--split", default="train", show_default=True, help="Split of the dataset.")
@click.option("--file", "files", multiple=True, help="Data file for json, text, parquet, csv; repeat it.")
@click.option("--field", "fields", multiple=True, help="Keep only this field of a record; repeat it.")
@click.option("--gzip", "compress", is_flag=True, help="Compress the parts.")
@click.option("--shards", "as_shards", is_flag=True, help="Make token shards instead of JSON lines.")
@click.option("--tokenizer", help="For --shards: tiny, a folder with tokenizer.json, or a hub id.")
@click.option("--text-field", default="text", show_default=True, help="For --shards: the field that holds the text.")
@click.option("--workers", type=click.IntRange(1), help="For --shards: processes.  [default: one per core]")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier fetch made.")
@click.option("--yes", is_flag=True, help="Ask nothing; this command never does.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def fetch(
    dataset: str,
    out: str,
    samples: int | None,
    num_bytes: int | None,
    config: str | None,
    split: str,
    files: tuple[str, ...],
    fields: tuple[str, ...],
    compress: bool,
    as_shards: bool,
    tokenizer: str | None,
    text_field: str,
    workers: int | None,
    overwrite: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Fetch records of a dataset: allenai/c4, any other id of the hub, or json, text, parquet, csv with --file.

    It is streamed: no more is read than is kept. After a kill or a lost connection the same command goes on where it
    stopped, and the result is the same bytes.
    """
    from windlass.data.build.fetching import Wanted, fetch_destination, fetch_shards
    from windlass.data.build.fetching import fetch as run
    from windlass.data.sources.source import hub_source

    if tokenizer and not as_shards:
        raise UserError("--tokenizer is for --shards", fix="--shards")
    if as_shards and (fields or compress):
        raise UserError(
            "--field and --gzip are for JSON lines, not for --shards", fix="leave --shards out, or --field and --gzip"
        )
    source = hub_source(
        f"hf:{dataset.removeprefix('hf:')}", config=config, split=split, files=files, text_field=text_field
    )
    compress = compress or out.endswith(".gz")
    wanted = Wanted(samples, num_bytes, fields, compress)
    begin = time.perf_counter()
    if as_shards:
        with progress_bar("fetching", shown=not as_json) as progress:
            index = fetch_shards(
                source, out, wanted, tokenizer or "tiny", workers=workers, overwrite=overwrite, progress=progress
            )
        result = {"tokens": index.num_tokens, "records": index.num_documents, "shards": len(index.shards)}
        summary = f"{index.num_tokens:,} tokens, {index.num_documents:,} documents"
    else:
        with progress_bar("fetching", shown=not as_json) as progress:
            reached = run(source, fetch_destination(out), wanted, overwrite=overwrite, progress=progress)
        result = {"records": reached.records, "bytes": reached.raw_bytes, "parts": len(reached.parts)}
        summary = f"{reached.records:,} records, {reached.raw_bytes:,} bytes of JSON"
    seconds = round(time.perf_counter() - begin, 3)
    if as_json:
        print_json({"out": out, "dataset": source.path, **result, "seconds": seconds})
        return
    click.echo(f"{out}: {summary}; {seconds:.1f} s")
    click.echo(f"train on it with data.source={out}")
