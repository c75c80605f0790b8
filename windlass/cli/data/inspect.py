"""`windlass data inspect`: what shards, text files or the sources of a run hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from windlass.cli.data.quantities import progress_bar
from windlass.cli.output import print_json, print_pairs, print_rule, print_table

if TYPE_CHECKING:
    from windlass.data.inspecting import Inspection

BAR_WIDTH = 40


@click.command()
@click.argument("path")
@click.argument("overrides", metavar="[section.key=value]...", nargs=-1)
@click.option("--samples", type=click.IntRange(0), default=3, show_default=True, help="Documents to show.")
@click.option("--text-field", default="text", show_default=True, help="Field of a record that holds the text.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "chat", "instruction"]),
    default="text",
    show_default=True,
    help="What a record is; the last two are shown as the tokenizer's template renders them.",
)
@click.option("--tokenizer", help="For --format: tiny, a folder with tokenizer.json, or a hub id.")
@click.option("--train-on", type=click.Choice(["all", "last"]), default="all", help="Assistant turns that are trained.")
@click.option("--messages-field", default="messages", show_default=True, help="Field of a chat's messages.")
@click.option("--prompt-field", default="prompt", show_default=True, help="Field of an instruction's prompt.")
@click.option("--completion-field", default="completion", show_default=True, help="And of its completion.")
@click.option("--sequence", metavar="ID", help="Of a run file: the text of this sequence, as an error names it.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def inspect(
    path: str,
    overrides: tuple[str, ...],
    samples: int,
    text_field: str,
    form: Literal["text", "chat", "instruction"],
    tokenizer: str | None,
    train_on: Literal["all", "last"],
    messages_field: str,
    prompt_field: str,
    completion_field: str,
    sequence: str | None,
    as_json: bool,
) -> None:
    """Show what shards or text files hold, here or at s3://…, or how a run file reads its sources.

    Of shards on this machine, every file is compared with its checksum. Of chats and instructions, what is trained on
    stands between ⟦ and ⟧. Of a run file, every source is listed with its share and how often the run goes through it;
    with --sequence window:12 the text of a training sequence is shown.
    """
    from dataclasses import asdict

    from windlass.data.inspecting import inspect as look
    from windlass.errors import UserError
    from windlass.spec.data import DataSection

    if path.endswith((".yaml", ".yml")):
        if sequence:
            show_sequence(path, overrides, sequence, as_json=as_json)
        else:
            show_run(path, overrides, as_json=as_json)
        return
    if sequence:
        raise UserError("--sequence belongs to a run file", fix=f"windlass data inspect RUN.yaml --sequence {sequence}")
    if overrides:
        raise UserError(f"{path} is no run file, so {overrides[0]!r} cannot be set in it")
    section = DataSection(
        text_field=text_field,
        format=form,
        messages_field=messages_field,
        prompt_field=prompt_field,
        completion_field=completion_field,
        train_on=train_on,
    )
    found = look(path, samples=samples, data=section, tokenizer=tokenizer)
    if as_json:
        print_json(asdict(found))
        return
    print_pairs(rows(found))
    most = max((bar.count for bar in found.lengths.histogram), default=0)
    if most:
        print_rule(f"{found.lengths.unit} per document")
        for bar in found.lengths.histogram:
            filled = "█" * (-(-bar.count * BAR_WIDTH // most) if bar.count else 0)
            click.echo(f"{bar.low:>10,} – {bar.high - 1:<10,} {filled:<{BAR_WIDTH}} {bar.count:,}")
    for number, sample in enumerate(found.samples, start=1):
        print_rule(f"sample {number}")
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


def show_sequence(path: str, overrides: tuple[str, ...], name: str, *, as_json: bool) -> None:
    from dataclasses import asdict

    from windlass.data.checks import check_data
    from windlass.data.inspecting import inspect_sequence
    from windlass.plan import resolve
    from windlass.spec import load_run

    run = resolve(load_run(path, overrides))
    check_data(run)
    assert run.data.tokenizer
    with progress_bar("tokenizing", shown=not as_json) as progress:
        found = inspect_sequence(run, name, tokenizer=run.data.tokenizer, progress=progress)
    if as_json:
        print_json(asdict(found))
        return
    print_pairs(
        [
            ("sequence", found.id),
            ("source", found.source),
            ("tokens", f"{found.num_tokens:,}, {found.num_trained:,} of them trained on"),
        ]
    )
    for document, text in found.documents:
        print_rule(f"document {document:,}")
        click.echo(text)


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
