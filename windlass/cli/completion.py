"""`windlass completion`: the script that makes a shell complete commands and run names."""

from __future__ import annotations

import click


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
