"""`windlass` as a process of its own, forked from a server that has imported it.

The start of Python and the imports are most of what a short command costs, and tests of schedulers give hundreds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forking import context
from tests.outputs import check_printed


def run_forked(
    arguments: Sequence[Any], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` says of this command; nothing comes from its standard input."""
    words = [str(word) for word in arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context.Process(target=be_command, args=(words, str(cwd), dict(env), str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["windlass", *words], timeout)
        printed, told = (path.read_text() if path.exists() else "" for path in (out, err))
        done = subprocess.CompletedProcess(["windlass", *words], process.exitcode, printed, told)
    if "--json" in words:
        check_printed(words, done.stdout, done.stderr)
    return done


def be_command(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    """In the forked process: everything that a program gets from whoever starts it."""
    from windlass.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):  # also where nohup, or a shell's `&`, lets tests ignore them
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    sys.argv = ["windlass", *words]
    main(words)
