"""What each builder is told, and what its output says of the progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.errors import UserError
from windlass.image.build.builders import Buildah, Docker, Podman, find_builder
from windlass.image.build.context import Context
from windlass.image.build.job import Job, Settings, Source, Surroundings
from windlass.image.build.process import Step, step_of
from windlass.image.read.texts import Texts

SOURCE = Source(
    title="r.example/team/train",
    texts=Texts("FROM a\n"),
    context=Context.open(Path(__file__).parent),
    platform="linux/arm64",
    arguments={"TORCH": "2.14.1"},
    target="train",
)
JOB = Job(
    SOURCE,
    image="r.example/team/train:git-1-2",
    tag="git-1-2",
    labels={"b": "2", "a": "1"},
    settings=Settings(cache="r.example/team/cache"),
    folder=Path(),
    number=1,
)
REQUEST = (JOB, Path("/staged/context"), Path("/staged/Dockerfile"))


def test_docker_builds_with_buildx_for_the_platform_of_the_nodes():
    assert Docker().build(*REQUEST) == [
        *("docker", "buildx", "build", "--progress=plain", "--load", "--provenance=false"),
        *("--platform", "linux/arm64", "--tag", "r.example/team/train:git-1-2", "--file", "/staged/Dockerfile"),
        *("--label", "a=1", "--label", "b=2", "--build-arg", "TORCH=2.14.1", "--target", "train"),
        *("--cache-from", "type=registry,ref=r.example/team/cache"),
        *("--cache-to", "type=registry,ref=r.example/team/cache,mode=max", "/staged/context"),
    ]


@pytest.mark.parametrize("builder", [Podman(), Buildah()], ids=lambda one: one.name)
def test_podman_and_buildah_keep_layers(builder):
    command = builder.build(*REQUEST)
    assert command[:3] == [builder.name, "build", "--layers"]
    assert command[-1] == "/staged/context"
    for part in (["--platform", "linux/arm64"], ["--target", "train"], ["--cache-to", "r.example/team/cache"]):
        at = command.index(part[0])
        assert command[at : at + 2] == part


def test_credentials_are_a_file_and_never_an_argument():
    what = ("local:1", "r.example/train:1", Path("/tmp/digest"))
    for builder in (Podman(), Buildah()):
        (command,) = builder.push(*what, "/proc/self/fd/7")
        assert command[command.index("--authfile") + 1] == "/proc/self/fd/7"
        assert command[command.index("--digestfile") + 1] == "/tmp/digest"
        assert "--creds" not in command
        assert "--tls-verify=false" not in command
        assert "--tls-verify=false" in builder.push(*what, None, plain_http=True)[0]
    folder = ["env", "DOCKER_CONFIG=/dev/shm/x"]
    assert Docker().push(*what, "/dev/shm/x")[-1] == [*folder, "docker", "push", "r.example/train:1"]
    assert Docker().push(*what, None)[-1] == ["docker", "push", "r.example/train:1"]


def test_a_command_inside_replaces_the_entrypoint_of_the_image():
    command = ["sh", "-c", "true"]
    around = Surroundings(mounts=[("/a", "/b")], environment={"X": "1"}, gpus=True)
    assert Docker().run_command("train:1", command, around)[-5:] == ["--entrypoint", "sh", "train:1", "-c", "true"]
    assert "--gpus" in Docker().run_command("train:1", command, around)
    for builder in (Docker(), Podman(), Buildah()):
        assert {"/a:/b:ro", "X=1"} <= set(builder.run_command("train:1", command, around))
    assert Buildah().run_command("c", command, around)[-5:] == ["--", "c", "sh", "-c", "true"]
    with pytest.raises(UserError, match="no GPUs"):
        Buildah().run("train:1", command, around, "")


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("STEP 3/7: RUN pip install torch", Step(3, 7, "RUN pip install torch")),
        ("[2/2] STEP 1/4: FROM base", Step(1, 4, "FROM base")),
        ("STEP 5: COPY . .", Step(5, None, "COPY . .")),
        ("#9 [stage-1 2/6] RUN apt-get update", Step(2, 6, "RUN apt-get update")),
        ("#5 [1/3] FROM docker.io/library/python", Step(1, 3, "FROM docker.io/library/python")),
        ("#9 0.512 Get:1 http://deb.debian.org", None),
        ("STEP by step", None),
    ],
)
def test_steps_are_read_from_every_builder(line, step):
    assert step_of(line) == step


def test_without_any_builder_the_error_says_why_for_each(monkeypatch, tmp_path):
    broken = tmp_path / "docker"
    broken.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as refused:
        find_builder()
    assert refused.value.evidence.splitlines() == [
        "docker    Cannot connect to the Docker daemon",
        "podman    not installed",
        "buildah   not installed",
    ]
    assert "codebuild" in refused.value.fix
    with pytest.raises(UserError, match="podman cannot be used here"):
        find_builder("podman")


def test_docker_before_23_builds_without_a_plugin(monkeypatch, tmp_path):
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\n[ $1 = version ] && echo 20.10.24 || exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    old = Docker()
    assert old.why_not() is None
    assert old.build(*REQUEST)[:4] == ["env", "DOCKER_BUILDKIT=1", "docker", "build"]
    program.write_text("#!/bin/sh\n[ $1 = version ] && echo 28.2.2 || exit 1\n")
    assert Docker().why_not() == "the buildx plugin is not installed"
