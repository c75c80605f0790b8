"""The loss curve in characters."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.cli.runs.summary import draw_curve

VALUES = st.floats(min_value=-1e6, max_value=1e6) | st.just(math.nan) | st.just(math.inf)


@given(st.lists(VALUES, max_size=300), st.integers(10, 120), st.integers(2, 20), st.booleans())
def test_any_values_can_be_drawn(values, width, height, braille):
    text = draw_curve(list(enumerate(values)), width=width, height=height, braille=braille)
    assert text
    if any(map(math.isfinite, values)):
        assert len(text.splitlines()) in (height + 2, height + 3)
    if not braille:
        assert text.isascii()


def test_a_falling_curve_falls():
    text = draw_curve([(step, 100 - step) for step in range(1, 100)], width=40, height=5, title="loss", braille=False)
    title, *rows = text.splitlines()
    assert title == "loss"
    columns = [row.index("*") for row in rows[:5]]
    assert columns == sorted(columns)
    assert columns[0] < columns[-1]
    assert rows[0].split()[0] == "99"
    assert rows[4].split()[0] == "1"
    assert rows[-1].split() == ["1", "99"]


@pytest.mark.parametrize("points", [[(1, 5.0)], [(1, 5.0), (2, 5.0)]])
def test_one_value_has_a_label(points):
    assert "5" in draw_curve(points, height=3)


def test_what_is_not_finite_is_counted():
    assert "2 of 3 values are not finite" in draw_curve([(1, 1.0), (2, math.nan), (3, math.inf)])
    assert draw_curve([(1, math.nan)], title="loss") == "loss: nothing to draw"
    assert draw_curve([], title="loss") == "loss: no points yet"
