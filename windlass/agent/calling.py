"""Call a command as a program would: `windlass … --json` in a process of its own, its answer as the model it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import TypeAdapter

from windlass.api.schemas import Error
from windlass.errors import ExitCode, UserError

T = TypeVar("T")

LAST_LINES = 20


def call(
    model: type[T],
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
) -> T:
    """What a command prints with --json. `on_line` gets what it says on stderr: progress and warnings.

    A command that fails raises its own UserError. One that answers and exits with 1, such as a check that does not
    pass, has answered.
    """
    words = [str(argument) for argument in arguments]
    command = [sys.executable, "-m", "windlass.cli.main", *words, "--json"]
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # nothing can be asked here
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
        )
        timer = threading.Timer(timeout, process.terminate) if timeout else None
        if timer:
            timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            last_lines.append(line.rstrip())
            if on_line:
                on_line(line.rstrip())
        code = process.wait()
        if timer:
            timer.cancel()
        answer.seek(0)
        text = answer.read()
    try:
        value = json.loads(text)
    except ValueError:
        raise UserError(
            f"windlass {' '.join(words)} ended with code {code} and no answer",
            evidence="\n".join(last_lines) or None,
            fix="the same command in a shell    shows all that it prints",
            exit_code=ExitCode.FAILED,
        ) from None
    if isinstance(value, dict) and value.keys() == Error.model_fields.keys():
        raise UserError.from_dict(value)
    return TypeAdapter(model).validate_python(value)
