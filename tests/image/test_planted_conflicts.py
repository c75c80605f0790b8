"""Conflicts that were planted in a Dockerfile: found, changed in the open, and the changed build passes its test.

pip, apt and the builder are the real ones. The packages are stand-ins with the names, versions and requirements of the
published ones (tests/image/packages.py): what decides these conflicts is metadata, and torch has gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

pytestmark = pytest.mark.image

PIP = "FROM localhost/machine:12\nCOPY requirements.txt .\nRUN pip install --no-cache-dir -r requirements.txt\n"
TORCH = "RUN pip install --no-cache-dir torch==2.14.1\n"
# A package that imports torch while it is built, as flash-attn does.
KERNELS = {
    "kernels/pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "kernels/backend.py": """\
import torch, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "kernels-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("kernels.py", f"built_for = {torch.__version__!r}")
        wheel.writestr("kernels-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: kernels\\nVersion: 1.0\\n")
        wheel.writestr("kernels-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("kernels-1.0.dist-info/RECORD", "")
    return name
""",
}


@dataclass(frozen=True)
class Planted:
    """A project with a conflict in it, and what the change has to do."""

    name: str
    requirements: str = "torch==2.14.1\n"
    dockerfile: str = PIP
    files: dict[str, str] = field(default_factory=dict)
    then: str = ""
    """Is in a changed file afterwards."""
    gone: str = ""
    """Is in none."""
    first_build_fails: bool = True
    """Whether it takes a build to see it, or the texts show it."""


PLANTED = [
    Planted(
        "torchvision-of-another-torch", "torch==2.14.1\ntorchvision==0.28.0\n", gone="0.28.0", first_build_fails=False
    ),
    Planted("two-nccl", "torch==2.14.1\nnvidia-nccl-cu12==2.29.3\n", gone="cu12", first_build_fails=False),
    Planted("pip-cache", dockerfile=PIP.replace(" --no-cache-dir", ""), then="--no-cache-dir", first_build_fails=False),
    Planted(
        "agent-replaces-torch",
        "torch==2.14.1\nhyperpod-elastic-agent==1.1.3\n",
        then="torch==2.11.0",
        first_build_fails=False,
    ),
    Planted("misspelt-package", "torch==2.14.1\ntrasnformers==5.22.2\n", then="transformers", gone="trasnformers"),
    Planted("no-such-version", "torch==2.14.1\nsafetensors==0.8.7\n", then="0.8.0", gone="0.8.7"),
    Planted("pins-that-contradict", "torch==2.14.1\ntransformers==5.22.2\ntokenizers==0.20.0\n", gone="==0.20.0"),
    Planted("missing-program", dockerfile=PIP + "RUN make --version\n", then="apt-get install"),
    Planted(
        "apt-without-lists",
        dockerfile=PIP + "RUN apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*\n",
        then="apt-get update",
    ),
    Planted("managed-python", dockerfile=PIP.replace("machine", "managed"), then="BREAK_SYSTEM_PACKAGES"),
    Planted(
        "torch-while-building",
        dockerfile=f"FROM localhost/machine:12\n{TORCH}COPY kernels /k\nRUN pip install --no-cache-dir /k\n",
        files=KERNELS,
        then="--no-build-isolation",
    ),
    Planted(
        "no-longer-root",
        dockerfile="FROM localhost/machine:12\nUSER 1000\n" + TORCH.replace("pip install", "pip install --prefix /usr"),
        then="USER root",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def managed_base(workplace, tmp_path_factory):
    """As Debian and Ubuntu ship Python: pip may not touch it."""
    folder = tmp_path_factory.mktemp("managed")
    (folder / "Dockerfile").write_text(
        "FROM localhost/machine:12\nRUN for one in /usr/lib/python3.*; do touch $one/EXTERNALLY-MANAGED; done\n"
    )
    workplace.tool("buildah", "build", "--quiet", "--tag", "localhost/managed:12", str(folder))


def plant(bench, planted):
    texts = {"Dockerfile": planted.dockerfile, "requirements.txt": planted.requirements, **planted.files}
    for name, text in texts.items():
        (bench.folder / name).parent.mkdir(exist_ok=True)
        (bench.folder / name).write_text(text)
    return texts


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: one.name)
def test_it_is_found_and_the_changed_build_passes_its_test(bench, planted):
    texts = plant(bench, planted)
    built = bench.result("build", "--builder", "buildah", "--auto-fix", "--attempts", 4, "--sbom", "none")
    assert built["proof"]["passed"]
    assert built["fixes"]
    assert (built["attempts"] > 1) == planted.first_build_fails
    for name, text in texts.items():
        assert (bench.folder / name).read_text() == text  # the user's own files are as they were
    changed = "".join((bench.folder / path).read_text() for path in built["written"])
    assert planted.then in changed
    assert not planted.gone or planted.gone not in changed
    ids = [one["id"] for one in built["fixes"]]
    assert len(set(ids)) == len(ids)


def test_without_auto_fix_nothing_is_changed_and_the_lines_that_matter_are_shown(bench):
    plant(bench, Planted("", "torch==2.14.1\ntrasnformers==5.22.2\n"))
    refused = bench.result("build", "--builder", "buildah", code=1)
    assert "attempt 1 of 3" in refused["error"]
    assert "No matching distribution found for trasnformers==5.22.2" in refused["evidence"]
    assert "--auto-fix" in refused["fix"]
    assert not list(bench.folder.glob("*.windlass"))


def test_what_cannot_be_fixed_ends_with_the_lines_that_matter(bench):
    plant(bench, Planted("", dockerfile=PIP + "COPY weights.bin /weights.bin\n"))
    refused = bench.result("build", "--builder", "buildah", "--auto-fix", "--attempts", 4, code=1)
    assert "weights.bin" in refused["evidence"]
    assert "the whole log is in" in refused["evidence"]


def test_every_attempt_is_another_and_then_it_ends(bench):
    """Three things are wrong and two builds are allowed: each change is shown, and the end names what is left."""
    plant(bench, Planted("", "torch==2.14.1\ntrasnformers==5.22.2\nsafetensors==0.8.7\n", PIP + "RUN make --version\n"))
    answer = bench.windlass("build", "--builder", "buildah", "--auto-fix", "--attempts", 2)
    assert answer.returncode == 1
    assert answer.stderr.count("attempt ") >= 2
    assert answer.stderr.count("change: ") == 1
    assert "-trasnformers==5.22.2" in answer.stderr or "-safetensors==0.8.7" in answer.stderr
    assert "(attempt 2 of 2)" in answer.stderr


def test_an_abi_that_does_not_fit_is_found_by_the_import_inside(bench):
    """It builds, and would fail on the nodes: flash-attn of another torch, seen only when it is imported."""
    plant(bench, Planted("", "torch==2.13.0\nflash-attn==2.8.3\n"))
    refused = bench.result("build", "--builder", "buildah", code=1)
    assert "undefined symbol" in refused["evidence"]
