"""Builds that fail for real, with buildah and docker: what the log proves is changed in the open, the rest is said.

The packages are stand-ins with the names and versions of the published ones (tests/image/packages.py).
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.image

PIP = "FROM localhost/machine:12\nCOPY requirements.txt .\nRUN pip install --no-cache-dir -r requirements.txt\n"
# A package that imports torch while it is built, as flash-attn does.
BACKEND = """\
import torch, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "kernels-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("kernels.py", f"built_for = {torch.__version__!r}")
        wheel.writestr("kernels-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: kernels\\nVersion: 1.0\\n")
        wheel.writestr("kernels-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("kernels-1.0.dist-info/RECORD", "")
    return name
"""


def test_each_failed_attempt_is_followed_by_one_change_until_the_image_passes(bench, builder):
    dockerfile = (
        f"{PIP}COPY kernels /k\nRUN pip install --no-cache-dir /k\nRUN make --version\n"
        "USER 1000\nRUN pip install --no-cache-dir --prefix /usr safetensors==0.8.0\n"
    )
    (bench.folder / "kernels").mkdir()
    backend = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    bench.write(**{"Dockerfile": dockerfile, "requirements.txt": "torch==2.14.1\n", "kernels/backend.py": BACKEND})
    bench.write(**{"kernels/pyproject.toml": backend})
    built = bench.result("build", "--builder", builder, "--auto-fix", "--attempts", 4)
    assert built["proof"]["passed"]
    assert (built["attempts"], len({one["id"] for one in built["fixes"]})) == (4, 3)
    assert (bench.folder / "Dockerfile").read_text() == dockerfile, "the user's own file is as it was"
    changed = (bench.folder / "Dockerfile.windlass").read_text()
    assert "--no-build-isolation" in changed
    assert "apt-get install -y --no-install-recommends make" in changed
    assert "USER root" in changed


def test_what_cannot_be_fixed_ends_with_the_lines_that_matter(bench, builder):
    bench.write(**{"Dockerfile": PIP, "requirements.txt": "torch==2.14.1\ntrasnformers==5.22.2\n"})
    refused = bench.result("build", "--builder", builder, code=1)
    assert "attempt 1 of 3" in refused["error"]
    assert "No matching distribution found for trasnformers==5.22.2" in refused["evidence"]
    assert "--auto-fix" in refused["fix"]
    bench.write(**{"Dockerfile": f"{PIP}COPY weights.bin /weights.bin\n", "requirements.txt": "torch==2.14.1\n"})
    refused = bench.result("build", "--builder", builder, "--auto-fix", code=1)
    assert "weights.bin" in refused["evidence"]
    assert "the whole log is in" in refused["evidence"]
    assert not list(bench.folder.glob("*.windlass"))


def test_an_abi_that_does_not_fit_is_found_by_the_import_inside(bench):
    """It builds, and would fail on the nodes: flash-attn of another torch, seen only when it is imported."""
    bench.write(**{"Dockerfile": PIP, "requirements.txt": "torch==2.13.0\nflash-attn==2.8.3\n"})
    refused = bench.result("build", "--builder", "buildah", code=1)
    assert "undefined symbol" in refused["evidence"]
