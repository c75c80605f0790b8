"""`windlass schema`: the run file's schema, for editors and people."""

from __future__ import annotations

import json

import click


@click.command(short_help="Print the schema of the run file.")
@click.option("--keys", "list_keys", is_flag=True, help="List every key with its default and description instead.")
@click.option("--json", "as_json", is_flag=True, help="JSON; the schema always is.")
def schema(list_keys: bool, as_json: bool) -> None:
    """Print the schema of the run file.

    \b
    For an editor with a YAML language server, as the first line of a run file:
    # yaml-language-server: $schema=run.schema.json
    """
    from windlass.cli.output import console, print_json
    from windlass.cli.reference import keys, options_of_targets
    from windlass.spec import Run

    listed = [*keys(), *(key for options in options_of_targets() for key in options.keys)]
    if not list_keys:
        click.echo(json.dumps(Run.model_json_schema(), indent=2))
    elif as_json:
        print_json(
            [
                {"key": key.path, "type": key.kind, "default": key.default, "required": key.required}
                | {"description": key.description}
                for key in listed
            ]
        )
    else:
        from rich.text import Text

        out = console()
        for key in listed:
            default = "required" if key.required else json.dumps(key.default)
            out.print(Text.assemble((key.path, "bold"), f"  {key.kind}  ({default})"))
            out.print(Text(f"    {key.description}"))
