"""docker buildx as a builder."""

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


class Docker:
    """Docker with BuildKit: `docker buildx build`."""

    name = "docker"

    def why_not(self) -> str | None:
        if not shutil.which("docker"):
            return "not installed"
        code, _, error = capture(["docker", "version", "--format", "{{.Server.Version}}"], timeout=20)
        if code != 0:
            return (error.strip().splitlines() or ["the daemon does not answer"])[-1]
        if capture(["docker", "buildx", "version"], timeout=20)[0] != 0:
            return "the buildx plugin is not installed"
        return None

    def build(self, request: BuildRequest) -> list[str]:
        command = ["docker", "buildx", "build", "--progress=plain", "--load", "--provenance=false"]
        command += ["--platform", request.platform, "--tag", request.tag, "--file", str(request.dockerfile)]
        command += option_each("--label", request.labels) + option_each("--build-arg", request.arguments)
        if request.target:
            command += ["--target", request.target]
        if request.cache:
            command += ["--cache-from", f"type=registry,ref={request.cache}"]
            command += ["--cache-to", f"type=registry,ref={request.cache},mode=max"]
        command += secret_options(request)
        if request.fresh:
            command += ["--no-cache", "--pull"]
        return [*command, str(request.context)]

    def run(self, request: RunRequest, text_in: str | None = None, timeout: float | None = None) -> Answer:
        return Answer(*capture(self.run_command(request), text_in=text_in, timeout=timeout))

    def run_command(self, request: RunRequest) -> list[str]:
        command = ["docker", "run", "--rm", "--interactive", "--shm-size", request.shared_memory]
        for source, target in request.mounts:
            command += ["--mount", f"type=bind,source={source},target={target},readonly"]
        command += option_each("--env", request.environment)
        if request.gpus:
            command += ["--gpus", "all"]
        program, *arguments = request.command
        return [*command, "--entrypoint", program, request.image, *arguments]

    def push(self, request: PushRequest, authentication: str | None) -> list[list[str]]:
        return [["docker", "tag", request.image, request.destination], ["docker", "push", request.destination]]

    def push_environment(self, authentication: str | None) -> dict[str, str]:
        return {"DOCKER_CONFIG": authentication} if authentication else {}

    def pull(self, image: str, *, plain_http: bool) -> list[str]:
        return ["docker", "pull", "--quiet", image]

    def image_id(self, image: str) -> list[str]:
        return ["docker", "image", "inspect", "--format", "{{.Id}}", image]
