"""Push and what can go wrong with registries: against Debian's docker-registry on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

from tests.image.rig import PASSWORD, USER, Registry, Workplace
from windlass.image.registry.credentials import Credentials
from windlass.image.registry.reference import ImageReference
from windlass.image.registry.registry import Repository

pytestmark = pytest.mark.image

SECRETS = (PASSWORD.encode(), Credentials(USER, PASSWORD).basic.encode())

DOCKERFILE = """\
FROM localhost/machine:12
COPY requirements.txt /requirements.txt
RUN pip install --no-cache-dir -r /requirements.txt
COPY . /workspace
LABEL dev.windlass.code=/workspace
"""


@pytest.fixture
def built(bench):
    """A project, built and proven, and the function that builds it again."""
    (bench.folder / "code").mkdir()
    bench.write(
        **{
            "code/Dockerfile": DOCKERFILE,
            "code/requirements.txt": "torch==2.14.1\ntransformers==5.22.2\n",
            "code/train.py": "print('first')\n",
            "code/gone.py": "",
        }
    )

    def build(*options):
        where = ("--context", "code", "--name", "team/train", "--builder", "buildah")
        return bench.result("build", *where, *options)

    build.result = build()
    return build


def test_a_tag_that_means_another_image_is_not_moved(bench, built, registry):
    where = ["--to", f"{registry.host}/team/moved", "--tag", "v1"]
    bench.result("push", built.result["image"], *where)
    (bench.folder / "code" / "train.py").write_text("print('other')\n")
    other = built()
    refused = bench.result("push", other["image"], *where, code=2)
    assert "is another image" in refused["error"]
    moved = bench.result("push", other["image"], *where, "--replace")
    assert not moved["already_there"]
    refused = bench.result("push", other["image"], "--to", f"{registry.host}/team/moved", "--tag", "latest", code=2)
    assert "a tag that says what is in the image" in refused["error"]


def test_a_registry_that_is_down_is_named(bench, built, tmp_path_factory):
    gone = Registry(tmp_path_factory.mktemp("gone") / "r")  # never started: nothing listens there
    refused = bench.result("push", built.result["image"], "--to", f"{gone.host}/team/train", code=1)
    assert refused["error"] == f"the registry {gone.host} does not answer"
    assert "refused" in refused["evidence"].lower()


def test_without_the_right_password_nothing_is_pushed(bench, built, locked_registry):
    to = ["--to", f"{locked_registry.host}/team/train"]
    refused = bench.result("push", built.result["image"], *to, code=2)
    assert refused["error"] == f"{locked_registry.host} denies access to team/train"
    assert refused["cause"] == "no credentials were found for it"
    wrong = bench.result("push", built.result["image"], *to, "--username", USER, input="wrong\n", code=2)
    assert wrong["cause"] == "the user may not do that"


def test_the_password_is_on_no_disk_and_in_no_process_list(bench, built, locked_registry, workplace):
    to = ("--to", f"{locked_registry.host}/team/secret", "--username", USER)
    with password_watched(bench, workplace):
        pushed = bench.result("push", built.result["image"], *to, input=f"{PASSWORD}\n")
    assert_is_in_registry(pushed)


def test_docker_pushes_with_a_password_through_the_daemon_of_its_context(
    bench, docker_daemon, locked_registry, workplace
):
    """Where the daemon is says only a context of docker's settings, as with rootless docker and Docker Desktop."""
    bench.write(Dockerfile="FROM localhost/machine:12\nRUN python3 --version\n")
    bench.environment |= docker_daemon.environment | {"DOCKER_CONFIG": str(bench.folder / "settings")}
    address = bench.environment.pop("DOCKER_HOST")
    for words in (("create", "own", "--docker", f"host={address}"), ("use", "own")):
        subprocess.run(["docker", "context", *words], env=bench.environment, capture_output=True, check=True)
    built = bench.result("build", "--name", "team/train", "--builder", "docker", "--test", "none")
    to = ("--to", f"{locked_registry.host}/team/docker", "--unproven", "--username", USER)
    with password_watched(bench, workplace):
        pushed = bench.result("push", built["image"], "--builder", "docker", *to, input=f"{PASSWORD}\n")
    assert_is_in_registry(pushed)


@contextlib.contextmanager
def password_watched(bench, workplace):
    """Every process of the machine is looked at meanwhile, and every file that could be left."""
    done = threading.Event()
    seen: list[str] = []
    looks = 0

    def look():
        nonlocal looks
        while not done.is_set():
            looks += 1
            for process in Path("/proc").iterdir():
                if process.name.isdigit():
                    try:
                        line = (process / "cmdline").read_bytes()
                    except OSError:
                        continue
                    if any(secret in line for secret in SECRETS):
                        seen.append(line.decode(errors="replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert looks > 3
    assert seen == []
    home, run = workplace.folder / "home", workplace.folder / "run"
    for root in (bench.folder, home, run, Path("/dev/shm"), Path("/run/containers")):
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder) / name
                if path.is_file() and path.stat().st_size < 1_000_000:
                    assert not any(secret in path.read_bytes() for secret in SECRETS), path


def assert_is_in_registry(pushed):
    image = ImageReference.parse(pushed["pinned"])
    there = Repository(image, Credentials(USER, PASSWORD)).manifest(pushed["digest"])
    assert there is not None
    assert there.digest == pushed["digest"]


def test_a_full_disk_is_said_and_not_tried_again(bench, workplace, tmp_path):
    """A storage of 30 MB in memory, where the base alone does not fit."""
    small = tmp_path / "small"
    small.mkdir()
    workplace.tool("mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(small))
    try:
        workplace.tool("buildah", "push", "--quiet", "localhost/machine:12", f"oci-archive:{tmp_path}/base.tar")
        conf = tmp_path / "storage.conf"
        conf.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{small}/graph"\nrunroot = "{small}/run"\n')
        bench.write(Dockerfile=f"FROM oci-archive:{tmp_path}/base.tar\nRUN python3 --version\n")
        refused = bench.result(
            *("build", "--builder", "buildah", "--auto-fix", "--attempts", 3, "--test", "none"),
            environment={"CONTAINERS_STORAGE_CONF": str(conf)},
            code=1,
        )
    finally:
        workplace.tool("umount", "--lazy", str(small))
    assert refused["error"] == "the image cannot be built: the disk is full"
    assert "no space left on device" in refused["evidence"]


def test_a_base_in_a_registry_that_is_down_or_locked_is_no_fault_of_the_dockerfile(
    bench, builder, locked_registry, tmp_path_factory
):
    gone = Registry(tmp_path_factory.mktemp("gone") / "r")
    options = ["--builder", builder, "--auto-fix", "--attempts", 2, "--test", "none"]
    for host, said in ((gone.host, "does not answer"), (locked_registry.host, "without a login|denies access")):
        conf = bench.folder / "registries.conf"
        conf.write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
        bench.write(Dockerfile=f"FROM {host}/team/base:v1\n")
        refused = bench.result("build", *options, environment={"CONTAINERS_REGISTRIES_CONF": str(conf)}, code=1)
        assert re.search(said, refused["error"])
        assert host in refused["evidence"]
        assert refused["fix"]


def test_another_machine_takes_the_layers_from_the_cache_in_a_registry(bench, registry, workplace, tmp_path_factory):
    """Another storage is another machine: it has the base image, and nothing of the first build."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    conf = elsewhere / "registries.conf"
    conf.write_text(f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n')
    bench.write(Dockerfile="FROM localhost/machine:12\nRUN python3 -c 'print(4711)'\n")
    options = ["--builder", "buildah", "--cache", f"{registry.host}/team/cache", "--test", "none"]
    shared = {"CONTAINERS_REGISTRIES_CONF": str(conf)}
    first = bench.result("build", *options, environment=shared)
    assert "4711" in (bench.folder / first["records"] / "attempt-1.log").read_text()

    workplace.tool("buildah", "push", "--quiet", "localhost/machine:12", f"oci-archive:{elsewhere}/base.tar")
    other = Workplace(elsewhere / "other")
    try:
        pulled = other.tool("buildah", "pull", "--quiet", f"oci-archive:{elsewhere}/base.tar").strip()
        other.tool("buildah", "tag", pulled, "localhost/machine:12")
        second = bench.result("build", *options, environment={**other.environment, **shared})
    finally:
        other.close()
    assert second["tag"] == first["tag"]
    log = (bench.folder / second["records"] / "attempt-1.log").read_text()
    assert "\n4711" not in log  # the step was not run
    assert "ache" in log


def test_no_builder_is_a_clear_error(bench):
    bench.write(Dockerfile=DOCKERFILE)
    refused = bench.result("build", environment={"PATH": "/nowhere"}, code=2)
    assert refused["error"] == "there is no builder on this machine"
    assert "podman    not installed" in refused["evidence"]
