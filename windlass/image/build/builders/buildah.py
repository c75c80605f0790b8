"""buildah as a builder."""

from __future__ import annotations

import shutil

from windlass.errors import UserError
from windlass.image.build.builders.podman import build_options, push_options
from windlass.image.build.builders.protocol import Answer, BuildRequest, PushRequest, RunRequest, option_each
from windlass.image.build.process import capture


class Buildah:
    """buildah: builds without a daemon, in CI and inside containers too."""

    name = "buildah"

    def why_not(self) -> str | None:
        if not shutil.which("buildah"):
            return "not installed"
        code, _, error = capture(["buildah", "info"], timeout=60)
        return None if code == 0 else (error.strip().splitlines() or ["buildah info fails"])[-1]

    def build(self, request: BuildRequest) -> list[str]:
        return ["buildah", "build", "--layers", *build_options(request), str(request.context)]

    def run(self, request: RunRequest, text_in: str | None = None, timeout: float | None = None) -> Answer:
        """buildah runs commands in a working container, which is made and removed here."""
        if request.gpus:
            raise UserError("buildah gives a container no GPUs", fix="--builder podman    or --builder docker")
        made = Answer(*capture(["buildah", "from", "--pull-never", request.image], timeout=timeout))
        if made.exit_code != 0:
            return made
        container = made.stdout.strip()
        try:
            return Answer(*capture(self.run_command(request, container), text_in=text_in, timeout=timeout))
        finally:
            capture(["buildah", "rm", container])

    def run_command(self, request: RunRequest, container: str) -> list[str]:
        # The name of its own that buildah gives a container is in no hosts file, and launchers look their own name up.
        command = ["buildah", "run", "--network", "host", "--hostname", "localhost"]
        for source, target in request.mounts:
            command += ["--volume", f"{source}:{target}:ro"]
        command += option_each("--env", request.environment)
        return [*command, "--", container, *request.command]

    def push(self, request: PushRequest, authentication: str | None) -> list[list[str]]:
        return [["buildah", "push", *push_options(request, authentication)]]

    def push_environment(self, authentication: str | None) -> dict[str, str]:
        return {}

    def pull(self, image: str, *, plain_http: bool) -> list[str]:
        return ["buildah", "pull", "--quiet", *(["--tls-verify=false"] if plain_http else []), image]

    def image_id(self, image: str) -> list[str]:
        return ["buildah", "inspect", "--type", "image", "--format", "{{.FromImageID}}", image]
