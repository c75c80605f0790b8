"""Write the pages that come from the code: the run file with its schema, and the rooms of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from pathlib import Path

from windlass.cli.reference import Key, options_of_targets, sections
from windlass.spec import Run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOMS = ("<!-- rooms -->\n", "<!-- /rooms -->")


def run_file_page() -> str:
    lines = [
        "# The run file",
        "",
        "Written by `make docs` from the code. `windlass schema --keys` prints it; `run.schema.json` is for editors.",
        "Only `model` and `data` are needed. On the command line: `windlass run my.yaml train.steps=200`.",
        "",
        "**A run file is code.** It chooses programs, images, folders and files to read and to send. Run one from",
        "somebody else as you would run their script: read it first, and look at `--dry-run`.",
    ]
    for section in (*sections(), *options_of_targets()):
        if section.name:
            lines += ["", f"## {section.name}", "", section.description]
        lines += ["", "| key | default | type | what it does |", "|---|---|---|---|"]
        lines += [_row(key) for key in section.keys]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{json.dumps(key.default)}`"
    cells = [f"`{key.path}`", default, key.kind, key.description]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def schema() -> str:
    return json.dumps(Run.model_json_schema(), indent=2) + "\n"


def architecture_page() -> str:
    """ARCHITECTURE.md with its table: rooms in the order of the import contract, each with its first line."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    lines = ["| room | what it is for |", "|---|---|"]
    for layer in contract["layers"]:
        for room in layer.split(" | "):
            path = ROOT.joinpath(*room.split("."))
            lines.append(f"| **`{_shown(path)}`** | {_first_line(path)} |")
            folders = sorted(child.parent for child in path.glob("*/__init__.py"))
            lines += [f"| `{_shown(folder)}` | {_first_line(folder)} |" for folder in folders]
    before, rest = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split(ROOMS[0])
    return before + ROOMS[0] + "\n".join(lines) + "\n" + ROOMS[1] + rest.split(ROOMS[1])[1]


def _shown(path: Path) -> str:
    name = path.relative_to(ROOT / "windlass").as_posix()
    return f"{name}/" if path.is_dir() else f"{name}.py"


def _first_line(path: Path) -> str:
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not docstring:
        raise SystemExit(f"error: {module.relative_to(ROOT)} does not say what it is for")
    return docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def pages() -> dict[Path, str]:
    return {
        DOCS / "run-file.md": run_file_page(),
        DOCS / "run.schema.json": schema(),
        ROOT / "ARCHITECTURE.md": architecture_page(),
    }


def main() -> int:
    DOCS.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
