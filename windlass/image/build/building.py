"""Build an image, prove it, and where it fails try again with one more change, shown and never silent."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.errors import ExitCode, UserError
from windlass.image.build.builders import Builder
from windlass.image.build.job import Job, Settings, Source
from windlass.image.build.logs import obstacle_in, stopped, why_failed
from windlass.image.build.process import Outcome, Step, step_of, stream
from windlass.image.build.records import Commit, ImageRecord, Records, commit_of, tag_for
from windlass.image.build.remedies import propose
from windlass.image.build.testing import Report, prove_image
from windlass.image.read.dockerfile import parse_dockerfile
from windlass.image.read.texts import Fix

OCI = "org.opencontainers.image"
CONTENT = "dev.windlass.content"
OURS = ".windlass"  # Dockerfile.windlass: what a fixed file is called beside the user's own


@dataclass(frozen=True)
class Made:
    """An attempt that came to its end, the proof included."""

    id: str
    report: Report | None = None
    pushed: str | None = None


@dataclass(frozen=True)
class Failed:
    """An attempt that did not, and where its whole log is kept."""

    log: str
    kept: Path


class Watcher:
    """Gets to know how a build goes, and makes lines of it. This one shows none: for programs, the result says all."""

    def show(self, line: str) -> None:
        pass

    def attempt(self, number: int, most: int, tag: str) -> None:
        self.show(f"attempt {number} of {most}: {tag}")

    def line(self, line: str) -> None:
        """A line of the builder's log: of these only the steps are shown."""
        if step := step_of(line):
            self.step(step)

    def step(self, step: Step) -> None:
        self.show(f"  {step}"[:160])

    def failed(self, sentence: str, lines: tuple[str, ...]) -> None:
        self.show(f"failed: {sentence}")
        for line in lines:
            self.show(f"  | {line}")

    def changed(self, fix: Fix, diff: str) -> None:
        self.show(f"change: {fix.sentence}")
        for line in diff.rstrip().splitlines():
            self.show(f"  {line}")

    def proving(self, level: str) -> None:
        self.show(f"  testing inside the image: {level}")


class Workshop(Protocol):
    """Where images are made: this machine, or AWS."""

    name: str

    def make(self, job: Job, watcher: Watcher) -> Made | Failed: ...


class LocalWorkshop:
    """docker buildx, podman or buildah."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.name = builder.name

    def make(self, job: Job, watcher: Watcher) -> Made | Failed:
        log = job.folder / f"attempt-{job.number}.log"
        outcome = self._build(job, log, watcher)
        if not outcome.succeeded:
            return Failed(outcome.stdout, log)
        id = self.builder.image_id(job.image)
        if id is None:
            raise UserError(f"{self.name} built {job.image} and does not find it")
        report = None
        if job.settings.proof:
            watcher.proving(job.settings.proof.level)
            report = prove_image(self.builder, job.image, job.settings.proof, job.settings.around)
            if not report.passed:
                kept = job.folder / f"proof-{job.number}.log"
                kept.write_text(report.log)
                return Failed(report.log, kept)
        return Made(id, report)

    def _build(self, job: Job, log: Path, watcher: Watcher) -> Outcome:
        """The builder sees a staged copy: links to the user's files, and the changed ones in their place."""
        with tempfile.TemporaryDirectory(prefix="windlass-build-", ignore_cleanup_errors=True) as folder:
            context, dockerfile = Path(folder) / "context", Path(folder) / "Dockerfile"
            context.mkdir()
            job.source.stage(context)
            dockerfile.write_text(job.source.recipe)
            return stream(self.builder.build(job, context, dockerfile), watcher.line, log=log)


@dataclass(frozen=True)
class Built:
    """An image, and how it came about."""

    record: ImageRecord
    report: Report | None
    folder: Path
    written: tuple[Path, ...]
    """The changed files that stand beside the user's own."""


def build_image(
    source: Source,
    workshop: Workshop,
    records: Records,
    settings: Settings,
    watcher: Watcher,
    fixes: tuple[Fix, ...] = (),
) -> Built:
    """`fixes`: changes that were made before the first attempt, for conflicts that were seen in the texts."""
    applied = list(fixes)
    commit = commit_of(source.context.folder)
    written = write_beside(source) if applied else ()
    for number in range(1, settings.attempts + 1):
        tag = tag_for(commit, source.content)
        watcher.attempt(number, settings.attempts, tag)
        folder = records.place(tag)
        (folder / "Dockerfile").write_text(source.recipe)
        job = Job(source, f"{source.title}:{tag}", tag, labels_of(source, tag, commit), settings, folder, number)
        result = workshop.make(job, watcher)
        if isinstance(result, Made):
            record = ImageRecord(
                title=source.title,
                tag=tag,
                image=job.image,
                id=result.id,
                platform=source.platform,
                content=source.content,
                builder=workshop.name,
                revision=commit.revision if commit else None,
                attempts=number,
                fixes=[{"id": fix.id, "sentence": fix.sentence} for fix in applied],
                pushed=result.pushed,
            )
            records.save(record)
            if result.report:
                record = records.add_proof(record, result.report.as_dict())
            return Built(record, result.report, folder, written)
        failure = why_failed(result.log)
        watcher.failed(failure.sentence, tuple(failure.lines))
        fix = None
        if settings.auto_fix and number < settings.attempts:
            fix = propose(source.recipe, result.log, {fix.id for fix in applied})
        if fix is None:
            raise _given_up(result, number, settings, applied)
        watcher.changed(fix, fix.diff(source.recipe, source.texts.files))
        applied.append(fix)
        source = source.with_fix(fix)
        written = write_beside(source)
    raise AssertionError("the last attempt either succeeds or raises")


def labels_of(source: Source, tag: str, commit: Commit | None) -> dict[str, str]:
    """OCI's keys where it has one. No time of day: the same files shall make the same labels."""
    labels = {f"{OCI}.title": source.title.rpartition("/")[2], f"{OCI}.version": tag, CONTENT: source.content}
    stages = parse_dockerfile(source.recipe).chain()
    if stages:
        labels[f"{OCI}.base.name"] = stages[0].image
    if commit:
        labels[f"{OCI}.revision"] = commit.revision + ("-dirty" if commit.changed else "")
        if commit.source:
            labels[f"{OCI}.source"] = commit.source
    return labels


def write_beside(source: Source) -> tuple[Path, ...]:
    """The texts as they are built, beside the user's own and never over them: Dockerfile.windlass, say."""
    home = source.dockerfile or source.context.folder / "Dockerfile"
    places: dict[Path, str] = {}
    if source.dockerfile is None or source.dockerfile.read_text() != source.recipe:
        places[home.with_name(home.name + OURS)] = source.recipe
    for name, text in source.files.items():
        if name not in source.planned:
            places[source.context.folder / (name + OURS)] = text
    for path, text in places.items():
        path.write_text(text)
    return tuple(places)


def _given_up(failed: Failed, attempts: int, settings: Settings, applied: list[Fix]) -> UserError:
    """What stands in the way of the machine is said first: no change of a Dockerfile removes it."""
    failure = why_failed(failed.log)
    obstacle = obstacle_in(failed.log)
    kept = f"the whole log is in {failed.kept}"
    if obstacle and (failure.id == "unknown" or obstacle.what == "the disk is full"):
        return stopped("the image cannot be built", failed.log, f"{obstacle.evidence}\n{kept}")
    advice = None if settings.auto_fix else "windlass image build --auto-fix    tries again with a change, and shows it"
    return UserError(
        f"the image does not build: {failure.sentence} (attempt {attempts} of {settings.attempts})",
        evidence="\n".join([*failure.lines, kept]),
        cause="\n".join(f"tried: {fix.sentence}" for fix in applied) or None,
        fix=obstacle.fix if obstacle else advice,
        exit_code=ExitCode.FAILED,
    )
