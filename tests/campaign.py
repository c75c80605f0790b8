"""Long campaigns: every `make test` runs their first cases, `make test-campaigns` all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def campaign(cases: Sequence[Any], *, always: int, marks: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    """Parameters for pytest; those after the first `always` are left out of `make test`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=[*marks, pytest.mark.campaign, *([pytest.mark.campaign_only] * (index >= always))])
        for index, row in enumerate(rows)
    ]
