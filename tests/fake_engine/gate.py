"""Points at which a fake engine's thread can be held: a fault between two instructions, without any timing."""

from __future__ import annotations

import threading
from typing import Final

BEFORE_EFFECT: Final = "before_effect"
"""The request was taken up in time, nothing has changed yet."""
AFTER_EFFECT: Final = "after_effect"
"""The change is made and noted, nobody has been answered."""
POINTS: Final = (BEFORE_EFFECT, AFTER_EFFECT)

LONGEST_S: Final = 100.0
"""An engine that is held is let go by itself after this, so that no test waits for ever."""


class Gate:
    """Open, but for the one point at which the next to come is held."""

    def __init__(self) -> None:
        self._point = ""
        self._there = threading.Event()
        self._go = threading.Event()

    def hold_at(self, point: str) -> None:
        """Hold the engine's thread when it next comes to this point. Any thread may call it, like all but `pass_by`."""
        if point not in POINTS:
            raise ValueError(f"no such point: {point!r}; there are {', '.join(POINTS)}")
        self._there.clear()
        self._go.clear()
        self._point = point

    def wait_held(self, seconds: float) -> bool:
        """Wait until it is there; whether it came in time."""
        return self._there.wait(seconds)

    def let_go(self) -> None:
        """Go on, and hold nobody any more."""
        self._point = ""
        self._go.set()

    def pass_by(self, point: str) -> None:
        """The engine's thread is at a point."""
        if point == self._point:
            self._point = ""
            self._there.set()
            self._go.wait(LONGEST_S)
