"""The tools that build, run and push images: docker buildx, podman, buildah; and which of them this machine has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from windlass.errors import UserError
from windlass.image.build.job import Job, Surroundings
from windlass.image.build.process import Outcome, capture, last_lines

IN_THE_CLOUD = "codebuild"


class Builder:
    """What podman and buildah share; docker has words of its own. Commands are made here, to print or to run."""

    name: str
    alive: Sequence[str] = ("info",)  # a command that fails where the tool cannot work
    inspect: Sequence[str] = ("image", "inspect", "--format", "{{.Id}}")
    gpu_options: Sequence[str] = ("--device", "nvidia.com/gpu=all")
    # Collectives of one machine need no network of their own, and not every machine can make one.
    run_options: Sequence[str] = ("--network", "host", "--pull", "never")

    def why_not(self) -> str | None:
        """Why it cannot be used here; None where it can."""
        if not shutil.which(self.name):
            return "not installed"
        answer = capture([self.name, *self.alive], timeout=60)
        return None if answer.succeeded else last_lines(answer.stderr, 1).strip() or f"{self.name} does not answer"

    def build(self, job: Job, context: Path, dockerfile: Path) -> list[str]:
        """For a builder that finds the two there."""
        kept = job.settings.cache
        cache = ["--cache-from", kept, "--cache-to", kept] if kept else []
        return [self.name, "build", "--layers", "--format", "oci", *_build_options(job, context, dockerfile, cache)]

    def run(self, image: str, command: Sequence[str], around: Surroundings, text_in: str) -> Outcome:
        """Run a command inside an image, with `text_in` on its stdin."""
        return capture(self.run_command(image, command, around), text_in=text_in)

    def run_command(self, image: str, command: Sequence[str], around: Surroundings) -> list[str]:
        # The default of 64 MB of shared memory ends data loaders and collectives with a bus error.
        options = ["--rm", "--interactive", "--shm-size", "1g", *self.run_options, *_run_options(around)]
        options += self.gpu_options if around.gpus else ()
        program, *arguments = command
        return [self.name, "run", *options, "--entrypoint", program, image, *arguments]

    def push(
        self, image: str, destination: str, digest_file: Path, authentication: str | None, *, plain_http: bool = False
    ) -> list[list[str]]:
        """The commands, one after the other.

        `authentication`: a file (docker: a folder) with the credentials. None: those that the tool has itself.
        """
        command = [self.name, "push", "--format", "oci", "--digestfile", str(digest_file)]
        command += ["--authfile", authentication] if authentication else []
        command += ["--tls-verify=false"] if plain_http else []
        return [[*command, image, f"docker://{destination}"]]

    def pull(self, image: str, *, plain_http: bool) -> list[str]:
        return [self.name, "pull", "--quiet", *(["--tls-verify=false"] if plain_http else []), image]

    def image_id(self, image: str) -> str | None:
        """Of an image of this machine, without sha256:; None where there is none."""
        answer = capture([self.name, *self.inspect, image])
        return answer.stdout.strip().removeprefix("sha256:") if answer.succeeded else None


class Podman(Builder):
    """podman: no daemon, and images shared with buildah."""

    name = "podman"


class Buildah(Builder):
    """buildah: builds without a daemon, in CI and inside containers too."""

    name = "buildah"
    inspect = ("inspect", "--type", "image", "--format", "{{.FromImageID}}")

    def run(self, image: str, command: Sequence[str], around: Surroundings, text_in: str) -> Outcome:
        """buildah runs commands in a working container, which is made and removed here."""
        if around.gpus:
            raise UserError("buildah gives a container no GPUs", fix="--builder podman    or --builder docker")
        made = capture(["buildah", "from", "--pull-never", image])
        if not made.succeeded:
            return made
        container = made.stdout.strip()
        try:
            return super().run(container, command, around, text_in)
        finally:
            capture(["buildah", "rm", container])

    def run_command(self, image: str, command: Sequence[str], around: Surroundings) -> list[str]:
        # The name of its own that buildah gives a container is in no hosts file, and launchers look their own name up.
        options = ["--network", "host", "--hostname", "localhost", *_run_options(around)]
        return ["buildah", "run", *options, "--", image, *command]


class Docker(Builder):
    """Docker with BuildKit: `docker buildx build`, or what docker before 23 has of it without a plugin."""

    name = "docker"
    alive = ("version", "--format", "{{.Server.Version}}")
    gpu_options = ("--gpus", "all")
    run_options = ()

    buildx = True

    def why_not(self) -> str | None:
        reason = super().why_not()
        if reason is None and not capture(["docker", "buildx", "version"], timeout=20).succeeded:
            version = capture(["docker", "version", "--format", "{{.Client.Version}}"], timeout=60).stdout
            self.buildx = int(re.match(r"\d*", version)[0] or 99) >= 23  # type: ignore[index]
            return "the buildx plugin is not installed" if self.buildx else None
        return reason

    def build(self, job: Job, context: Path, dockerfile: Path) -> list[str]:
        kept = job.settings.cache
        if self.buildx:
            command = ["docker", "buildx", "build", "--progress=plain", "--load", "--provenance=false"]
            registry = f"type=registry,ref={kept}"
            cache = ["--cache-from", registry, "--cache-to", f"{registry},mode=max"] if kept else []
        else:
            command = ["env", "DOCKER_BUILDKIT=1", "docker", "build", "--progress=plain"]
            cache = ["--cache-from", kept] if kept else []
        return [*command, *_build_options(job, context, dockerfile, cache)]

    def push(
        self, image: str, destination: str, digest_file: Path, authentication: str | None, *, plain_http: bool = False
    ) -> list[list[str]]:
        docker = [*(["env", f"DOCKER_CONFIG={authentication}"] if authentication else []), "docker"]
        return [[*docker, "tag", image, destination], [*docker, "push", destination]]

    def pull(self, image: str, *, plain_http: bool) -> list[str]:
        return ["docker", "pull", "--quiet", image]


BUILDERS: tuple[type[Builder], ...] = (Docker, Podman, Buildah)  # in the order in which they are tried
KINDS = tuple(builder.name for builder in BUILDERS)


def find_builder(name: str | None = None) -> Builder:
    """The named builder, or the first that works here; an error says why each does not."""
    reasons: list[str] = []
    for builder in (kind() for kind in BUILDERS if name in (None, kind.name)):
        reason = builder.why_not()
        if reason is None:
            return builder
        reasons.append(f"{builder.name:<9} {reason}")
    raise UserError(
        f"{name} cannot be used here" if name else "there is no builder on this machine",
        evidence="\n".join(reasons),
        cause=None if name else "an image is built by docker buildx, podman or buildah, or by AWS CodeBuild",
        fix="apt-get install buildah\nwindlass image build --builder codebuild    builds in AWS",
    )


def _build_options(job: Job, context: Path, dockerfile: Path, cache: Sequence[str]) -> list[str]:
    source, settings = job.source, job.settings
    options = ["--platform", source.platform, "--tag", job.image, "--file", str(dockerfile)]
    options += _each("--label", job.labels) + _each("--build-arg", source.arguments)
    options += ["--target", source.target] if source.target else []
    options += cache
    for name, file in sorted(settings.secrets.items()):
        options += ["--secret", f"id={name},src={file}"]
    options += ["--no-cache", "--pull"] if settings.fresh else []
    return [*options, str(context)]


def _run_options(around: Surroundings) -> list[str]:
    volumes = [part for source, target in around.mounts for part in ("--volume", f"{source}:{target}:ro")]
    return [*volumes, *_each("--env", around.environment)]


def _each(flag: str, values: Mapping[str, str]) -> list[str]:
    """--label a=b --label c=d, in the order of their names."""
    return [part for name, value in sorted(values.items()) for part in (flag, f"{name}={value}")]
