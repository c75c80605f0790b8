"""Whether a run may go on in the folder of an earlier one. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.errors import UserError
from windlass.spec.loading import parse_run
from windlass.spec.run import Run

# What may change between two attempts of one run without changing what it computes: how long it goes, what is
# reported and kept, how it is computed, and where it runs.
QUIET_KEYS = frozenset(
    f"train.{key}"
    for key in (
        *("log_every", "validate_every", "validation_sequences", "early_stopping"),
        *("tensorboard", "loggers", "callbacks", "profile"),
        *("micro_batch", "compile", "fused_head", "bf16_weights", "lean_blocks"),
    )
)
# What may change too, and is training with other numbers from there on: each change is shown and in the history.
STEERING_KEYS = frozenset(
    f"train.{key}"
    for key in (
        *("steps", "learning_rate", "min_learning_rate", "schedule", "warmup_steps", "decay_fraction"),
        *("weight_decay", "beta1", "beta2", "epsilon", "grad_clip", "global_batch", "fp8"),
    )
)
FREE_SECTIONS = frozenset(("checkpoint", "resources", "parallel", "image", "target", "notify"))

# Left open by the user, filled in when the run was first resolved: the first answer holds for the whole run.
SETTLED_ONCE = (
    *("data.config", "data.sequence_length", "data.tokenizer"),
    *("train.warmup_steps", "train.min_learning_rate"),
)


def adopt(requested: Run, earlier: Run) -> Run:
    """`requested` with the defaults that `earlier` settled: warm-up stays as long as it was when the run grows, say."""
    values = requested.model_dump()
    before = earlier.model_dump()
    for key in SETTLED_ONCE:
        if key == "train.min_learning_rate" and requested.train.learning_rate != earlier.train.learning_rate:
            continue  # a tenth of the new peak, not of the old one
        if key == "train.warmup_steps" and requested.train.steps < (earlier.train.warmup_steps or 0):
            continue  # a fiftieth of the new steps: with the old one the learning rate would never reach its peak
        section, name = key.split(".")
        if values[section][name] is None:
            values[section][name] = before[section][name]
    return parse_run(values, source=f"the run {earlier.name} as it began")


Changes = dict[str, tuple[Any, Any]]  # by key: the value there was, the value there is


def differences(earlier: Run, now: Run) -> Changes:
    """The keys in which two resolved runs differ although one run cannot change them, with both values."""
    return {key: values for key, values in _all_differences(earlier, now).items() if not _is_free(key)}


def steering(earlier: Run, now: Run) -> Changes:
    """The keys that were changed within one run and make it train with other numbers."""
    return {key: values for key, values in _all_differences(earlier, now).items() if key in STEERING_KEYS}


def must_match(earlier: Run, now: Run, *, folder: str) -> None:
    changed = differences(earlier, now)
    if not changed:
        return
    raise UserError(
        f"the run {now.name!r} exists with other settings in {folder}",
        evidence="\n".join(change_lines(changed)),
        cause="its checkpoints belong to those settings; going on with others would be another run",
        fix=f"name=OTHER    trains it beside the old one\n--fresh       moves {folder} aside and starts anew",
    )


def shown(value: Any) -> str:
    """A value of a setting, for a person."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def change_lines(changes: Changes) -> list[str]:
    """One line for a person per change."""
    width = max(map(len, changes), default=0)
    return [f"{key:<{width}}  {shown(was)} there, {shown(now)} asked" for key, (was, now) in changes.items()]


def _all_differences(earlier: Run, now: Run) -> Changes:
    before, after = dict(leaves(earlier.model_dump(mode="json"))), dict(leaves(now.model_dump(mode="json")))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def _is_free(key: str) -> bool:
    parts = key.split(".")
    free = QUIET_KEYS | STEERING_KEYS
    return ".".join(parts[:2]) in free or parts[0] in FREE_SECTIONS or key in ("name", "code")


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested sections, by its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
