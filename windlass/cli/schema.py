"""`windlass schema`: the schemas of the run file and of what commands print, for editors, programs and people."""

from __future__ import annotations

import difflib
import json
from typing import Any

import click
from rich.text import Text

from windlass.api.schemas.outputs import OUTPUTS, schema_of
from windlass.cli.output import console, print_json
from windlass.cli.reference import options_of_targets, sections
from windlass.errors import UserError
from windlass.spec import Run


def complete_what(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """`output`, and after it the words of a command."""
    before = list(context.params.get("what") or ())
    paths = [["output", *output.command.split()] for output in OUTPUTS]
    words = {path[len(before)] for path in paths if path[: len(before)] == before and len(path) > len(before)}
    return sorted(word for word in words if word.startswith(incomplete))


@click.command(short_help="Print the schema of the run file.")
@click.argument("what", nargs=-1, metavar="[output [COMMAND]]", shell_complete=complete_what)
@click.option("--keys", "list_keys", is_flag=True, help="List every key with its default and description instead.")
@click.option("--json", "as_json", is_flag=True, help="JSON; a schema always is.")
def schema(what: tuple[str, ...], list_keys: bool, as_json: bool) -> None:
    """Print the schema of the run file.

    Or, as JSON Schema too, of what commands print with --json.

    \b
    windlass schema                  of the run file
    windlass schema output           of what every command prints
    windlass schema output ckpt ls   of what this one prints; output ckpt: of all below ckpt
    windlass schema output error     of what every command prints when it fails

    \b
    For an editor with a YAML language server, as the first line of a run file:
    # yaml-language-server: $schema=run.schema.json
    """
    if list_keys and not what:
        listed = [key for section in (*sections(), *options_of_targets()) for key in section.keys]
        _print_keys(listed, as_json=as_json)
    elif not what:
        print_json(Run.model_json_schema())
    elif what[0] == "output" and not list_keys:
        print_json(_schema_of_output(" ".join(what[1:])))
    else:
        raise UserError(
            f"there is no schema of {' '.join(what)!r}",
            evidence="there are: the run file's, without a word; output: what commands print; output COMMAND",
            fix=f"windlass schema output {' '.join(what)}    or of the run file: windlass schema --keys",
        )


def _schema_of_output(command: str) -> dict[str, Any]:
    chosen = [output for output in OUTPUTS if not command or f"{output.command} ".startswith(f"{command} ")]
    if not chosen:
        names = list(dict.fromkeys(output.command for output in OUTPUTS))
        near = difflib.get_close_matches(command, names, 1)
        raise UserError(
            f"no command {command!r} prints JSON",
            evidence=f"these do: {', '.join(names)}",
            fix=f"windlass schema output {near[0]}" if near else "windlass schema output    has them all",
        )
    return schema_of(chosen)


def _print_keys(listed: list[Any], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"key": key.path, "type": key.kind, "default": key.default, "required": key.required}
                | {"description": key.description}
                for key in listed
            ]
        )
        return
    out = console()
    for key in listed:
        default = "required" if key.required else json.dumps(key.default)
        out.print(Text.assemble((key.path, "bold"), f"  {key.kind}  ({default})"))
        out.print(Text(f"    {key.description}"))
