"""Standard streams that cannot fail: any encoding, closed, full, or read by somebody who has left."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any

PLAINER = {"–": "-", "—": "-", "…": "...", "×": "x", "·": "-", "→": "->", "≥": ">=", "≤": "<=", "’": "'", "ï": "i"}
ERRORS = "windlass.plainer"


class OutputStream(io.FileIO):
    """A standard stream that takes note of an error and then swallows what is written, so that the command goes on.

    A pipe that nobody reads any more ends most commands, as it should; those that `go_on` are not ended by it.
    """

    def __init__(self, number: int, *, go_on: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.go_on = go_on
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.problem is not None:
            return size
        try:
            written = super().write(data)
            return size if written is None else written
        except OSError as error:
            if error.errno == errno.EPIPE and not self.go_on:
                raise BrokenPipeError from None  # without its number: click would exit with 1
            self.problem = error
            return size


def protect(*, go_on: bool) -> OutputStream:
    """Make this process's streams safe to use; returns stdout's, which knows whether all of it was written."""
    for number in (0, 1, 2):  # a closed one would be taken by the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    codecs.register_error(ERRORS, _plainer)
    output = OutputStream(1, go_on=go_on)
    sys.stdout = _text(output, sys.stdout)
    sys.stderr = _text(OutputStream(2, go_on=True), sys.stderr)
    return output


def _text(stream: OutputStream, before: Any) -> io.TextIOWrapper:
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(stream), encoding=encoding, errors=ERRORS, line_buffering=stream.isatty(), write_through=False
    )


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks, in characters that all have."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    plain = (PLAINER.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in text)
    return "".join(plain), error.end


def finish(output: OutputStream) -> OSError | None:
    """Write what is left; what was wrong with stdout, if anything was."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the reader, `head` say, has enough
            output.go_on, output.problem = True, output.problem or BrokenPipeError()
    problem = output.problem
    return None if isinstance(problem, BrokenPipeError) else problem
