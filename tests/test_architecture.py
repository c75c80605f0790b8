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


PLANTED = {  # module and what it must not import
    "spec.run": "windlass.cli.main",
    "targets.slurm.client": "windlass.targets.local.client",
    "data.checks": "torch",
    "targets.kubernetes.entry": "windlass.targets.kubernetes.api.http",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the contract says of a copy of the project with a few imports more."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copytree(ROOT / "windlass", root / "windlass", ignore=shutil.ignore_patterns("__pycache__", "static"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for module, imported in PLANTED.items():
        with (root / "windlass" / f"{module.replace('.', '/')}.py").open("a") as file:
            file.write(f"\ndef late():\n    import {imported}\n")
    result = lint_imports(root)
    assert result.returncode == 1
    return result.stdout


def test_every_room_imports_only_what_stands_below_it() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", PLANTED)
def test_a_planted_import_is_found(module: str, report: str) -> None:
    assert f"windlass.{module} -> {PLANTED[module]} " in report


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
