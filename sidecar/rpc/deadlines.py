"""Deadlines that shrink a hop, on the one clock that never steps.

gRPC does not pass a deadline on by itself, and its `time_remaining()` subtracts the wall clock, so a clock stepped by
an hour makes a call an hour late. A handler therefore asks once, at its start, and counts on CLOCK_MONOTONIC from
there. Each hop keeps a margin, so that it can still say what happened when the next hop does not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

from sidecar.rpc.late_calls import NOT_AFTER_NS

DEFAULT_BUDGET_S: Final = 30.0
"""Budget of a call that came without a deadline, seconds."""

MAX_BUDGET_S: Final = 3600.0
"""Longest budget; more is cut, so that no wait here is without bound."""

_LEAST_MARGIN_S: Final = 0.050
_LARGEST_MARGIN_S: Final = 0.500
_MARGIN_SHARE: Final = 0.05
_LAST_WORDS_S: Final = 0.020


class Timed(Protocol):
    """The part of a servicer context that knows the caller's deadline."""

    def time_remaining(self) -> float | None:
        """Seconds left; None when the caller set no deadline."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant on CLOCK_MONOTONIC, nanoseconds."""

    at_ns: int

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """That many seconds from now."""
        return cls(time.monotonic_ns() + int(min(max(seconds, 0.0), MAX_BUDGET_S) * 1e9))

    @classmethod
    def of_call(cls, context: Timed, default_s: float = DEFAULT_BUDGET_S) -> Deadline:
        """The caller's deadline. Call this first thing in a handler. The length of time that came with the call begins
        anew at its arrival, so the instant that its caller named, if it did, comes first (see `late_calls`).
        """
        remaining = context.time_remaining()
        counted = cls.after(default_s if remaining is None else remaining)
        named_ns = NOT_AFTER_NS.get()
        return counted if named_ns is None else cls(min(named_ns, counted.at_ns))

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, (self.at_ns - time.monotonic_ns()) / 1e9)

    def passed(self) -> bool:
        """Whether it lies in the past."""
        return time.monotonic_ns() >= self.at_ns

    def until_last_words(self) -> float:
        """Seconds to wait for an outcome; the rest, 20 ms and at most a quarter of it, is for telling it."""
        left = self.remaining()
        return left - min(_LAST_WORDS_S, left / 4)

    def for_next_hop(self) -> Deadline:
        """What the next hop is given: this minus a margin of 5%, at least 50 ms, at most 500 ms."""
        return Deadline(self.at_ns - int(margin(self.remaining()) * 1e9))


def margin(budget_s: float) -> float:
    """Seconds a hop keeps of its budget: 5% of it, at least 50 ms, at most 500 ms, never all of it."""
    wanted = min(max(_LEAST_MARGIN_S, budget_s * _MARGIN_SHARE), _LARGEST_MARGIN_S)
    return min(wanted, budget_s / 2)
