"""One workplace and one registry for all image tests, and `windlass` in a folder of its own beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.image import dockerd
from tests.image.packages import WHEELS
from tests.image.rig import BASE, Registry, Workplace, why_not

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    one = Workplace(tmp_path_factory.mktemp("containers") / "w")
    try:
        one.make_base(WHEELS)
        yield one
    finally:
        one.close()


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    yield from _registry(tmp_path_factory, locked=False)


@pytest.fixture(scope="session")
def locked_registry(tmp_path_factory):
    yield from _registry(tmp_path_factory, locked=True)


def _registry(tmp_path_factory, *, locked):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    one = Registry(tmp_path_factory.mktemp("registry") / "r", locked=locked)
    one.start()
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="session")
def docker_daemon(workplace, tmp_path_factory):
    """A docker daemon that has the base image."""
    if reason := dockerd.why_not():
        pytest.skip(reason)
    one = dockerd.DockerDaemon(tmp_path_factory.mktemp("docker") / "d")
    try:
        one.start()
        one.take_over(workplace, BASE)
        yield one
    finally:
        one.stop()


class Bench:
    """`windlass image …` as a process of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WINDLASS_", "AWS_"))}
        self.environment = {**kept, **environment, "PYTHONPATH": str(REPOSITORY)}

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def windlass(self, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = self.environment | options.pop("environment", {})
        return subprocess.run(
            [sys.executable, "-m", "windlass.cli.main", "image", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=environment,
            **options,
        )

    def result(self, *arguments: Any, code: int = 0, **options: Any) -> dict[str, Any]:
        """What the command says with --json."""
        answer = self.windlass(*arguments, "--json", **options)
        assert answer.returncode == code, f"{answer.stdout}\n{answer.stderr}"
        return json.loads(answer.stdout)


@pytest.fixture
def bench(workplace, tmp_path):
    return Bench(tmp_path, {**workplace.environment})


@pytest.fixture(params=["buildah", "docker"])
def builder(request, bench):
    """The name of a builder that works on this bench."""
    if request.param == "docker":
        bench.environment |= request.getfixturevalue("docker_daemon").environment
    return request.param


def torch_options() -> list[str]:
    """The environment of these tests, shown read-only inside an image: torch is not copied into any image."""
    folders = {sys.prefix, sys.base_prefix, str(REPOSITORY)} - {"/usr"}  # the base image has the machine's own
    mounts = [part for one in sorted(folders) for part in ("--mount", one)]
    return [*mounts, "--python", sys.executable, "--env", f"PYTHONPATH={REPOSITORY}"]
