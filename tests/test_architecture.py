"""Which room may import which, and that rooms stay small enough to look around in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_MODULES = 15


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, env={"PYTHONPATH": str(root), "COLUMNS": "200"}
    )


def planted(tmp_path: Path, module: str, line: str) -> Path:
    """A copy of the project with one import more."""
    shutil.copytree(ROOT / "windlass", tmp_path / "windlass", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    return tmp_path


def test_every_room_imports_only_what_stands_below_it() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "line", "named"),
    [
        ("windlass/spec/run.py", "import windlass.cli.main", "windlass.spec.run -> windlass.cli.main"),
        ("windlass/targets/slurm/client.py", "import windlass.targets.local.client", "windlass.targets.local.client"),
        ("windlass/data/checks.py", "def late():\n    import torch", "windlass.data.checks -> torch"),
        ("windlass/targets/kubernetes/entry.py", "import windlass.targets.kubernetes.api.http", "kubernetes.api.http"),
    ],
)
def test_a_planted_import_is_found(module: str, line: str, named: str, tmp_path: Path) -> None:
    result = lint_imports(planted(tmp_path, module, line))
    assert result.returncode == 1
    assert named in result.stdout


def folders_of_modules() -> dict[str, int]:
    folders = {path.parent for path in (ROOT / "windlass").rglob("*.py")} - {ROOT / "windlass"}
    return {folder.relative_to(ROOT / "windlass").as_posix(): len(list(folder.glob("*.py"))) for folder in folders}


def test_every_folder_can_be_looked_over() -> None:
    crowded = {folder: count for folder, count in folders_of_modules().items() if count > MOST_MODULES + 1}
    assert not crowded, "more than fifteen modules beside __init__"


def test_the_map_names_every_folder_once() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text().split("<!-- rooms -->")[1]
    named = re.findall(r"^\| \**`([\w/]+)/`\** \|", table, re.MULTILINE)
    assert sorted(named) == sorted(folders_of_modules().keys() - {"targets"}), "python tools/make_docs.py"  # by its own


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_the_pages_name_is_there(page: str) -> None:
    """A path may be short where its paragraph says in which room it is."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    places = (ROOT, *(ROOT / "windlass" / room for room in ("", "targets/kubernetes", "targets/local", "trainer")))
    for name in re.findall(r"`([\w.]+/[\w./*-]*|\w+\.py)(?::\w+)?`", text):
        patterns = (name.rstrip("/"), f"{name}.py")
        assert any(list(place.glob(pattern)) for place in places for pattern in patterns), name
