"""`windlass data inspect`: what shards, text files or the sources of a run hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from windlass.cli.output import console, print_json, print_pairs, print_table
from windlass.cli.quantities import progress_bar

if TYPE_CHECKING:
    from windlass.data.inspecting import Inspection

BAR_WIDTH = 40


@click.command()
@click.argument("path")
@click.argument("overrides", metavar="[section.key=value]...", nargs=-1)
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="Documents to show.")
@click.option("--text-field", default="text", show_default=True, help="Field of a record that holds the text.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def inspect(path: str, overrides: tuple[str, ...], samples: int, text_field: str, as_json: bool) -> None:
    """Show what shards or text files hold, here or at s3://…, or how a run file reads its sources.

    Of shards on this machine, every file is compared with its checksum. Of a run file, every source is listed with its
    share and how often the run goes through it.
    """
    from dataclasses import asdict

    from windlass.data.inspecting import inspect as look
    from windlass.errors import UserError

    if path.endswith((".yaml", ".yml")):
        show_run(path, overrides, as_json=as_json)
        return
    if overrides:
        raise UserError(f"{path} is no run file, so {overrides[0]!r} cannot be set in it")
    found = look(path, samples=samples, text_field=text_field)
    if as_json:
        print_json(asdict(found))
        return
    print_pairs(rows(found))
    most = max((bar.count for bar in found.lengths.histogram), default=0)
    if most:
        console().rule(f"{found.lengths.unit} per document", align="left")
        for bar in found.lengths.histogram:
            filled = "█" * (-(-bar.count * BAR_WIDTH // most) if bar.count else 0)
            click.echo(f"{bar.low:>10,} – {bar.high - 1:<10,} {filled:<{BAR_WIDTH}} {bar.count:,}")
    for number, sample in enumerate(found.samples, start=1):
        console().rule(f"sample {number}", align="left")
        click.echo(sample)


def rows(found: Inspection) -> list[tuple[str, str]]:
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
    return pairs + [
        (name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in found.facts.items()
    ]


def show_run(path: str, overrides: tuple[str, ...], *, as_json: bool) -> None:
    from dataclasses import asdict

    from windlass.data.checks import check_data
    from windlass.data.inspecting import inspect_run
    from windlass.plan import resolve
    from windlass.spec import load_run

    run = resolve(load_run(path, overrides))
    check_data(run)
    assert run.data.tokenizer
    with progress_bar("tokenizing", shown=not as_json) as progress:
        found = inspect_run(run, tokenizer=run.data.tokenizer, progress=progress)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    print_table(
        ("source", "share", "sequences", f"read in {run.train.steps:,} steps", "epochs"),
        [
            (
                one.source,
                f"{one.share:.2%}",
                "a stream" if one.num_sequences is None else f"{one.num_sequences:,}",
                f"{one.sequences_read:,}",
                "–" if one.epochs is None else f"{one.epochs:.3g}",
            )
            for one in found
        ],
    )
