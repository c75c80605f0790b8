"""`windlass data inspect`: what shards, text files or the sources of a run hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.data.options import progress_bar, record_options
from windlass.cli.output import print_json, print_pairs, print_rule, print_table
from windlass.errors import UserError
from windlass.plan import resolve
from windlass.spec import Run, load_run
from windlass.spec.data import DataSection

if TYPE_CHECKING:
    from windlass.data.inspecting import Inspection

BAR_WIDTH = 40


@click.command()
@click.argument("path")
@click.argument("overrides", metavar="[section.key=value]...", nargs=-1)
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="Documents to show.")
@record_options
@click.option("--tokenizer", help="For --format: tiny, a folder with tokenizer.json, or a hub id.")
@click.option("--sequence", metavar="ID", help="Of a run file: the text of this sequence, as an error names it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def inspect(
    path: str,
    overrides: tuple[str, ...],
    samples: int,
    records: dict[str, Any],
    tokenizer: str | None,
    sequence: str | None,
    as_json: bool,
) -> None:
    """Show what shards or text files hold, here or at s3://…, or how a run file reads its sources.

    Of shards on this machine, every file is compared with its checksum. Of chats and instructions, what is trained on
    stands between ⟦ and ⟧. Of a run file, every source is listed with its share and how often the run goes through it;
    with --sequence window:12 the text of a training sequence is shown.
    """
    from windlass.data.inspecting import inspect as look

    if path.endswith((".yaml", ".yml")):
        if sequence:
            show_sequence(path, overrides, sequence, as_json=as_json)
        else:
            show_run(path, overrides, as_json=as_json)
        return
    if sequence:
        raise UserError("--sequence belongs to a run file", fix=f"windlass data inspect RUN.yaml --sequence {sequence}")
    if overrides:
        raise UserError(
            f"{path} is no run file, so {overrides[0]!r} cannot be set in it",
            fix=f"windlass data inspect RUN.yaml {overrides[0]}",
        )
    inspection = look(path, samples=samples, data=DataSection(**records), tokenizer=tokenizer)
    if as_json:
        print_json(asdict(inspection))
        return
    print_pairs(rows(inspection))
    most = max((bar.count for bar in inspection.lengths.histogram), default=0)
    if most:
        print_rule(f"{inspection.lengths.unit} per document")
        for bar in inspection.lengths.histogram:
            filled = "█" * (-(-bar.count * BAR_WIDTH // most) if bar.count else 0)
            click.echo(f"{bar.low:>10,} – {bar.high - 1:<10,} {filled:<{BAR_WIDTH}} {bar.count:,}")
    for number, sample in enumerate(inspection.samples, start=1):
        print_rule(f"sample {number}")
        click.echo(sample)


def rows(inspection: Inspection) -> list[tuple[str, str]]:
    lengths = inspection.lengths
    pairs = [("path", inspection.path), ("kind", inspection.kind), ("documents", f"{inspection.num_documents:,}")]
    if inspection.num_tokens is not None:
        pairs.append(("tokens", f"{inspection.num_tokens:,}"))
    pairs.append(
        (
            f"{lengths.unit} per document",
            f"mean {lengths.mean:,.0f} · smallest {lengths.smallest:,} · median {lengths.median:,} · "
            f"90 % up to {lengths.ninetieth:,} · largest {lengths.largest:,}",
        )
    )
    return pairs + [
        (name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in inspection.facts.items()
    ]


def show_sequence(path: str, overrides: tuple[str, ...], name: str, *, as_json: bool) -> None:
    from windlass.data.inspecting import inspect_sequence

    run, tokenizer = _checked(path, overrides)
    with progress_bar("tokenizing", shown=not as_json) as progress:
        shown = inspect_sequence(run, name, tokenizer=tokenizer, progress=progress)
    if as_json:
        print_json(asdict(shown))
        return
    print_pairs(
        [
            ("sequence", shown.id),
            ("source", shown.source),
            ("tokens", f"{shown.num_tokens:,}, {shown.num_trained:,} of them trained on"),
        ]
    )
    for document, text in shown.documents:
        print_rule(f"document {document:,}")
        click.echo(text)


def show_run(path: str, overrides: tuple[str, ...], *, as_json: bool) -> None:
    from windlass.data.inspecting import inspect_run

    run, tokenizer = _checked(path, overrides)
    with progress_bar("tokenizing", shown=not as_json) as progress:
        sources = inspect_run(run, tokenizer=tokenizer, progress=progress)
    if as_json:
        print_json([asdict(source) for source in sources])
        return
    print_table(
        ("source", "share", "sequences", f"read in {run.train.steps:,} steps", "epochs"),
        [
            (
                source.source,
                f"{source.share:.2%}",
                "a stream" if source.num_sequences is None else f"{source.num_sequences:,}",
                f"{source.sequences_read:,}",
                "–" if source.epochs is None else f"{source.epochs:.3g}",
            )
            for source in sources
        ],
    )


def _checked(path: str, overrides: tuple[str, ...]) -> tuple[Run, str]:
    """The resolved run, and its tokenizer."""
    from windlass.data.checks import check_data

    run = resolve(load_run(path, overrides))
    check_data(run)
    assert run.data.tokenizer
    return run, run.data.tokenizer
