"""`python -m tests.gpu`: every case as a table; exit code 1 where one failed, 0 also where all were skipped."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.gpu.runner import run_all, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--keep", type=Path, help="run folders, logs and the table go here and stay")
    parser.add_argument("--only-equal", action="store_true", help="compare numbers, hurt nobody")
    parser.add_argument("--only", default="", help="names of cases, with commas; also sigstop, kill, torchrun")
    asked = parser.parse_args()
    only = [name for name in asked.only.split(",") if name]
    if asked.keep:
        asked.keep.mkdir(parents=True, exist_ok=True)
        return report(asked.keep, only_equal=asked.only_equal, only=only)
    with tempfile.TemporaryDirectory(prefix="windlass-gpu-") as root:
        return report(Path(root), only_equal=asked.only_equal, only=only)


def report(root: Path, *, only_equal: bool, only: list[str]) -> int:
    rows = run_all(root, only_equal=only_equal, only=only)
    text = table(rows)
    (root / "table.md").write_text(text + "\n")
    print(text)
    failed = [row for row in rows if row.ok is False]
    skipped = [row for row in rows if row.ok is None]
    print(f"{len(rows)} rows: {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
