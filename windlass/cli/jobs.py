"""What the shell can complete, `windlass completion`, which teaches it to, and options that commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def _names_of_runs() -> list[str]:
    from windlass.runfolder import runs_root

    return sorted(path.parent.name for path in runs_root().glob("*/run.yaml"))


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


def _gpu_names() -> list[str]:
    from windlass.catalog.gpus import gpus

    return sorted(gpus())


def _target_kinds() -> list[str]:
    from windlass.targets import KINDS

    return list(KINDS)


def _completing(names: Callable[[], list[str]]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names() if name.lower().startswith(incomplete.lower())]

    return complete


def _place_option(help: str) -> Callable[[Any], Any]:
    return click.option("--on", "place", metavar="TARGET", shell_complete=complete_target, help=help)


def placed(place: str | None, nodes: int | None) -> list[str]:
    """`--on` and `--nodes` as overrides of the run file."""
    from windlass.spec.loading import text_override
    from windlass.targets import place_settings

    changes = [text_override(key, value) for key, value in place_settings(place).items()] if place else []
    return [*changes, *([f"resources.nodes={nodes}"] if nodes else [])]


run_names = _completing(_names_of_runs)
complete_preset = _completing(preset_names)
complete_gpu = _completing(_gpu_names)
complete_target = _completing(_target_kinds)

run_file_argument = click.argument("run_file", metavar="RUN.yaml", type=click.Path())
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_overrides)
on_option = _place_option("Ask the cluster, kubernetes[:CONTEXT], where no run folder is here.")
train_on_option = _place_option("Where to train: local, slurm[:LOGIN_NODE], kubernetes[:CONTEXT].")
list_on_option = _place_option("Also those that a cluster, kubernetes[:CONTEXT], knows itself.")
nodes_option = click.option("--nodes", type=click.IntRange(min=1), help="Number of machines; sets resources.nodes.")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
context_option = click.option(
    "--context", metavar="CONTEXT", help="Context of your kubeconfig. Default: the run file's, or the current."
)
namespace_option = click.option(
    "-n", "--namespace", metavar="NAMESPACE", help="Namespace. Default: the run file's, or the context's."
)
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash    eval "$(windlass completion bash)"                  in ~/.bashrc
    zsh     eval "$(windlass completion zsh)"                   in ~/.zshrc
    fish    windlass completion fish > ~/.config/fish/completions/windlass.fish
    """
    from click.shell_completion import get_completion_class

    from windlass.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, shell
    script = kind(cli, {}, "windlass", "_WINDLASS_COMPLETE").source()
    # in bash no space after `train.steps=`: its value comes next
    click.echo(script.replace("COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"))
