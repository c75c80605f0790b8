"""Score the rules on a folder of cases: `python -m tests.diagnose.score FOLDER [--wrong] [--totals]`.

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
    return sum(result.is_right for result in results) / max(1, len(results))


def table(title: str, expected: list[str], told: list[str], right: list[str]) -> None:
    """Recall and precision by class or kind."""
    print(f"{title:<26}{'cases':>6}{'recall':>8}{'precision':>11}")
    num_expected, num_told, num_right = Counter(expected), Counter(told), Counter(right)
    for name in sorted(set(expected) | set(told)):
        recall = f"{num_right[name] / num_expected[name]:.2f}" if num_expected[name] else "–"
        precision = f"{num_right[name] / num_told[name]:.2f}" if num_told[name] else "–"
        print(f"{name:<26}{num_expected[name]:>6}{recall:>8}{precision:>11}")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrong", action="store_true", help="list the cases that were told wrong")
    parser.add_argument("--totals", action="store_true", help="print nothing about single classes and cases")
    asked = parser.parse_args()
    results = score(asked.folder)
    confused = [result for result in results if result.is_confused]
    if not asked.totals:
        right = [result.expected for result in results if result.is_right]
        told = [result.expected if result.is_right else result.verdict.name for result in results]
        expected = [result.expected for result in results]
        table("class", expected, told, right)
        kinds = [[CLASSES[name].kind for name in names] for names in (expected, told)]
        same = [kind for kind, other in zip(*kinds, strict=True) if kind == other]
        table("kind", kinds[0], kinds[1], same)
    print(f"accuracy {accuracy(results):.3f} ({sum(one.is_right for one in results)} of {len(results)})")
    print(f"user and infrastructure confused: {len(confused)}")
    for result in () if asked.totals else results if asked.wrong else confused:
        if not result.is_right or result.is_confused:
            verdict = result.verdict
            line = verdict.evidence[0].line[:110] if verdict.evidence else ""
            print(f"  {result.case}: {result.expected} told as {verdict.name} ({verdict.confidence:.2f}) {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
