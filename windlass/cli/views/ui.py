"""`windlass ui`: all runs on a page of this machine, read-only."""

from __future__ import annotations

import functools
import secrets
import socket
from pathlib import Path
from typing import Any

import click

import windlass
from windlass.api.lookup import RowReader, elsewhere, place_of
from windlass.api.summary import evaluated_tasks, goodput_of, summarize
from windlass.cli.jobs import complete_target
from windlass.cli.output import print_json_line
from windlass.cli.runs.follow import describe_event
from windlass.common.files import read_json_lines
from windlass.diagnose import Facts, diagnose
from windlass.diagnose.bundle import facts_of_run
from windlass.diagnose.secrets import clean_text
from windlass.errors import UserError
from windlass.runfolder import RunFolder, runs_root
from windlass.ui.library import Library, Sources

PORT = 8737
NEXT_PORTS = 20  # tried where the usual one is taken


@click.command(short_help="Show the runs on a page in the browser.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"Default: {PORT}, or the next one that is free.")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Default: this machine only. Others need a token.")
@click.option("--token", metavar="TEXT", help="Who opens the page must know it. Default with --host: a new one.")
@click.option(
    "--on",
    "places",
    multiple=True,
    metavar="TARGET",
    shell_complete=complete_target,
    help="Also the runs that a cluster, kubernetes[:CONTEXT], knows itself. May be given several times.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser of this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout when the page can be opened.")
def ui(port: int | None, host: str, token: str | None, places: tuple[str, ...], opens: bool, as_json: bool) -> None:
    """Show the runs on a page in the browser.

    The page reads run folders and changes nothing; Ctrl-C ends it, and runs go on. It is served to this machine alone.
    With --host it is served to others who know the token; the connection is not encrypted.
    """
    for place in places:
        place_of(place)  # a target that does not exist is said now, not on the page
    try:
        import uvicorn

        from windlass.ui.security import is_loopback
        from windlass.ui.server import application
    except ModuleNotFoundError as error:
        raise UserError(
            f"the page needs {error.name}, which is not installed", fix="pip install 'windlass[ui]'"
        ) from None

    if not is_loopback(host):
        token = token or secrets.token_urlsafe(18)
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
    app = application(Library(runs_root(), sources(places)), host=host, token=token)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, lifespan="off"
    )
    if as_json:
        print_json_line({"url": address, "runs": str(runs_root()), "token": token})
    else:
        click.echo(f"{address}    the runs of {runs_root()}/; Ctrl-C ends the page, not the runs")
    if opens:
        click.launch(address)
    uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket on the wanted port; where none is wanted, on the usual one or the next that is free."""
    wanted = [port] if port is not None else range(PORT, PORT + NEXT_PORTS)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for number in wanted:
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            problem = error
    raise UserError(
        f"the page cannot be served at {host}, port {wanted[0]}", evidence=str(problem), fix="--port 0    any free one"
    )


def sources(places: tuple[str, ...] = ()) -> Sources:
    """What the other commands know about runs, for the page."""
    reader = RowReader()

    return Sources(
        row=reader.row,
        clusters={place: functools.partial(elsewhere, place, set()) for place in places},
        describe=describe_event,
        verdict=verdict_of,
        summary=lambda folder: summarize(folder).model_dump(),
        goodput=lambda folder: goodput_of(folder, under_way=False).goodput,
        evaluations=lambda folder: [task.model_dump() for task in evaluated_tasks(read_json_lines(folder.evaluations))],
    )


def verdict_of(folder: RunFolder, end: dict[str, Any] | None) -> dict[str, Any]:
    """What `windlass why` says, from what the run folder holds."""
    answer = diagnose(Facts.read(facts_of_run(folder, end))).as_dict()
    installed = f"{Path(windlass.__file__).parent.parent}/"  # where windlass lies on this machine says nothing
    for evidence in answer["evidence"]:
        evidence["line"] = clean_text(evidence["line"]).replace(installed, "")
    return answer
