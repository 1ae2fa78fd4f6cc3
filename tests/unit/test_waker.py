"""The waker's thread outlives any instant it is armed with: an engine that sleeps has nobody else to wake it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from engine_bridge.waker import Waker


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("instant", [2**61, 2**63 - 1, 2**64 - 1], ids=["73 years", "int64", "uint64"])
def test_a_timer_far_beyond_what_poll_takes_does_not_end_the_thread(instant: int, pipe: tuple[int, int]) -> None:
    woken = threading.Event()
    waker = Waker(pipe[0], woken.set)
    try:
        waker.arm(instant)
        waker._thread.join(0.2)
        assert waker._thread.is_alive()
        waker.arm(time.monotonic_ns() + 1_000_000)
        assert woken.wait(5), "the timer after it never fired"
        woken.clear()
        waker.arm(instant)
        os.write(pipe[1], b"x")
        assert woken.wait(5), "what arrived after it woke nobody"
    finally:
        waker.close()
