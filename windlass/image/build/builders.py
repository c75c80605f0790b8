"""The tools that build, run and push images: docker buildx, podman, buildah; and which of them this machine has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import UserError
from windlass.image.build.process import Outcome, capture, last_lines

IN_THE_CLOUD = "codebuild"


@dataclass(frozen=True)
class BuildRequest:
    """One build: everything that is on its command line."""

    context: Path
    dockerfile: Path
    tag: str
    platform: str
    labels: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    cache: str | None = None
    """Repository in a registry that keeps the layers of earlier builds. Default: those of this machine only."""
    fresh: bool = False
    """Without any cache."""
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Files that steps may mount by name; they are in no layer."""


@dataclass(frozen=True)
class Surroundings:
    """How a command is run inside an image."""

    python: str | None = None
    """Interpreter in the image. Default: python, else python3."""
    mounts: Sequence[tuple[str, str]] = ()
    """Folders of this machine, read-only, and where they are seen."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False

    def options(self) -> list[str]:
        volumes = [part for source, target in self.mounts for part in ("--volume", f"{source}:{target}:ro")]
        return [*volumes, *option_each("--env", self.environment)]


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

    def build(self, request: BuildRequest) -> list[str]:
        cache = ["--cache-from", request.cache, "--cache-to", request.cache] if request.cache else []
        return [self.name, "build", "--layers", "--format", "oci", *_build_options(request, cache)]

    def run(self, image: str, command: Sequence[str], around: Surroundings, text_in: str) -> Outcome:
        """Run a command inside an image, with `text_in` on its stdin."""
        return capture(self.run_command(image, command, around), text_in=text_in)

    def run_command(self, image: str, command: Sequence[str], around: Surroundings) -> list[str]:
        # The default of 64 MB of shared memory ends data loaders and collectives with a bus error.
        options = ["--rm", "--interactive", "--shm-size", "1g", *self.run_options, *around.options()]
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
        options = ["--network", "host", "--hostname", "localhost", *around.options()]
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

    def build(self, request: BuildRequest) -> list[str]:
        if not self.buildx:
            cache = ["--cache-from", request.cache] if request.cache else []
            return ["env", "DOCKER_BUILDKIT=1", "docker", "build", "--progress=plain", *_build_options(request, cache)]
        kept = f"type=registry,ref={request.cache}"
        cache = ["--cache-from", kept, "--cache-to", f"{kept},mode=max"] if request.cache else []
        command = ["docker", "buildx", "build", "--progress=plain", "--load", "--provenance=false"]
        return [*command, *_build_options(request, cache)]

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
    for builder in (kind() for kind in BUILDERS):
        if name not in (None, builder.name):
            continue
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


def _build_options(request: BuildRequest, cache: Sequence[str]) -> list[str]:
    options = ["--platform", request.platform, "--tag", request.tag, "--file", str(request.dockerfile)]
    options += option_each("--label", request.labels) + option_each("--build-arg", request.arguments)
    options += ["--target", request.target] if request.target else []
    options += cache
    for name, file in sorted(request.secrets.items()):
        options += ["--secret", f"id={name},src={file}"]
    options += ["--no-cache", "--pull"] if request.fresh else []
    return [*options, str(request.context)]


def option_each(flag: str, values: Mapping[str, str]) -> list[str]:
    """--label a=b --label c=d, in the order of their names."""
    return [part for name, value in sorted(values.items()) for part in (flag, f"{name}={value}")]
