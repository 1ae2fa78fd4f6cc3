"""An asyncio event loop on which time passes only when nothing else can happen, and then in one jump.

A test of minutes of waiting takes milliseconds and cannot depend on how busy the machine is. For code without real I/O:
a loop that waits for a socket would jump over the wait.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left that could ever happen: the code under test waits for ever")
        self.now += max(0.0, timeout)
        return super().select(0)


class FakeTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = _JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end on a fresh loop."""
    loop = FakeTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
