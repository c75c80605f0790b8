"""The commands that CodeBuild gets, run by a shell as CodeBuild runs them, with podman as docker and a folder as S3."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile

import pytest

from windlass.image.aws.codebuild import buildspec, carried, results
from windlass.image.build.context import Context, write_zip
from windlass.image.build.job import Job, Proof, Settings, Source
from windlass.image.read.texts import Texts
from windlass.image.registry.reference import ImageReference
from windlass.image.registry.registry import Repository

pytestmark = pytest.mark.image

# Only what podman spells otherwise.
DOCKER = """\
#!/bin/bash
case "$1 $2" in
"buildx build") shift 2; set -- "${@/--progress=plain/--quiet}"; set -- "${@/--load/--layers}"
    exec podman build --format oci "${@/--provenance=false/--pull=never}" ;;
"buildx imagetools") exec skopeo inspect --tls-verify=false --format '{{.Digest}}' "docker://${@: -1}" ;;
"push "*) exec podman push --quiet --format oci --tls-verify=false "$2" ;;
"login "*) read -r password; echo "login $* ${#password}" >> "$SHIM_LOG" ;;
"run "*) shift; exec podman run --network host "$@" ;;
*) echo "docker $*: not known here" >&2; exit 64 ;;
esac
"""
AWS = """\
#!/bin/bash
case "$1 $2" in
"ecr get-login-password") echo token ;;
"s3 cp") mkdir -p "$(dirname "$SHIM_S3/${4#s3://}")" && cp "$3" "$SHIM_S3/${4#s3://}" ;;
*) echo "aws $*: not known here" >&2; exit 64 ;;
esac
"""


@pytest.fixture
def cloud(workplace, registry, tmp_path):
    """A function that builds a project as CodeBuild would: phase after phase, in one shell."""
    (tmp_path / "bin").mkdir()
    for name, text in (("docker", DOCKER), ("aws", AWS)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def build(requirements):
        folder = tmp_path / "context"
        folder.mkdir(exist_ok=True)
        (folder / "requirements.txt").write_text(requirements)
        recipe = "FROM localhost/machine:12\nCOPY . /w\nRUN pip install --no-cache-dir -r /w/requirements.txt\n"
        title = f"{registry.host}/team/cloud"
        source = Source(title, Texts(recipe), Context.open(folder), "linux/amd64")
        tag = f"files-{source.content[:12]}"
        job = Job(source, f"{title}:{tag}", tag, {"note": "it's here"}, Settings(proof=Proof("quick")), tmp_path, 1)
        work = tmp_path / "work"
        names = [f"context/{name}" for name in source.context.files]
        write_zip(tmp_path, names, tmp_path / "context.zip", carried(job))
        with zipfile.ZipFile(tmp_path / "context.zip") as archive:
            archive.extractall(work)
        spec = buildspec(job, f"s3://bucket/{results(job.tag)}")
        lines = ["set -e", "export CODEBUILD_BUILD_SUCCEEDING=1"]
        lines += [one for phase in spec["phases"].values() for one in phase["commands"]]
        lines.append('echo "digest $WINDLASS_DIGEST"')
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        shims = {"PATH": path, "SHIM_S3": str(tmp_path / "s3"), "SHIM_LOG": str(tmp_path / "log"), "AWS_REGION": "r"}
        answer = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=work,
            env={**os.environ, **workplace.environment, **shims},
            capture_output=True,
            text=True,
            check=False,
        )
        return job, answer

    return build


def test_a_proven_image_is_pushed_with_its_report(cloud, tmp_path):
    job, answer = cloud("torch==2.14.1\n")
    assert answer.returncode == 0, answer.stderr
    image = ImageReference.parse(job.image)
    there = Repository(image).manifest(job.tag)
    assert f"digest {there.digest}" in answer.stdout
    results = tmp_path / "s3" / "bucket" / "windlass" / job.tag
    report = json.loads((results / "report.json").read_text().splitlines()[-1])
    assert report["passed"]
    assert report["loaded"]["torch"] == "2.14.1"
    assert (tmp_path / "log").read_text().endswith(" 5\n")  # the token came on stdin


def test_an_image_that_fails_its_proof_is_not_pushed_and_says_why(cloud, tmp_path):
    job, answer = cloud("torch==2.13.0\nflash-attn==2.8.3\n")
    assert answer.returncode != 0
    assert Repository(ImageReference.parse(job.image)).manifest(job.tag) is None
    report = json.loads((tmp_path / "s3/bucket/windlass" / job.tag / "report.json").read_text().splitlines()[-1])
    failed = [one for one in report["checks"] if one["status"] == "failed"]
    assert "undefined symbol" in failed[0]["detail"]
