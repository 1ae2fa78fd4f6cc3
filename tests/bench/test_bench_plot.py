"""Plots are read by people: their axis has round numbers."""

from __future__ import annotations

import pytest

from tests.bench.plot import Line, line_plot, ticks


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (-8, 28, [-5, 0, 5, 10, 15, 20, 25]),
        (1, 60, [10, 20, 30, 40, 50, 60]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3, 3, [3]),
    ],
)
def test_an_axis_has_round_numbers_within_its_range(first: float, last: float, expected: list[float]) -> None:
    assert ticks(first, last) == pytest.approx(expected)


def test_a_plot_names_its_lines_and_escapes_them() -> None:
    text = line_plot("a < b", "across", "up", [Line("x & y", [0.0, 1.0])], top=1.0, marks=[(1.0, "reset")])
    assert "a &lt; b" in text
    assert "x &amp; y" in text
    assert text.count("<polyline") == 1
