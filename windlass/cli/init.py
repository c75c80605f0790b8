"""`windlass init`: a run file to start from, with every key explained."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windlass.cli.jobs import complete_preset
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.cli.reference import Key

WIDTH = 100


@click.command(short_help="Write a commented run file.")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--preset", shell_complete=complete_preset, help="Model preset; --list names them.")
@click.option("--data", "source", help="Data source: corpus:austen, a folder, a glob, hf:NAME.")
@click.option("--list", "list_presets", is_flag=True, help="List the model presets.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
def init(
    path: Path | None, preset: str | None, source: str | None, list_presets: bool, force: bool, as_json: bool
) -> None:
    """Write a commented run file.

    What is set stands plainly; every other key is a comment with its default and what it does.
    """
    from windlass.catalog.models import preset as find_preset

    if list_presets:
        _list_presets(as_json=as_json)
        return
    name = preset or "llama-tiny"
    tiny = find_preset(name).hub_id is None
    source = source or ("corpus:austen" if tiny else "hf:allenai/c4")
    path = path or Path(f"{name}.yaml")
    text = run_file_text({"model": {"preset": name}, "data": {"source": source}})
    if path.exists() and not force:
        raise UserError(f"{path} exists", fix=f"windlass init {path} --force    overwrites it")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", fix=f"mkdir -p {path.parent}")
    path.write_text(text, encoding="utf-8")
    if as_json:
        from windlass.cli.output import print_json

        print_json({"path": str(path), "preset": name, "data": source})
    else:
        click.echo(f"wrote {path}\n  windlass run {path} --dry-run    what it would do\n  windlass run {path}")


def run_file_text(values: dict[str, dict[str, Any]]) -> str:
    """A run file that sets `values` and shows everything else as comments."""
    from windlass.cli.reference import sections

    lines = ["# A run file: what to train. Every key that is commented out has the default shown.", ""]
    for section in sections():
        if section.name is None:
            for key in section.keys:
                lines += [*_comment(key.description, ""), f"# {key.name}: {_yaml(key.default)}", ""]
            continue
        given = values.get(section.name, {})
        lines += [*_comment(section.description, "")]
        lines.append(f"{section.name}:" if given else f"# {section.name}:")
        for key in section.keys:
            lines += _key_lines(key, given)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _key_lines(key: Key, given: dict[str, Any]) -> list[str]:
    if key.name in given:
        return [*_comment(key.description, "  "), f"  {key.name}: {_yaml(given[key.name])}"]
    mark = "  # " if given else "#   "
    return [
        *_comment(key.description, "  " if given else "", extra="" if given else "  "),
        f"{mark}{key.name}: {_yaml(key.default)}",
    ]


def _comment(text: str, indent: str, extra: str = "") -> list[str]:
    prefix = f"{indent}#{extra} "
    return textwrap.wrap(text, WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def _yaml(value: Any) -> str:
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).strip().removesuffix("...").strip()


def _list_presets(*, as_json: bool) -> None:
    from windlass.catalog.models import presets
    from windlass.cli.output import print_json, print_table

    found = presets().values()
    if as_json:
        print_json([{"name": one.name, "hub_id": one.hub_id, "parameters": one.num_parameters} for one in found])
        return
    rows = [[one.name, f"{one.num_parameters:,}" if one.num_parameters else "–", one.hub_id or "–"] for one in found]
    print_table(["PRESET", "PARAMETERS", "PUBLISHED AS"], rows)
