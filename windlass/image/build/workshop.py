"""Make images on this machine, with the builder that it has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from windlass.errors import UserError
from windlass.image.build.builders.protocol import Builder
from windlass.image.build.building import Failed, Job, Made, Watcher
from windlass.image.build.process import Outcome, capture, stream
from windlass.image.build.progress import step_of
from windlass.image.build.testing import prove_image


class LocalWorkshop:
    """docker buildx, podman or buildah."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.name = builder.name

    def make(self, job: Job, watcher: Watcher) -> Made | Failed:
        log = job.folder / f"attempt-{job.number}.log"
        outcome = self._build(job, log, watcher)
        if not outcome.succeeded:
            return Failed(outcome.output, log)
        id = self._id(job.image)
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

        def heard(line: str) -> None:
            step = step_of(line)
            if step:
                watcher.step(step)
            else:
                watcher.line(line)

        with tempfile.TemporaryDirectory(prefix="windlass-build-", ignore_cleanup_errors=True) as folder:
            context = Path(folder) / "context"
            context.mkdir()
            dockerfile = Path(folder) / "Dockerfile"
            dockerfile.write_text(job.source.recipe)
            request = job.request(job.source.stage(context), dockerfile)
            return stream(self.builder.build(request), heard, log=log)

    def _id(self, image: str) -> str:
        code, out, error = capture(self.builder.image_id(image))
        if code != 0:
            raise UserError(f"{self.name} built {image} and does not find it", evidence=error.strip()[-300:])
        return out.strip().removeprefix("sha256:")
