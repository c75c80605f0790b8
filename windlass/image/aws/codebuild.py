"""Make images in AWS CodeBuild: the context goes to S3, the log comes back, the result is verified in ECR."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from windlass.common.aws import asking, client
from windlass.errors import ExitCode, UserError
from windlass.image.aws.ecr import EcrHost, ensure_repository
from windlass.image.build.builders import IN_THE_CLOUD, Docker
from windlass.image.build.building import Failed, Made, Watcher
from windlass.image.build.context import Context, Ignore, write_zip
from windlass.image.build.job import Job, Surroundings
from windlass.image.build.process import plain
from windlass.image.build.testing import Report, command_inside, report_in, script
from windlass.image.registry.reference import ImageReference

FOLDER = ".windlass-build"  # in the archive, beside the context
DIGEST_VARIABLE = "WINDLASS_DIGEST"
REPORT = "report.json"


def buildspec(job: Job, place: str) -> dict[str, Any]:
    """A phase stops at its first failure, and none follows a failed one: an unproven image is not pushed.

    `place`: where in S3 the report goes.
    """
    docker, image = Docker(), ImageReference.parse(job.image)
    settings = job.settings
    build = docker.build(job, Path("context"), Path(FOLDER) / "Dockerfile")
    inside = []
    if settings.proof:
        run = docker.run_command(job.image, command_inside(settings.proof.order()), Surroundings())
        keep = f"aws s3 cp {REPORT} {place}/{REPORT}"
        inside += [f"{shlex.join(run)} < {FOLDER}/proof.py > {REPORT} || {{ {keep}; false; }}", keep]
    token = 'aws ecr get-login-password --region "$AWS_REGION"'
    login = f"{token} | docker login --username AWS --password-stdin {image.registry}"
    digest = "docker buildx imagetools inspect --format '{{.Manifest.Digest}}' " + shlex.quote(job.image)
    return {
        "version": 0.2,
        "env": {"shell": "bash", "exported-variables": [DIGEST_VARIABLE]},
        "phases": {
            "pre_build": {"on-failure": "ABORT", "commands": [login]},
            "build": {"on-failure": "ABORT", "commands": [shlex.join(build), *inside]},
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


def results(tag: str) -> str:
    """Prefix of the objects of a build in its bucket."""
    return f"windlass/{tag}"


def carried(job: Job) -> dict[str, str]:
    """The files that go along with the context: the Dockerfile as it is built, and the proof."""
    return {f"{FOLDER}/Dockerfile": job.source.recipe, f"{FOLDER}/proof.py": script()}


POLL_SECONDS = 5.0
ENVIRONMENTS = {
    "linux/amd64": ("LINUX_CONTAINER", "aws/codebuild/amazonlinux-x86_64-standard:5.0"),
    "linux/arm64": ("ARM_CONTAINER", "aws/codebuild/amazonlinux-aarch64-standard:3.0"),
}


@dataclass
class CloudWorkshop:
    """One CodeBuild project, and the bucket for what goes to it and comes back."""

    name = IN_THE_CLOUD
    project: str
    bucket: str
    region: str
    wait: Callable[[float], None] = time.sleep

    def make(self, job: Job, watcher: Watcher) -> Made | Failed:
        image = ImageReference.parse(job.image)
        host = EcrHost.of(image.registry)
        assert host is not None  # nothing else is sent to CodeBuild
        ensure_repository(host, image.repository)
        ended, lines = self._follow(self._start(job, self._upload(job)), watcher)
        log = job.folder / f"attempt-{job.number}.log"
        log.write_text("\n".join(lines) + "\n")
        report = self._report(job)
        proof = Report(job.image, report) if report else None
        if ended["buildStatus"] != "SUCCEEDED":
            said = "\n".join(lines) or _phases(ended)
            return Failed(proof.log if proof and not proof.passed else said, log)
        digest = self._digest(host, image, ended)
        return Made(digest, proof, str(image.pinned(digest)))

    def request(self, job: Job, key: str) -> dict[str, Any]:
        """What is asked of CodeBuild; `--dry-run` prints it."""
        kind, image = ENVIRONMENTS[job.source.platform]
        return {
            "projectName": self.project,
            "sourceTypeOverride": "S3",
            "sourceLocationOverride": f"{self.bucket}/{key}",
            "buildspecOverride": yaml.safe_dump(
                buildspec(job, f"s3://{self.bucket}/{results(job.tag)}"), sort_keys=False, width=10**6
            ),
            "environmentTypeOverride": kind,
            "imageOverride": image,
            "privilegedModeOverride": True,  # docker inside needs it
            "artifactsOverride": {"type": "NO_ARTIFACTS"},
        }

    def _upload(self, job: Job) -> str:
        key = f"{results(job.tag)}/context.zip"
        with tempfile.TemporaryDirectory(prefix="windlass-build-") as folder:
            context, archive = Path(folder) / "context", Path(folder) / "context.zip"
            context.mkdir()
            job.source.stage(context)
            names = [f"context/{name}" for name in Context(context, Ignore(())).files]
            write_zip(Path(folder), names, archive, carried(job))
            with asking(f"the context, to s3://{self.bucket}"):
                s3 = client("s3", self.region)
                # The report of an earlier build of the same files.
                s3.delete_object(Bucket=self.bucket, Key=f"{results(job.tag)}/{REPORT}")
                s3.upload_file(str(archive), self.bucket, key)
        return key

    def _start(self, job: Job, key: str) -> str:
        codebuild = client("codebuild", self.region)
        with asking(f"a build of the CodeBuild project {self.project}"):
            try:
                started = codebuild.start_build(**self.request(job, key))
            except codebuild.exceptions.ResourceNotFoundException:
                raise UserError(
                    f"there is no CodeBuild project {self.project} in {self.region}",
                    fix="windlass image infrastructure    prints the CloudFormation template that makes it",
                ) from None
        return str(started["build"]["id"])

    def _follow(self, build: str, watcher: Watcher) -> tuple[dict[str, Any], list[str]]:
        codebuild, logs = client("codebuild", self.region), client("logs", self.region)
        lines: list[str] = []
        token: str | None = None
        while True:
            with asking(f"the build {build}"):
                state = codebuild.batch_get_builds(ids=[build])["builds"][0]
                new, token = _new_lines(logs, state.get("logs", {}), token)
            lines += new
            for line in new:
                watcher.line(line)
            if state["buildStatus"] != "IN_PROGRESS":
                return state, lines
            self.wait(POLL_SECONDS)

    def _report(self, job: Job) -> dict[str, Any] | None:
        """What the proof left in S3."""
        key, s3 = f"{results(job.tag)}/{REPORT}", client("s3", self.region)
        with asking(f"s3://{self.bucket}/{key}"):
            try:
                body: bytes = s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            except s3.exceptions.NoSuchKey:
                return None
        return report_in(body.decode())

    def _digest(self, host: EcrHost, image: ImageReference, ended: dict[str, Any]) -> str:
        """As ECR has it under the tag; the build must have said the same."""
        with asking(f"{image} in ECR"):
            stored = client("ecr", host.region).describe_images(
                registryId=host.account, repositoryName=image.repository, imageIds=[{"imageTag": image.tag}]
            )["imageDetails"][0]["imageDigest"]
        exported = ended.get("exportedEnvironmentVariables", ())
        said = {variable["name"]: variable["value"] for variable in exported}.get(DIGEST_VARIABLE)
        if said and said != stored:
            raise UserError(f"CodeBuild pushed {said}, but ECR has {stored} as {image}", exit_code=ExitCode.FAILED)
        return str(stored)


def _new_lines(logs: Any, place: dict[str, Any], token: str | None) -> tuple[list[str], str | None]:
    """Lines that were not seen yet, and the mark to go on from."""
    lines: list[str] = []
    while place.get("groupName") and place.get("streamName"):
        asked = {"logGroupName": place["groupName"], "logStreamName": place["streamName"], "startFromHead": True}
        try:
            answer = logs.get_log_events(**asked, **({"nextToken": token} if token else {}))
        except logs.exceptions.ResourceNotFoundException:  # no line was written yet
            break
        lines += [plain(event["message"]).rstrip("\n") for event in answer["events"]]
        following = answer["nextForwardToken"]
        if following == token or not answer["events"]:
            break
        token = following
    return lines, token


def _phases(ended: dict[str, Any]) -> str:
    """What CodeBuild says of the phases, where there is no log."""
    lines = [
        f"{phase['phaseType']} {phase.get('phaseStatus', '')}: {context.get('message', '')}"
        for phase in ended.get("phases", ())
        for context in phase.get("contexts", ())
    ]
    return "\n".join(lines) or f"CodeBuild ended with {ended['buildStatus']}, and left no log"
