"""`windlass agent`: an MCP server on stdin and stdout, and skills for coding agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from windlass.cli.jobs import json_option
from windlass.cli.output import print_json
from windlass.common.files import write_atomically
from windlass.errors import UserError


@click.group(short_help="Coding agents: an MCP server, skills.")
def agent() -> None:
    """Coding agents: an MCP server, skills."""


@agent.command()
def mcp() -> None:
    """Serve windlass to a coding agent: MCP on stdin and stdout.

    Reading tools are free. A tool that spends money, loses work or deletes needs the id of a plan, which says what will
    happen. Runs are those of the working directory. For Claude Code: claude mcp add windlass -- windlass agent mcp
    """
    from windlass.agent.server import make_server

    make_server().run("stdio")


@agent.command()
@click.option(
    "--for",
    "agents",
    multiple=True,
    type=click.Choice(["claude", "opencode", "agents"]),
    help="Which agent; may be given several times. `agents` is the folder .agents that several read. Default: claude.",
)
@click.option("--to", "project", type=click.Path(file_okay=False, path_type=Path), default=".", show_default=True)
@click.option("--mcp", "with_server", is_flag=True, help="Also name the MCP server in .mcp.json or opencode.json.")
@json_option
def install(agents: tuple[str, ...], project: Path, with_server: bool, as_json: bool) -> None:
    """Write skills and slash commands for coding agents into a project.

    They are made from the help and the schemas of the installed windlass; install them again after an update.
    """
    from windlass.agent.skills import files_for, mcp_configuration

    written: list[str] = []
    for name in dict.fromkeys(agents or ("claude",)):
        for path, text in files_for(name).items():
            (project / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(project / path, text)
            written.append(str(path))
        if with_server:
            path, entry = mcp_configuration(name)
            _merge_json(project / path, entry)
            written.append(str(path))
    if as_json:
        print_json({"project": str(project), "files": written})
    else:
        click.echo("\n".join(written))


def _merge_json(path: Path, entry: dict[str, dict[str, Any]]) -> None:
    """Put the entry of windlass into a configuration; what else is in it stays."""
    try:
        values = json.loads(path.read_text()) if path.exists() else {}
        for section, servers in entry.items():
            values.setdefault(section, {}).update(servers)
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is no JSON object that an entry could be put into",
            evidence=str(error),
            fix=f"mend it, or mv {path} {path}.old    and this again",
        ) from None
    write_atomically(path, json.dumps(values, indent=2) + "\n")
