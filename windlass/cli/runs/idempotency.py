"""`windlass run --idempotency-key`: a caller that lost the answer asks again, and nothing is started twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from windlass.errors import ExitCode

if TYPE_CHECKING:
    from windlass.runfolder import RunFolder

FILE = "idempotency-keys"
KEY = re.compile(r"[\x21-\x7e]{1,200}")


def checked_key(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not KEY.fullmatch(value):
        raise click.BadParameter("a key is 1 to 200 printable ASCII characters without blanks", context, parameter)
    return value


def remember(folder: RunFolder, key: str) -> None:
    """Keep the key of a start. After the start: one that was cut off before is made again, and finds its own job."""
    with (folder.path / FILE).open("a") as file:
        file.write(f"{key}\n")


def answer_again(key: str, run_file: str, changes: Sequence[str], *, as_json: bool) -> int | None:
    """Where the run stands that was started with this key; None if none was."""
    from windlass.api.lookup import find
    from windlass.api.schemas.model import printed
    from windlass.api.submission import result_of
    from windlass.cli.output import print_json
    from windlass.runfolder import RunFolder
    from windlass.spec import load_run

    folder = RunFolder.of(load_run(run_file, changes))
    keys = folder.path / FILE
    if not keys.is_file() or key not in keys.read_text().splitlines():
        return None
    target, job = find(folder.name)
    status = target.status(job)
    said = f"{folder.name} was started with this key before: nothing is started now"
    if as_json:
        print_json(printed(result_of(folder, status, [said])))
    else:
        click.echo(f"{said}; it is {status.state}")
    if not status.ended:
        return ExitCode.OK
    return int(ExitCode.FAILED if status.exit_code is None else status.exit_code)
