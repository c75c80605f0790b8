"""The same under pytest: one test per case, which says why where it is skipped."""

from __future__ import annotations

import pytest

from tests.gpu.runner import Row, names, run_all

pytestmark = [pytest.mark.train, pytest.mark.slow]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return run_all(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("name", names())
def test_case(name: str, rows: list[Row]) -> None:
    mine = [row for row in rows if row.case.startswith(name)]
    assert mine, f"{name} is not among {[row.case for row in rows]}"
    if all(row.ok is None for row in mine):
        pytest.skip(mine[0].says)
    assert [row.cells() for row in mine if row.ok is False] == []
