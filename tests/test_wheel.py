"""What is in the wheel, and that it trains by itself, without the repository beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = {
    ".json",
    ".yaml",
    ".jinja",
    ".gz",
    ".js",
    ".css",
    ".html",
    ".svg",
    ".md",
    ".LICENSE",
}  # beside .py, inside windlass/
LARGEST = 3 * 2**20  # bytes of the wheel
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, kept.split("\0")):
        if name.startswith(("windlass/", "docs/windlass.1", "pyproject.toml", "README.md", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", str(source), "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.stat().st_size < LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    inside = [name for name in names if name.startswith("windlass/")]
    others = [name for name in names if name not in inside]
    assert not [name for name in inside if "/tests/" in name or Path(name).name.startswith("test_")]
    assert {Path(name).suffix for name in inside} - {".py"} <= DATA
    assert all(".dist-info/" in name or name.endswith("share/man/man1/windlass.1") for name in others), others
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "windlass").rglob("*.py")}
    assert tracked <= set(inside)


@pytest.mark.train
def test_the_example_notebook_runs_with_the_wheel_alone(wheel, tmp_path):
    """Its cells as a script, `!windlass` as a process, with fewer steps."""
    place = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = code.replace("train.steps=60", "train.steps=6")
    script = re.sub(r"^!(.*)$", r"subprocess.run('\1'.split(), check=True)", code, flags=re.MULTILINE)
    ending = "import windlass\nprint(json.dumps([shown, losses, windlass.__file__]))\n"
    environment = {**os.environ, "PYTHONPATH": str(place), "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    environment.pop("WINDLASS_RUNS", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import subprocess\n{script}\n{ending}"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown, losses, origin = json.loads(done.stdout.splitlines()[-1])
    assert origin.startswith(str(place))
    assert (shown["state"], len(losses)) == ("finished", 6)
    assert (tmp_path / "runs" / "notebook" / "export" / "config.json").is_file()
