"""How a build looks while it goes on."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from windlass.cli.image.watching import Bar, Lines
from windlass.image.build.process import Step
from windlass.image.read.texts import Fix

FIX = Fix("x", "git is missing: install it", ("git: not found",), "FROM b\n")


def follow(watcher):
    watcher.attempt(1, 3, "files-1")
    watcher.step(Step(2, 4, "RUN pip install torch"))
    watcher.failed("a program is missing", ("git: not found",))
    watcher.changed(FIX, "-a\n+b\n")
    watcher.proving("quick")


def test_lines_show_attempts_steps_failures_and_every_change(capsys):
    follow(Lines())
    assert capsys.readouterr().err.splitlines() == [
        "attempt 1 of 3: files-1",
        "  step 2/4: RUN pip install torch",
        "failed: a program is missing",
        "  | git: not found",
        "change: git is missing: install it",
        "  -a",
        "  +b",
        "  testing inside the image: quick",
    ]


def test_on_a_terminal_a_bar_counts_the_steps_and_changes_stay_above_it():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Progress(TextColumn("{task.description}"), MofNCompleteColumn(), console=console) as progress:
        watcher = Bar(progress)
        follow(watcher)
        (task,) = progress.tasks
        assert (task.completed, task.total) == (1, 5)  # the proof is the fifth
        assert "testing inside the image: quick" in task.description
    assert "change: git is missing: install it" in screen.getvalue()
