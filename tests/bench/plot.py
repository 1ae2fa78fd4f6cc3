"""A line plot as SVG text, readable on light and dark pages: enough for docs/, without a plotting package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 58, 46
COLOURS = ("#d1495b", "#2e86ab", "#5c9e31", "#c77d0a")


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float]
    """One a step of the horizontal axis."""
    xs: Sequence[float] | None = None
    """Where each value lies; None: 1, 2, 3 ..."""


def ticks(first: float, last: float) -> list[float]:
    """Round numbers from `first` to `last`, at most ten."""
    span = (last - first) or 1.0
    steps = (factor * 10.0**power for power in range(-3, 9) for factor in (1, 2, 5))
    step = next(step for step in steps if span / step < 10)
    return [index * step for index in range(ceil(first / step), floor(last / step) + 1)]


def line_plot(
    title: str, across: str, up: str, lines: Sequence[Line], *, top: float, marks: Sequence[tuple[float, str]] = ()
) -> str:
    """`top`: highest value of the vertical axis, which starts at 0. `marks`: vertical lines with a word each."""
    positions = [list(line.xs or range(1, len(line.values) + 1)) for line in lines]
    first = min(min(each) for each in positions)
    last = max(max(each) for each in positions)

    def x(value: float) -> float:
        return LEFT + (value - first) / ((last - first) or 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - min(value, top) / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for at in ticks(first, last):
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{at:g}</text>')
    for at, word in marks:
        parts.append(f'<path d="M{x(at):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#888888" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x(at) + 4:.1f}" y="{TOP + 12}" fill="#555555">{escape(word)}</text>')
    key = LEFT
    for line, xs, colour in zip(lines, positions, COLOURS, strict=False):
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in zip(xs, line.values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<path d="M{key} 38h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{key + 24}" y="42">{escape(line.name)}</text>')
        key += 44 + 7 * len(line.name)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>'
    )
    turned = f'transform="rotate(-90 16 {middle})"'
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" {turned}>{escape(up)}</text>')
    return "\n".join([*parts, "</svg>", ""])
