"""`windlass report`: a run as one HTML file to send."""

from __future__ import annotations

from pathlib import Path

import click

from windlass.cli.jobs import json_option, run_names
from windlass.cli.output import print_json
from windlass.cli.views.ui import sources
from windlass.common.files import write_output
from windlass.runfolder import RunFolder
from windlass.ui.report import report as page_of


@click.command(short_help="Write a run as one page to send.")
@click.argument("name", shell_complete=run_names)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Default: NAME.html in this folder."
)
@json_option
def report(name: str, output: Path | None, as_json: bool) -> None:
    """Write a run as one page to send.

    Curves, time line, checkpoints, hardware, goodput, the run file and, of a run that failed, why: one HTML file that
    needs nothing else, without scripts. Tokens and passwords that a log or the run file holds are removed.
    """
    folder = RunFolder.find(name)
    path = output or Path(f"{folder.name}.html")
    content = page_of(folder, sources()).encode()
    write_output(path, content)
    if as_json:
        print_json({"path": str(path), "runs": [folder.name], "bytes": len(content)})
    else:
        click.echo(f"{path}: {folder.name}, {len(content) / 1024:.0f} KiB")
