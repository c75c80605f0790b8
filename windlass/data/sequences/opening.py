"""Open the sources of a mixture and see that they go together."""

from __future__ import annotations

from windlass.data.sequences.mixing import LONGEST_CYCLE, Mixture, Part, parts_of, whole_counts
from windlass.data.sequences.sequences import Part as Which
from windlass.data.sequences.sequences import Progress, open_sequences
from windlass.data.sequences.stream import Stream
from windlass.data.sequences.windows import Windows
from windlass.errors import UserError
from windlass.spec import Run
from windlass.spec.data import DataSection


def open_mixture(run: Run, which: Which, *, tokenizer: str, progress: Progress | None) -> Mixture:
    check_weights(run.data)
    parts: list[Part] = []
    for data in parts_of(run.data):
        part = open_sequences(run.model_copy(update={"data": data}), which, tokenizer=tokenizer, progress=progress)
        if not isinstance(part, Windows | Stream):
            raise UserError(
                f"{data.source} cannot be mixed with other sources", evidence=f"data.format is {data.format}"
            )
        parts.append(part)
    check_tokenizers(parts, run.data)
    return Mixture(parts, [one.weight for one in run.data.sources])


def check_weights(data: DataSection) -> None:
    counts = whole_counts([one.weight for one in data.sources])
    for one, count in zip(data.sources, counts, strict=True):
        if not count:
            raise UserError(
                f"the weight {one.weight:g} of {one.source} is too small beside the others",
                evidence=f"it would have less than one sequence in {LONGEST_CYCLE:,}",
                fix=f"leave {one.source} out, or give it a larger weight",
            )


def check_tokenizers(parts: list[Part], data: DataSection) -> None:
    """Ids of one tokenizer mean nothing beside those of another."""
    made_by = {source.source: part.tokenizer for source, part in zip(data.sources, parts, strict=True)}
    if len({fingerprint for _, fingerprint in made_by.values()}) > 1:
        raise UserError(
            "the sources of this run were made with different tokenizers",
            evidence="\n".join(f"{source}: {name} ({print_[:12]})" for source, (name, print_) in made_by.items()),
            fix="windlass data tokenize … --tokenizer NAME    with one NAME for all",
        )
