"""Real builds with buildah and podman on a base made of this machine's packages; pushed, pulled back, run."""

from __future__ import annotations

import json

import pytest

from tests.image.conftest import torch_options

pytestmark = pytest.mark.image

DOCKERFILE = """\
FROM localhost/machine:12
COPY requirements.txt /workspace/requirements.txt
RUN pip install --no-cache-dir -r /workspace/requirements.txt
COPY train.py /workspace/train.py
"""
RUN = """\
# my run
model: {preset: llama-tiny}  # small
data: {source: 'corpus:austen', sequence_length: 32}
image:
  dockerfile: Dockerfile   # beside this file
  name: @NAME@             # where it goes
"""


@pytest.fixture
def project(bench, registry):
    bench.write(
        Dockerfile=DOCKERFILE,
        **{"requirements.txt": "torch==2.14.1\ntransformers==5.22.2\n", "train.py": "print('first')\n"},
        **{"my.yaml": RUN.replace("@NAME@", f"{registry.host}/team/train")},
    )
    return bench


def test_an_image_is_built_proven_pushed_and_pulled_back(project, registry, workplace):
    built = project.result("build", "my.yaml", "--builder", "buildah")
    assert built["attempts"] == 1
    assert built["fixes"] == []
    assert built["proof"]["passed"]
    assert built["proof"]["loaded"]["torch"] == "2.14.1"

    pushed = project.result("push", "my.yaml")
    digest = pushed["digest"]
    assert pushed["pinned"] == f"{registry.host}/team/train@{digest}"
    text = (project.folder / "my.yaml").read_text()
    assert text == RUN.replace("@NAME@", pushed["pinned"])  # every comment and every blank is still there

    # Another storage pulls it back by digest, and it runs there.
    workplace.tool("podman", "pull", "--quiet", "--tls-verify=false", pushed["pinned"])
    said = workplace.tool(
        "podman", "run", "--rm", "--network", "host", pushed["pinned"], "python3", "/workspace/train.py"
    )
    assert said.strip() == "first"

    tested = project.result("test", pushed["pinned"], "--level", "quick", "--builder", "podman")
    assert (tested["image"], tested["passed"]) == (pushed["pinned"], True)

    again = project.result("push", "my.yaml", "--to", f"{registry.host}/team/train")
    assert again["already_there"]
    assert again["digest"] == digest


def test_the_tag_is_made_of_the_content_and_nothing_is_called_latest(project):
    first = project.result("build", "my.yaml", "--builder", "buildah")
    same = project.result("build", "my.yaml", "--builder", "buildah")
    assert same["tag"] == first["tag"]
    assert same["id"] == first["id"]  # from the cache
    project.write(**{"train.py": "print('second')\n"})
    other = project.result("build", "my.yaml", "--builder", "buildah")
    assert other["tag"] != first["tag"]
    project.write(**{"train.py": "print('first')\n"})
    assert project.result("build", "my.yaml", "--builder", "buildah")["tag"] == first["tag"]
    assert "latest" not in first["image"]


def test_labels_say_what_is_inside(project, workplace):
    built = project.result("build", "my.yaml", "--builder", "buildah")
    labels = json.loads(workplace.tool("podman", "image", "inspect", built["image"]))[0]["Labels"]
    assert labels["org.opencontainers.image.version"] == built["tag"]
    assert labels["org.opencontainers.image.base.name"] == "localhost/machine:12"
    assert labels["dev.windlass.content"]


def test_an_image_that_shows_too_little_is_not_pushed(project):
    project.result("build", "my.yaml", "--builder", "buildah")
    failed = project.result("test", "my.yaml", "--level", "quick", "--expect", "torch=2.15", code=1)
    assert [one["detail"] for one in failed["checks"] if one["status"] == "failed"] == [
        "torch 2.14.1 is loaded, 2.15 was asked for"
    ]
    refused = project.result("push", "my.yaml", code=2)
    assert "is not proven" in refused["error"]
    project.result("test", "my.yaml", "--level", "quick")
    project.result("push", "my.yaml")


@pytest.mark.parametrize("builder", ["buildah", "podman", "docker"], indirect=True)
def test_every_check_of_the_full_level_runs_inside_the_image(project, builder):
    """torch itself is the real one of these tests, mounted: model, backward, all-reduce, and windlass's own trainer."""
    project.result("build", "my.yaml", "--builder", builder)
    level = "full" if builder == "buildah" else "standard"
    report = project.result("test", "my.yaml", "--level", level, "--builder", builder, *torch_options())
    checks = {one["name"]: one for one in report["checks"]}
    assert report["passed"], checks
    assert report["loaded"]["nccl"]
    assert report["loaded"]["cuda"]
    assert "LlamaForCausalLM" in checks["model"]["detail"]
    assert checks["all-reduce"]["detail"] == "gloo: 1 + 2 = 3 on both ranks"
    assert ("trained 2 steps" in checks["smoke"]["detail"]) if level == "full" else "smoke" not in checks


def test_docker_builds_proves_pushes_and_pulls_back(project, registry, docker_daemon):
    """The same with docker's own daemon and command."""
    (project.folder / "builder.txt").write_text("docker")  # a tag of its own: others pushed the same files
    project.environment |= docker_daemon.environment
    built = project.result("build", "my.yaml", "--builder", "docker")
    assert (built["attempts"], built["proof"]["passed"], built["proof"]["loaded"]["torch"]) == (1, True, "2.14.1")
    pushed = project.result("push", "my.yaml", "--builder", "docker")
    assert pushed["pinned"] == f"{registry.host}/team/train@{pushed['digest']}"
    again = project.result("push", built["image"], "--builder", "docker", "--to", f"{registry.host}/team/train")
    assert (again["already_there"], again["digest"]) == (True, pushed["digest"])
    docker_daemon.docker("image", "rm", "--force", built["id"])
    docker_daemon.docker("pull", "--quiet", pushed["pinned"])
    command = ("run", "--rm", "--network", "host", pushed["pinned"], "python3", "/workspace/train.py")
    assert docker_daemon.docker(*command) == "first\n"
