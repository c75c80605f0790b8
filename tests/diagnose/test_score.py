"""The score on the cases from the field that the rules were written with."""

from __future__ import annotations

from pathlib import Path

from tests.diagnose.score import accuracy, score

CASES = Path(__file__).parent / "cases"
REACHED = 1.0


def test_the_score_on_known_cases_does_not_fall():
    results = score(CASES)
    wrong = [(result.case, result.expected, result.verdict.name) for result in results if not result.is_right]
    assert len(results) >= 410
    assert accuracy(results) >= REACHED, wrong
    assert not any(result.is_confused for result in results)
