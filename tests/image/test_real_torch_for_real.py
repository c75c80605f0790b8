"""An image as planned, with torch's own wheel: built, trained in, pushed, pulled back by digest.

Gigabytes and minutes, so only where a folder with the wheels is named (one download serves every run):

    pip download --only-binary :all: -d WHEELS torch==2.15.0 -r <(python -m tests.image.test_real_torch_for_real)
    WINDLASS_TEST_WHEELS=WHEELS pytest -m image tests/image/test_real_torch_for_real.py
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading

import pytest

from tests.image.conftest import Bench
from tests.image.rig import BASE, Workplace
from windlass.image.plan.write import own_requirements

pytestmark = pytest.mark.image
FOLDER = os.environ.get("WINDLASS_TEST_WHEELS")

RUN = """\
model: {{preset: llama-tiny}}
data: {{source: 'corpus:austen', sequence_length: 32}}
image: {{base: {base}, name: {name}}}
"""


@pytest.fixture
def wheels(builder, request):
    """The folder's wheels over HTTP, as pip --find-links takes them, where a build finds this machine."""
    host = request.getfixturevalue("docker_daemon").gateway if builder == "docker" else "127.0.0.1"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=FOLDER)
    with http.server.ThreadingHTTPServer((host, 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{host}:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def base(builder, workplace, wheels, request):
    image = workplace.make_base_with_tools(wheels)
    if builder == "docker":
        daemon = request.getfixturevalue("docker_daemon")
        daemon.take_over(workplace, image)
        yield image
        daemon.take_over(workplace, BASE)  # for the tests that come after: it forgets its images in this one
    else:
        yield image


@pytest.fixture
def elsewhere(tmp_path):
    """A machine that has no layer of any image."""
    place = Workplace(tmp_path / "elsewhere")
    yield Bench(tmp_path, place.environment)
    place.close()


@pytest.mark.skipif(not FOLDER, reason="WINDLASS_TEST_WHEELS names no folder with torch's wheels")
def test_a_planned_image_with_torchs_own_wheel_trains_and_comes_back_by_digest(
    bench, builder, base, elsewhere, registry, request
):
    name = f"{registry.host}/team/planned"
    bench.write(**{"my.yaml": RUN.format(base=base, name=name)})
    nodes = ("--gpu", "h100", "--driver", "580.95")
    planned = bench.result("plan", "my.yaml", *nodes)
    torch = {one["what"]: one["value"] for one in planned["choices"]}["torch"]
    assert f"RUN pip install --no-cache-dir torch=={torch}" in planned["dockerfile"]
    assert planned["conflicts"] == []

    built = bench.result("build", "my.yaml", *nodes, "--builder", builder, "--test", "full")
    assert (built["attempts"], built["fixes"]) == (1, [])
    checks = {one["name"]: one for one in built["proof"]["checks"]}
    assert built["proof"]["passed"], checks
    assert built["proof"]["loaded"]["torch"].startswith(torch)
    assert built["proof"]["loaded"]["nccl"]
    assert "gradients finite" in checks["model"]["detail"]
    assert checks["smoke"]["detail"].startswith("windlass trained 2 steps, loss ")

    pushed = bench.result("push", "my.yaml", "--builder", builder)
    assert pushed["pinned"] == f"{name}@{pushed['digest']}"
    if builder == "docker":
        request.getfixturevalue("docker_daemon").forget_images()
        again = bench.result("test", pushed["pinned"], "--level", "standard", "--builder", "docker")
    else:
        again = elsewhere.result("test", pushed["pinned"], "--level", "standard", "--builder", "podman")
    assert (again["image"], again["passed"]) == (pushed["pinned"], True)
    assert again["loaded"]["torch"] == built["proof"]["loaded"]["torch"]
    print(json.dumps({"built": built["proof"], "pushed": pushed, "again": again}))


if __name__ == "__main__":
    print("\n".join(own_requirements()))
