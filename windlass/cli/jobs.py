"""What the shell can complete: names of runs, keys of the run file, presets, targets; options that commands share."""

from __future__ import annotations

import click


def run_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of existing runs, for the shell to complete."""
    from windlass.runfolder import runs_root

    names = sorted(path.parent.name for path in runs_root().glob("*/run.yaml"))
    return [name for name in names if name.startswith(incomplete)]


def complete_overrides(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys of the run file with their values, for the shell to complete: `train.st` and `model.preset=lla`."""
    before = list(context.params.get(parameter.name or "") or ())
    if incomplete == "=":  # bash takes `key`, `=` and `value` apart
        before, incomplete = [*before, "="], ""
    if len(before) >= 2 and before[-1] == "=":
        return [choice for choice in _values(str(before[-2])) if choice.startswith(incomplete)]
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in _values(key) if choice.startswith(value)]
    return [f"{path}=" for path in _keys() if path.startswith(incomplete)]


def _keys() -> dict[str, str]:
    """Every key of the run file and the kind of its value."""
    from windlass.cli.reference import options_of_targets, sections

    return {key.path: key.kind for section in (*sections(), *options_of_targets()) for key in section.keys}


def _values(key: str) -> list[str]:
    """What a key may be, where that is a short list."""
    kind = _keys().get(key, "")
    if key == "model.preset":
        return preset_names()
    if key == "resources.instance":
        from windlass.catalog.instances import instances

        return sorted(instances())
    choices = [choice.strip() for choice in kind.split("|")]
    kinds = {"integer", "number", "mapping"}  # a union of types, not a list of words
    return choices if len(choices) > 1 and not kinds & set(choices) else []


def preset_names() -> list[str]:
    from windlass.catalog.models import presets

    return sorted(presets())


def complete_preset(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in preset_names() if name.startswith(incomplete)]


def complete_gpu(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from windlass.catalog.gpus import gpus

    return [name for name in sorted(gpus()) if name.lower().startswith(incomplete.lower())]


def complete_target(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from windlass.targets import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


on_option = click.option(
    "--on",
    "place",
    metavar="TARGET",
    shell_complete=complete_target,
    help="Ask the cluster, kubernetes[:CONTEXT], where no run folder is here.",
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
