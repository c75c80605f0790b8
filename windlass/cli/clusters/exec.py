"""`windlass exec`: a command beside a rank."""

from __future__ import annotations

import click

from windlass.api.lookup import find
from windlass.cli.jobs import on_option


@click.command(
    "exec",
    short_help="Run a command where a rank runs.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@on_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="NAME [RANK] -- COMMAND...", required=True)
def exec_command(words: tuple[str, ...], place: str | None) -> int:
    """Run a command where a rank runs.

    In its pod, with this terminal or this input; rank 0 by default. The exit code is the command's:
    `windlass exec my 3 -- nvidia-smi`.
    """
    from windlass.errors import UserError
    from windlass.targets.protocol import RunsInPods

    name, rank, command = _split(words)
    target, job = find(name, place)
    if not isinstance(target, RunsInPods):
        raise UserError(f"{name} is on the target {job.target}, where commands are run without windlass")
    return target.exec(job, rank, command)


def _split(words: tuple[str, ...]) -> tuple[str, int, list[str]]:
    from windlass.errors import UserError

    name, rest = words[0], list(words[1:])
    rank = 0
    if rest and rest[0].isdecimal():
        rank = int(rest.pop(0))
    if rest and rest[0] == "--":
        rest.pop(0)
    if not rest:
        raise UserError("it is not said which command", fix=f"windlass exec {name} {rank} -- nvidia-smi")
    return name, rank, rest
