"""Score the rules on a folder of cases: `python -m tests.diagnose.score FOLDER [--wrong]`.

A case is a JSON file `{"expect": {"class", "also_accepted", "kind"}, "facts": {…}}`; a file may hold a list of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.diagnose import Facts, Verdict, diagnose
from windlass.diagnose.classes import CLASSES

USERS, PLATFORMS = ("user",), ("infra",)


@dataclass(frozen=True)
class Result:
    case: str
    expected: str
    accepted: tuple[str, ...]
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        return self.verdict.name in (self.expected, *self.accepted)

    @property
    def is_confused(self) -> bool:
        """A user's error blamed on the infrastructure, or the reverse."""
        kinds = {CLASSES[self.expected].kind, *(CLASSES[name].kind for name in self.accepted if name in CLASSES)}
        blamed = self.verdict.kind
        return (blamed in PLATFORMS and kinds <= set(USERS)) or (blamed in USERS and kinds <= set(PLATFORMS))


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.json")):
        value = json.loads(path.read_text(encoding="utf-8"))
        for index, case in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(case, dict) and "expect" in case:
                yield str(case.get("id") or (f"{path.stem}#{index}" if isinstance(value, list) else path.stem)), case


def score(folder: Path) -> list[Result]:
    results = []
    for name, case in cases(folder):
        expect = case["expect"]
        verdict = diagnose(Facts.read(case.get("facts")))
        results.append(Result(name, expect["class"], tuple(expect.get("also_accepted") or ()), verdict))
    return results


def accuracy(results: list[Result]) -> float:
    return sum(one.is_right for one in results) / max(1, len(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrong", action="store_true", help="list the cases that were told wrong")
    asked = parser.parse_args()
    results = score(asked.folder)
    told = Counter(one.expected if one.is_right else one.verdict.name for one in results)
    expected = Counter(one.expected for one in results)
    right = Counter(one.expected for one in results if one.is_right)
    print(f"{'class':<26}{'cases':>6}{'recall':>8}{'precision':>11}")
    for name in sorted(set(expected) | set(told)):
        recall = f"{right[name] / expected[name]:.2f}" if expected[name] else "–"
        precision = f"{right[name] / told[name]:.2f}" if told[name] else "–"
        print(f"{name:<26}{expected[name]:>6}{recall:>8}{precision:>11}")
    confused = [one for one in results if one.is_confused]
    print(f"\naccuracy {accuracy(results):.3f} ({sum(one.is_right for one in results)} of {len(results)})")
    print(f"user and infrastructure confused: {len(confused)}")
    for one in results if asked.wrong else confused:
        if not one.is_right or one.is_confused:
            line = one.verdict.evidence[0].line[:110] if one.verdict.evidence else ""
            print(f"  {one.case}: {one.expected} told as {one.verdict.name} ({one.verdict.confidence:.2f}) {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
