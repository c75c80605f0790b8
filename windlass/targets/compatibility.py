"""Whether a run may go on in the folder of an earlier one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.errors import UserError
from windlass.spec import Run

# What may change between two attempts of one run: how long it goes, what is reported and kept, and where it runs.
FREE_KEYS = frozenset(
    f"train.{key}"
    for key in (
        "steps",
        "log_every",
        "validate_every",
        "validation_sequences",
        "early_stopping",
        "tensorboard",
        "micro_batch",
        "compile",
        "fused_head",
        "bf16_weights",
    )
)
FREE_SECTIONS = frozenset(("checkpoint", "resources", "parallel", "image", "target"))

# Left open by the user, filled in when the run was first resolved: the first answer holds for the whole run.
SETTLED_ONCE = (
    "data.config",
    "data.sequence_length",
    "data.tokenizer",
    "train.warmup_steps",
    "train.min_learning_rate",
)


def adopt(asked: Run, earlier: Run) -> Run:
    """`asked` with the defaults that `earlier` settled: warm-up stays as long as it was when the run grows, say."""
    values = asked.model_dump()
    before = earlier.model_dump()
    for key in SETTLED_ONCE:
        section, name = key.split(".")
        if values[section][name] is None:
            values[section][name] = before[section][name]
    return Run.model_validate(values)


def differences(earlier: Run, now: Run) -> dict[str, tuple[Any, Any]]:
    """The keys in which two resolved runs differ although one run cannot change them, with both values."""
    before, after = dict(_leaves(earlier.model_dump(mode="json"))), dict(_leaves(now.model_dump(mode="json")))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _is_free(key)
    }


def must_match(earlier: Run, now: Run, *, folder: str) -> None:
    changed = differences(earlier, now)
    if not changed:
        return
    width = max(map(len, changed))
    raise UserError(
        f"the run {now.name!r} exists with other settings in {folder}",
        evidence="\n".join(f"{key:<{width}}  {was!r} there, {asked!r} asked" for key, (was, asked) in changed.items()),
        cause="its checkpoints belong to those settings; going on with others would be another run",
        fix=f"name=OTHER    trains it beside the old one\n--fresh       moves {folder} aside and starts anew",
    )


def _is_free(key: str) -> bool:
    parts = key.split(".")
    return ".".join(parts[:2]) in FREE_KEYS or parts[0] in FREE_SECTIONS or key == "name"


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
