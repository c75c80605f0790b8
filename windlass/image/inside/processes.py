"""Processes inside the image: their output, how they ended, and a child of this package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

START = (
    "import sys, importlib; sys.path.insert(0, sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(sys.argv[3]))"
)


def ourselves(order: dict[str, Any]) -> list[str]:
    """The command of a child that does what `order` says, wherever this package has been put."""
    package = __package__ or ""
    root = os.path.abspath(__file__)
    for _ in range(package.count(".") + 2):
        root = os.path.dirname(root)
    return [sys.executable, "-c", START, root, f"{package}.proof", json.dumps(order)]


def run_in(
    folder: str | None, command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> tuple[int, str]:
    """Exit code and output; after `seconds`, the command and all its children are ended."""
    process = subprocess.Popen(
        list(command),
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return 124, process.communicate()[0] + f"\nended after {seconds} s"
    return process.returncode, text


def ending(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}" if code != 124 else "no answer in time"


def last_lines(text: str, count: int = 4) -> str:
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])
