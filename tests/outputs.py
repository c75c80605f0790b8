"""Validate what commands print with `--json` against the published schemas, with unknown keys forbidden."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import click
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from windlass.api.schemas.outputs import OUTPUTS, Output, schema_of
from windlass.cli import output
from windlass.cli.main import cli


class WrongOutputError(BaseException):
    """Not an Exception: the command line reports those as its own errors, and goes on."""


def check_value(value: Any, outputs: Sequence[Output], where: str) -> None:
    """Raise where a value is none of these outputs."""
    if not outputs:
        raise WrongOutputError(f"{where} printed JSON, and windlass.api.schemas does not know it")
    validator = validator_of(tuple(one.name for one in outputs))
    problem = best_match(validator.iter_errors(value))
    if problem is not None:
        names = ", ".join(one.name for one in outputs)
        told = "\n".join(f"{'.'.join(map(str, one.path))}: {one.message[:500]}" for one in problem.context or [problem])
        raise WrongOutputError(f"{where} printed what is not in its schema ({names}):\n{told[:4000]}")


@cache
def validator_of(names: tuple[str, ...]) -> Draft202012Validator:
    schema = schema_of(one for one in OUTPUTS if one.name in names)
    return Draft202012Validator({**schema, "$defs": {name: closed(one) for name, one in schema["$defs"].items()}})


def closed(schema: Any) -> Any:
    """The schema with keys that it does not name forbidden; where it says what others hold, that stays."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def outputs_of(command: str, arguments: Sequence[str], stream: str = "stdout") -> list[Output]:
    """What a command may print with these arguments: the outputs that name most of its options."""
    given = {word.partition("=")[0] for word in arguments}
    given |= {"--follow"} if "-f" in given else set()
    fitting = [one for one in OUTPUTS if one.command == command and one.stream == stream and one.options <= given]
    most = max((len(one.options) for one in fitting), default=0)
    return [one for one in fitting if len(one.options) == most]


def error_output() -> list[Output]:
    return [one for one in OUTPUTS if one.command == "error"]


def command_in(arguments: Sequence[str]) -> str | None:
    """`ckpt ls` of `ckpt ls small --json`."""
    words: list[str] = []
    place: click.Command = cli
    context = click.Context(cli)
    for word in arguments:
        if not isinstance(place, click.Group):
            break
        found = place.get_command(context, word)
        if found is None:
            return None
        words.append(word)
        place = found
    return " ".join(words) if words and not isinstance(place, click.Group) else None


def check_printed(arguments: Sequence[str], out: str, err: str = "") -> None:
    """Check both streams of a command that was typed with --json and has ended."""
    command = command_in(arguments)
    if command is None or not out.strip():
        return
    outputs = [*outputs_of(command, arguments), *error_output()]
    where = f"windlass {' '.join(arguments)}"
    try:
        values = [json.loads(out)]
    except ValueError:
        if not outputs[0].each_line:
            raise WrongOutputError(f"{where} printed what is no JSON:\n{out[:2000]}") from None
        values = [json.loads(line) for line in out.splitlines()]
    for value in values:
        check_value(value, outputs, where)
    progress = outputs_of(command, arguments, "stderr")
    for line in err.splitlines() if progress else ():
        if line.startswith("{"):
            check_value(json.loads(line), progress, where)


def watch_this_process() -> None:
    """Check everything that commands print in the process of the tests."""
    write = output.write_json

    def checked(value: Any, *, indent: int | None = None, stderr: bool = False) -> None:
        context = click.get_current_context(silent=True)
        parsed = json.loads(json.dumps(value, default=str))
        if context is not None:
            command = _command_of(context)
            outputs = outputs_of(command, _options_of(context), "stderr" if stderr else "stdout")
            check_value(parsed, outputs, f"windlass {command}")
        elif not stderr:  # errors are shown when the command has ended
            check_value(parsed, error_output(), "windlass")
        write(value, indent=indent, stderr=stderr)

    output.write_json = checked  # type: ignore[assignment]


def _command_of(context: click.Context) -> str:
    words: list[str] = []
    place: click.Context | None = context
    while place is not None and place.command is not cli:
        words.insert(0, str(place.info_name))
        place = place.parent
    return " ".join(words)


def _options_of(context: click.Context) -> list[str]:
    given = (one for one in context.command.params if context.params.get(one.name or ""))
    return [option for one in given for option in one.opts if isinstance(one, click.Option)]


def watch_processes() -> None:
    """Check what `subprocess.run` gets from a command that a test starts with --json."""
    run: Callable[..., Any] = subprocess.run

    def checked(command: Any, *others: Any, **options: Any) -> Any:
        done = run(command, *others, **options)
        arguments = windlass_arguments(command)
        if arguments and "--json" in arguments and isinstance(done.stdout, str):
            check_printed(arguments, done.stdout, done.stderr if isinstance(done.stderr, str) else "")
        return done

    subprocess.run = checked  # type: ignore[assignment]


def windlass_arguments(command: Any) -> list[str]:
    """What follows the program in an argument list that starts windlass; nothing for any other."""
    if isinstance(command, str | bytes | os.PathLike):
        return []
    words = [os.fspath(word) for word in command]
    for index, word in enumerate(words):
        if word == "windlass.cli.main" or os.path.basename(word) == "windlass":
            return words[index + 1 :]
    return []
