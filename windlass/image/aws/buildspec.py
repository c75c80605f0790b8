"""What AWS CodeBuild is told to do: the same build, the same proof, and a push only of what passed. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.image.build.builders.docker import Docker
from windlass.image.build.builders.protocol import RunRequest
from windlass.image.build.building import Job
from windlass.image.build.testing import command_inside, sources
from windlass.image.registry.reference import ImageReference

FOLDER = ".windlass-build"  # in the archive, beside the context
DIGEST_VARIABLE = "WINDLASS_DIGEST"
REPORT = "report.json"


@dataclass(frozen=True)
class Cloud:
    """Where CodeBuild works, and where it puts things."""

    project: str
    bucket: str
    region: str

    def results(self, tag: str) -> str:
        """Prefix of the objects that a build leaves."""
        return f"windlass/{tag}"


def buildspec(job: Job, cloud: Cloud) -> dict[str, Any]:
    """A phase stops at its first failure, and none follows a failed one: an unproven image is not pushed."""
    docker, image = Docker(), ImageReference.parse(job.image)
    settings = job.settings
    build = job.request(Path("context"), Path(FOLDER) / "Dockerfile")
    inside = []
    place = f"s3://{cloud.bucket}/{cloud.results(job.tag)}"
    if settings.proof:
        run = docker.run_command(RunRequest(job.image, command_inside(settings.proof.order())))
        keep = f"aws s3 cp {REPORT} {place}/{REPORT}"
        inside += [f"{shlex.join(run)} < {FOLDER}/sources.json > {REPORT} || {{ {keep}; false; }}", keep]
    token = 'aws ecr get-login-password --region "$AWS_REGION"'
    login = f"{token} | docker login --username AWS --password-stdin {image.registry}"
    digest = "docker buildx imagetools inspect --format '{{.Manifest.Digest}}' " + shlex.quote(job.image)
    return {
        "version": 0.2,
        "env": {"shell": "bash", "exported-variables": [DIGEST_VARIABLE]},
        "phases": {
            "pre_build": {"on-failure": "ABORT", "commands": [login]},
            "build": {"on-failure": "ABORT", "commands": [shlex.join(docker.build(build)), *inside]},
            "post_build": {
                "on-failure": "ABORT",
                "commands": [
                    '[ "$CODEBUILD_BUILD_SUCCEEDING" = 1 ]',
                    shlex.join(["docker", "push", job.image]),
                    f'export {DIGEST_VARIABLE}="$({digest})"',
                ],
            },
        },
    }


def carried(job: Job) -> dict[str, str]:
    """The files that go along with the context: the Dockerfile as it is built, and the proof."""
    return {f"{FOLDER}/Dockerfile": job.source.recipe, f"{FOLDER}/sources.json": json.dumps(sources())}
