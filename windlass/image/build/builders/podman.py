"""podman as a builder."""

from __future__ import annotations

import shutil

from windlass.image.build.builders.protocol import (
    Answer,
    BuildRequest,
    PushRequest,
    RunRequest,
    option_each,
    secret_options,
)
from windlass.image.build.process import capture


class Podman:
    """podman: no daemon, and images shared with buildah."""

    name = "podman"

    def why_not(self) -> str | None:
        if not shutil.which("podman"):
            return "not installed"
        code, _, error = capture(["podman", "info", "--format", "{{.Store.GraphRoot}}"], timeout=60)
        return None if code == 0 else (error.strip().splitlines() or ["podman info fails"])[-1]

    def build(self, request: BuildRequest) -> list[str]:
        return ["podman", "build", "--layers", *build_options(request), str(request.context)]

    def run(self, request: RunRequest, text_in: str | None = None, timeout: float | None = None) -> Answer:
        return Answer(*capture(self.run_command(request), text_in=text_in, timeout=timeout))

    def run_command(self, request: RunRequest) -> list[str]:
        command = ["podman", "run", "--rm", "--interactive", "--shm-size", request.shared_memory]
        # Collectives of one machine need no network of their own, and not every machine can make one.
        command += ["--network", "host", "--pull", "never"]
        for source, target in request.mounts:
            command += ["--volume", f"{source}:{target}:ro"]
        command += option_each("--env", request.environment)
        if request.gpus:
            command += ["--device", "nvidia.com/gpu=all"]
        program, *arguments = request.command
        return [*command, "--entrypoint", program, request.image, *arguments]

    def push(self, request: PushRequest, authentication: str | None) -> list[list[str]]:
        return [["podman", "push", *push_options(request, authentication)]]

    def push_environment(self, authentication: str | None) -> dict[str, str]:
        return {}

    def pull(self, image: str, *, plain_http: bool) -> list[str]:
        return ["podman", "pull", "--quiet", *(["--tls-verify=false"] if plain_http else []), image]

    def image_id(self, image: str) -> list[str]:
        return ["podman", "image", "inspect", "--format", "{{.Id}}", image]


def build_options(request: BuildRequest) -> list[str]:
    """Those that podman and buildah share."""
    options = ["--format", "oci", "--platform", request.platform, "--tag", request.tag]
    options += ["--file", str(request.dockerfile)]
    options += option_each("--label", request.labels) + option_each("--build-arg", request.arguments)
    if request.target:
        options += ["--target", request.target]
    if request.cache:
        options += ["--cache-from", request.cache, "--cache-to", request.cache]
    options += secret_options(request)
    if request.fresh:
        options += ["--no-cache", "--pull"]
    return options


def push_options(request: PushRequest, authentication: str | None) -> list[str]:
    options = ["--format", "oci"]
    if authentication:
        options += ["--authfile", authentication]
    if request.plain_http:
        options.append("--tls-verify=false")
    if request.digest_file:
        options += ["--digestfile", str(request.digest_file)]
    return [*options, request.image, f"docker://{request.destination}"]
