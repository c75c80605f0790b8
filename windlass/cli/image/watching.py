"""How a build looks while it goes on: a bar on a terminal, plain lines elsewhere; and what a dry run shows."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windlass.image.build.building import Watcher

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from windlass.image.build.building import Workshop
    from windlass.image.build.job import Settings, Source
    from windlass.image.build.process import Step


class Lines(Watcher):
    """One line for every step, on stderr."""

    def show(self, line: str) -> None:
        click.echo(line, err=True)


class Bar(Watcher):
    """A bar that counts the steps of the Dockerfile; attempts and changes stay above it."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID = progress.add_task("building", total=None)

    def step(self, step: Step) -> None:
        total = None if step.total is None else step.total + 1  # the proof is a step too
        self.progress.update(self.task, completed=step.number - 1, total=total, description=step.text[:60])

    def proving(self, level: str) -> None:
        self.progress.update(self.task, description=f"testing inside the image: {level}")

    def show(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False)


@contextmanager
def watching(*, as_json: bool) -> Iterator[Watcher]:
    from windlass.cli.output import console, has_styles

    if as_json:
        yield Watcher()
    elif not sys.stderr.isatty() or not has_styles(stderr=True):
        yield Lines()
    else:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        title = TextColumn("{task.description}", markup=False)
        columns = (title, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as progress:
            yield Bar(progress)


def command_of(source: Source, workshop: Workshop, settings: Settings) -> dict[str, Any]:
    """The command line of a local builder, or the request to CodeBuild."""
    from windlass.image.aws.codebuild import CloudWorkshop, results
    from windlass.image.build.building import LocalWorkshop, labels_of
    from windlass.image.build.job import Job
    from windlass.image.build.records import commit_of, tag_for

    commit = commit_of(source.context.folder)
    tag = tag_for(commit, source.content)
    job = Job(source, f"{source.title}:{tag}", tag, labels_of(source, tag, commit), settings, Path(), 1)
    if isinstance(workshop, CloudWorkshop):
        return {"tag": tag, "request": workshop.request(job, f"{results(tag)}/context.zip")}
    assert isinstance(workshop, LocalWorkshop)
    dockerfile = source.dockerfile or source.context.folder / "Dockerfile"
    return {"tag": tag, "command": shlex.join(workshop.builder.build(job, source.context.folder, dockerfile))}
