"""Fetch uPlot from the npm registry into windlass/ui/static/vendor: `python tools/vendor_uplot.py [VERSION]`.

The files, their licence and their checksums are committed; `--check` compares what is there with the manifest.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "1.6.32"
REGISTRY = "https://registry.npmjs.org/uplot/-/uplot-{}.tgz"
FILES = {
    "package/dist/uPlot.iife.min.js": "uPlot.js",
    "package/dist/uPlot.min.css": "uPlot.css",
    "package/LICENSE": "uPlot.LICENSE",
}
VENDOR = Path(__file__).parents[1] / "windlass" / "ui" / "static" / "vendor"
MANIFEST = VENDOR / "manifest.json"


def fetch(version: str) -> None:
    with urllib.request.urlopen(REGISTRY.format(version)) as answer:
        archive = answer.read()
    sums = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for member, name in FILES.items():
            file = package.extractfile(member)
            assert file is not None
            content = file.read()
            (VENDOR / name).write_bytes(content)
            sums[name] = hashlib.sha256(content).hexdigest()
    about = {"package": "uplot", "version": version, "licence": "MIT", "sha256": sums}
    MANIFEST.write_text(json.dumps(about, indent=2) + "\n")


def wrong_files() -> list[str]:
    sums = json.loads(MANIFEST.read_text())["sha256"]
    return [name for name, sum_ in sums.items() if hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() != sum_]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit("\n".join(wrong_files()) or 0)
    fetch(sys.argv[1] if len(sys.argv) > 1 else VERSION)
