"""The score on the cases from the field that the rules were written with."""

from __future__ import annotations

from pathlib import Path

from tests.diagnose.score import accuracy, score

CASES = Path(__file__).parent / "cases"
REACHED = 1.0


def test_the_score_on_known_cases_does_not_fall():
    results = score(CASES)
    wrong = [(one.case, one.expected, one.verdict.name) for one in results if not one.is_right]
    assert len(results) >= 130
    assert accuracy(results) >= REACHED, wrong
    assert not any(one.is_confused for one in results)


def test_the_room_imports_no_target_and_no_client():
    import re

    room = Path(__file__).parents[2] / "windlass" / "diagnose"
    imports = {
        found
        for path in room.rglob("*.py")
        for found in re.findall(r"^\s*from (windlass[\w.]*) import", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    outside = {name for name in imports if not name.startswith(("windlass.diagnose", "windlass.common"))}
    assert outside <= {"windlass.errors", "windlass.runfolder", "windlass.spec"}
