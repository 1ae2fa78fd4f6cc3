"""What a terminal can show. Colour and Unicode only where they work; text of others is never trusted.

Messages come from replicas, which may be anyone: control characters in them could repaint the terminal of whoever
reads, so none gets through.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROWEST: Final = 40
WIDE: Final = 400
"""Width of -o wide, whatever the terminal's is: nothing is folded."""

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

COLOURS: Final = {"good": "green", "bad": "red", "doubtful": "yellow", "quiet": "bright_black", "": ""}


def dumb() -> bool:
    """Whether TERM names no terminal that can move its cursor. It is unset where a container got none."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def plain(stream: TextIO) -> bool:
    """Whether to print ASCII without colour: no terminal, a dumb one, NO_COLOR, or a locale that is C."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or dumb():
        return True
    return ascii_locale() or "utf" not in (stream.encoding or "").lower()


def ascii_locale() -> bool:
    """Whether the environment asks for ASCII, by the order that locale(7) gives."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        if value := os.environ.get(name):
            return value in ("C", "POSIX")
    return False


def console(stream: TextIO, *, wide: bool = False) -> Console:
    """A console on a stream: its terminal's width, else COLUMNS, else 80; `wide` is for lines as long as they are."""
    simple = plain(stream)
    width = WIDE if wide else None if stream.isatty() else _columns(80)
    return Console(
        file=stream,
        width=width,
        color_system=None if simple else "auto",
        no_color=simple,
        # Without colour a terminal still is one: its lines can be drawn again.
        force_terminal=None if stream.isatty() and not dumb() else False,
        highlight=False,
        emoji=False,
        markup=False,
        soft_wrap=False,
    )


def _columns(otherwise: int) -> int:
    text = os.environ.get("COLUMNS", "")
    return max(int(text), NARROWEST) if text.isdigit() and int(text) else otherwise


def clean(text: str) -> str:
    """One line without control characters."""
    return _CONTROL.sub("?", text.replace("\n", " ").replace("\t", " "))


def words(text: str, tone: str = "") -> Text:
    """Cleaned text in the colour of a tone: good, bad, doubtful, quiet."""
    return Text(clean(text), style=COLOURS[tone])


def table(*columns: str) -> Table:
    """A table without lines, columns two spaces apart. Names, addresses and the last column fold when there is no
    room; figures never do.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style="bold")
    for name in columns:
        folds = name in _FOLDING or name == columns[-1]
        made.add_column(name, no_wrap=not folds, overflow="fold" if folds else "crop")
    return made


FULL_WIDTH: Final = 80
"""Columns of text from which on a table has all of its columns; with less, as many as are readable."""


def fitting(columns: Sequence[str], rows: Sequence[Sequence[Text]], width: int, least: int) -> int:
    """How many columns, from the left, a terminal so wide has room for: at least so many, whatever it takes."""
    if width >= FULL_WIDTH:
        return len(columns)
    used = 0
    for number, name in enumerate(columns):
        used += max([len(name), *(row[number].cell_len for row in rows)])
        if used > width and number >= least:
            return number
        used += 2
    return len(columns)


_FOLDING: Final = frozenset({"REPLICA", "ADDRESS", "NAME", "LABELS", "WHAT", "MODEL", "FLEET"})


NAMED: Final = 6


def named(names: Sequence[str]) -> str:
    """The first names and how many more: r0, r1, r2, r3, r4, r5 and 294 more."""
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 block", "2 blocks"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def seconds(value: float) -> str:
    """A time for people: 0.40 ms, 31 ms, 2.1 s, 4 min, 3 h."""
    if value < 0.01:
        return f"{value * 1e3:.2f} ms"
    if value < 0.9995:  # what is left of 1 s is not 1000 ms
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"
