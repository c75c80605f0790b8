"""Write the pages and schemas of docs/ that come from the code: the run file, the facts and classes of `why`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from windlass.cli.reference import Key, options_of_targets, sections
from windlass.diagnose.classes import CLASSES
from windlass.diagnose.facts import schema as facts_schema
from windlass.spec import Run

DOCS = Path(__file__).parents[1] / "docs"


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


BEGIN, END = "<!-- classes: written by `make docs` -->", "<!-- end of classes -->"


def why_page() -> str:
    """docs/why.md with its table of classes as the code has them."""
    text = (DOCS / "why.md").read_text(encoding="utf-8")
    rows = [f"| `{one.name}` | {one.kind} | {one.retry} | {one.cause} | {one.fix} |" for one in CLASSES.values()]
    table = "\n".join(["| class | kind | retry | what happened | what to do |", "|---|---|---|---|---|", *rows])
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def pages() -> dict[Path, str]:
    return {
        DOCS / "run-file.md": run_file_page(),
        DOCS / "run.schema.json": schema(),
        DOCS / "facts.schema.json": json.dumps(facts_schema(), indent=2) + "\n",
        DOCS / "why.md": why_page(),
    }


def main() -> int:
    DOCS.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
