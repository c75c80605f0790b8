"""Score the judgement on a folder of cases: `python -m tests.image.score FOLDER [--verbose]`.

A case is a folder with a Dockerfile, the files of its context, and expect.json: the target, and what is wrong where.
A conflict counts as found where an error names one of its lines. Of the files only totals are printed unless asked.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from windlass.image.build.context import code_files, context_names, text_files
from windlass.image.facts.node import Node, node_named
from windlass.image.judge import Healed, heal
from windlass.image.read.texts import Texts
from windlass.image.rules import Finding
from windlass.image.state.model import Where
from windlass.image.state.resolver import Index

CASES = Path(__file__).parent / "cases"


@dataclass
class Score:
    conflicts: int = 0
    found: int = 0
    broken: int = 0
    passed: int = 0  # broken images with neither an error nor a "not checked"
    unsure: int = 0  # broken images with no error, but a "not checked"
    sound: int = 0
    alarms: int = 0  # sound images with an error
    edits: int = 0  # sound images with a patch
    patches: int = 0
    healed: int = 0  # patched files that pass the plan
    lines: list[str] = field(default_factory=list)

    def totals(self) -> list[str]:
        return [
            f"conflicts found with the right line: {self.found} of {self.conflicts}",
            f"broken images that passed: {self.passed} of {self.broken}, and {self.unsure} with only a 'not checked'",
            f"sound images with a false alarm: {self.alarms} of {self.sound}; with a needless edit: {self.edits}",
            f"patches: {self.patches}, of which the patched file passes: {self.healed}",
        ]


class RecordingIndex(Index):
    """An index that remembers every answer that was used."""

    used: ClassVar[dict[str, Any]] = {}

    def _kept(self, key: str, max_age: float | None) -> Any:
        value = super()._kept(key, max_age)
        self._use(key, value)
        return value

    def _keep(self, key: str, value: Any) -> None:
        self._use(key, value)
        super()._keep(key, value)

    def _use(self, key: str, value: Any) -> None:
        if value is not None and not (isinstance(value, dict) and "provided" in value):  # not the archives' whole lists
            self.used[key] = value


def recorded_index(folder: Path) -> Index:
    """The recorded answers, unpacked into a folder; what was not recorded is not asked."""
    for key, value in json.loads(lzma.decompress((CASES / "index.json.xz").read_bytes())).items():
        (folder / f"{key}.json").write_text(json.dumps(value))
    return Index(cache=folder, max_age=None, offline=True)


def load(folder: Path) -> tuple[Texts, Node, dict]:
    expected = _expected(folder)
    ours = ("Dockerfile", "expect.json", "case.json")
    names = context_names(folder) - set(ours)
    files, code = text_files(folder, leave_out=ours), code_files(folder)
    texts = Texts((folder / "Dockerfile").read_text(), files, names=names, code=code)
    target = expected["target"]
    node = node_named(target["gpu"], target["driver"], target["platform"], efa=bool(target.get("efa")))
    return texts, node, expected


def is_case(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("expect.json", "case.json"))


def _expected(folder: Path) -> dict:
    """The repository's own expect.json; or the flat case.json of cases that are collected elsewhere."""
    if (folder / "expect.json").is_file():
        return json.loads((folder / "expect.json").read_text())
    case = json.loads((folder / "case.json").read_text())
    conflicts = [{"also_lines": [], "what": conflict.get("why", ""), **conflict} for conflict in case["conflicts"]]
    return {"target": case, "broken": not case["sound"], "conflicts": conflicts}


# What a finding must be about to count for a kind of conflict; of a kind that is not listed, any error counts.
MEANINGS = {
    "companion-mismatch": r"-of-|-build$|-abi$|prebuilt|contradiction|another-torch|replaced",
    "compute-capability": r"gpu-architecture|nvcc-too|architecture-list",
    "torch-replaced": r"replaced|base-torch|contradiction|-of-",
    "built-against-other-torch": r"compiled-for-another|flash-attn|-abi$",
    "build-isolation": r"build-isolation|build-before-torch|build-module",
    "build-before-torch": r"build-isolation|build-before-torch",
    "no-nvcc": r"no-nvcc|nvcc",
    "driver-too-old": r"driver",
    "numpy-abi": r"numpy",
    "wheel-missing": r"no-wheel|no-version|python-version|wheel-|contradiction|build-isolation",  # so it is built
    "cpu-only-torch": r"cpu-only",
    "secret-in-env": r"secret",
    "secret-in-arg": r"secret",
    "secret-in-run": r"secret",
    "missing-system-library": r"missing",
    "missing-tool": r"missing|no-compiler",
    "efa-not-found": r"efa",
    "copied-environment": r"copied",
    "uv": r"uv-",
    "externally-managed": r"managed",
    "companion-or-abi": r"-abi$|another-torch|-of-",
    "numpy-api": r"numpy|import-of",
    "import": r"import-of|build-module",
    "library": r"missing|cuda-of-package",
    "wheel-missing-or-tool": r"no-wheel|no-version|wheel-|no-compiler|missing",
}


def places(conflict: dict) -> set[tuple[str, int]]:
    """The file and line of a conflict, and others that are right as well."""
    file = conflict.get("file") or "Dockerfile"
    told = {(file, conflict["line"]), *((file, line) for line in conflict["also_lines"])}
    return told | {(also["file"], also["line"]) for also in conflict.get("also", ())}


def names(finding: Finding, right: set[tuple[str, int]], kind: str) -> bool:
    """Whether a finding of that meaning names one of the lines: its command, its instruction, the other party."""
    if finding.where is None or not re.search(MEANINGS.get(kind, ""), finding.id):
        return False
    where = finding.where
    told = {(one.file, one.line) for one in (where.place, where.cause)} | {("Dockerfile", where.first)}
    told |= {(file, int(number)) for file, number in re.findall(r"([\w./-]+):(\d+)", finding.sentence)}
    return bool(told & right)


def score_case(folder: Path, index: Index, score: Score) -> Healed:
    texts, node, expected = load(folder)
    healed = heal(texts, node, index)
    verdict = healed.before
    used: set[tuple[str, Where | None]] = set()
    misses = []
    for conflict in expected["conflicts"]:
        right = places(conflict)
        score.conflicts += 1
        hit = next(
            (one for one in verdict.errors if (one.id, one.where) not in used and names(one, right, conflict["kind"])),
            None,
        )
        if hit:
            score.found += 1
            used.add((hit.id, hit.where))  # conflicts that share a line count apart
        else:
            misses.append(conflict)
    state = "ok"
    if expected["broken"]:
        score.broken += 1
        if not verdict.errors:
            score.unsure += bool(verdict.unknown)
            score.passed += not verdict.unknown
        state = "MISSED" if misses else "ok"
    else:
        score.sound += 1
        score.alarms += bool(verdict.errors)
        score.edits += bool(healed.diff)
        state = "ALARM" if verdict.errors or healed.diff else "ok"
    if healed.diff:
        score.patches += 1
        score.healed += not healed.after.errors
    score.lines.append(f"{state:<7}{folder.name}")
    score.lines += [f"       missed {one['line']} {one['kind']}: {one['what'][:150]}" for one in misses]
    score.lines += [f"       {one.severity} {one.id} {one.where}: {one.sentence[:170]}" for one in verdict.findings]
    score.lines += [f"       unknown {one[:150]}" for one in verdict.unknown]
    score.lines += [f"       | {line}" for line in healed.diff.splitlines()]
    return healed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--record", action="store_true", help="write the answers of the index to FOLDER/index.json.xz")
    asked = parser.parse_args(arguments)
    score, index = Score(), RecordingIndex() if asked.record else Index()
    failures: Counter[str] = Counter()
    for folder in sorted(folder for folder in asked.folder.iterdir() if is_case(folder)):
        if not folder.name.startswith(asked.only):
            continue
        before = len(score.lines)
        try:
            score_case(folder, index, score)
        except Exception as error:  # a case that cannot be judged is a miss, and the others are still counted
            failures[type(error).__name__] += 1
            score.lines.append(f"CRASH  {folder.name}: {type(error).__name__}: {error}")
            if asked.verbose:
                import traceback

                traceback.print_exc()
        if asked.verbose:
            print("\n".join(score.lines[before:]), flush=True)
    print("\n".join(score.totals()))
    if asked.record:
        text = json.dumps(RecordingIndex.used, sort_keys=True)
        (asked.folder / "index.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
    if failures:
        print(f"crashes: {dict(failures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
