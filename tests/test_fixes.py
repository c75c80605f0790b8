"""Where a user's own words are judged, every error says what mends it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

WINDLASS = Path(__file__).parent.parent / "windlass"
ROOMS = ("agent", "api", "catalog", "cli", "image/plan", "plan", "spec")


@pytest.mark.parametrize("room", ROOMS)
def test_every_error_of_a_users_words_has_a_fix(room: str) -> None:
    without = [
        f"{path.relative_to(WINDLASS)}:{call.lineno}: {ast.unparse(call.args[0])}"
        for path in sorted((WINDLASS / room).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "UserError"
        if not any(keyword.arg == "fix" for keyword in call.keywords)
    ]
    assert without == []
