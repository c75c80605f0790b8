"""Build an image, prove it, and where it fails try again with one more change, shown and never silent."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from windlass.errors import ExitCode, UserError
from windlass.image.build.builders import Builder, BuildRequest, Surroundings
from windlass.image.build.context import Context
from windlass.image.build.logs import obstacle_in, why_failed
from windlass.image.build.process import Outcome, Step, step_of, stream
from windlass.image.build.records import Commit, ImageRecord, Records, commit_of, content_digest, tag_for
from windlass.image.build.remedies import propose
from windlass.image.build.testing import Proof, Report, prove_image
from windlass.image.read.dockerfile import parse_dockerfile
from windlass.image.read.texts import Fix, Texts


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
            context = Path(folder) / "context"
            context.mkdir()
            dockerfile = Path(folder) / "Dockerfile"
            dockerfile.write_text(job.source.recipe)
            job.source.stage(context)
            command = self.builder.build(job.request(context, dockerfile))
            return stream(command, lambda line: show_step(line, watcher), log=log)


def show_step(line: str, watcher: Watcher) -> None:
    """The other lines of a log are not shown."""
    if step := step_of(line):
        watcher.step(step)


OCI = "org.opencontainers.image"
CONTENT = "dev.windlass.content"
OURS = ".windlass"  # Dockerfile.windlass: what a fixed file is called beside the user's own


@dataclass(frozen=True)
class Source:
    """What is built: the texts that fixes may change, and the folder that they stand in."""

    title: str
    """Repository of the image: `localhost/train`, or one of a registry."""
    texts: Texts
    context: Context
    platform: str
    dockerfile: Path | None = None
    """The user's own. None: the Dockerfile was planned."""
    planned: Mapping[str, str] = field(default_factory=dict)
    """Further files that a plan adds to the context."""
    trees: Mapping[str, Context] = field(default_factory=dict)
    """Further folders that it adds, and where they are in the context."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None

    @property
    def recipe(self) -> str:
        return self.texts.dockerfile or ""

    @property
    def files(self) -> dict[str, str]:
        """Files of the context that are not as they are on disk."""
        on_disk = self.context.texts()
        changed = {name: text for name, text in self.texts.files.items() if on_disk.get(name) != text}
        return {**self.planned, **changed}

    @property
    def content(self) -> str:
        parts = [
            self.context.digest(self.files),
            *(f"{at}\0{tree.digest()}" for at, tree in sorted(self.trees.items())),
        ]
        return content_digest(self.recipe, "\n".join(parts), self.platform, self.arguments, self.target)

    def stage(self, folder: Path) -> None:
        """The context as the builder sees it: links to the user's files, and what was changed or added."""
        self.context.stage(folder, self.files)
        for at, tree in self.trees.items():
            tree.stage(folder / at)

    def with_fix(self, fix: Fix) -> Source:
        return replace(self, texts=fix.apply(self.texts))


@dataclass(frozen=True)
class Settings:
    """How a build is done."""

    attempts: int = 3
    auto_fix: bool = False
    proof: Proof | None = None
    """None: the image is not proven."""
    around: Surroundings = field(default_factory=Surroundings)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Files that a RUN may read by --mount=type=secret, and no layer keeps."""
    cache: str | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Job:
    """One attempt, as a workshop gets it."""

    source: Source
    image: str
    tag: str
    labels: Mapping[str, str]
    settings: Settings
    folder: Path
    number: int

    def request(self, context: Path, dockerfile: Path) -> BuildRequest:
        """For a builder that finds the two files there."""
        return BuildRequest(
            context=context,
            dockerfile=dockerfile,
            tag=self.image,
            platform=self.source.platform,
            labels=self.labels,
            arguments=self.source.arguments,
            target=self.source.target,
            cache=self.settings.cache,
            fresh=self.settings.fresh,
            secrets=self.settings.secrets,
        )


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


class Watcher(Protocol):
    """Who is told how a build goes."""

    def attempt(self, number: int, most: int, tag: str) -> None: ...

    def step(self, step: Step) -> None: ...

    def failed(self, sentence: str, lines: tuple[str, ...]) -> None: ...

    def changed(self, fix: Fix, diff: str) -> None: ...

    def proving(self, level: str) -> None: ...


class Workshop(Protocol):
    """Where images are made: this machine, or AWS."""

    name: str

    def make(self, job: Job, watcher: Watcher) -> Made | Failed: ...


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
            if result.report:
                record = records.add_proof(record, result.report.as_dict())
            else:
                records.save(record)
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
        return UserError(
            f"the image cannot be built: {obstacle.what}",
            evidence=f"{obstacle.evidence}\n{kept}",
            cause=obstacle.cause,
            fix=obstacle.fix,
            exit_code=ExitCode.FAILED,
        )
    advice = None if settings.auto_fix else "windlass image build --auto-fix    tries again with a change, and shows it"
    return UserError(
        f"the image does not build: {failure.sentence} (attempt {attempts} of {settings.attempts})",
        evidence="\n".join([*failure.lines, kept]),
        cause="\n".join(f"tried: {fix.sentence}" for fix in applied) or None,
        fix=obstacle.fix if obstacle else advice,
        exit_code=ExitCode.FAILED,
    )
