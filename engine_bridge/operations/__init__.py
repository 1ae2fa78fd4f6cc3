"""What kvctl does to an engine: decisions over the port, on the engine's thread.

An operation is a generator function `(port, request, context) -> Work[Verdict]`. It decides; the dispatcher runs it in
slices, times it, answers everybody who asked, and remembers the verdict. An operation that raises is answered with
"raised", so it catches nothing it cannot handle.

What an operation may rely on: its deadline had not passed when it started, no other operation runs on this engine, and
between two yields nothing else touches the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from engine_bridge import protocol
from engine_bridge.port import EnginePort, Work


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an operation ended; the dispatcher makes an Outcome of it."""

    state: protocol.OutcomeState
    result: protocol.Result | None = None
    reason: str = ""
    """UPPER_SNAKE, one of proto/kvctl/v1/errors.proto without the prefix."""
    message: str = ""
    retry_after_ms: int = 0


class Meter:
    """What the engine thread paid for one operation; the dispatcher starts and stops it around each slice."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` gives nanoseconds."""
        self._clock = clock
        self._started_ns = 0
        self._slices: list[int] = []
        self._lap: list[int] = []
        self._lap_started_ns = 0

    def start(self) -> None:
        """A slice begins."""
        self._started_ns = self._lap_started_ns = self._clock()

    def stop(self) -> None:
        """A slice ends."""
        now = self._clock()
        self._slices.append(now - self._started_ns)
        self._lap.append(now - self._lap_started_ns)

    def lap(self) -> protocol.PauseCost:
        """Called by an operation inside a slice: the cost since it was last called."""
        now = self._clock()
        cost = _cost([*self._lap, now - self._lap_started_ns])
        self._lap, self._lap_started_ns = [], now
        return cost

    def cost(self) -> protocol.PauseCost:
        """Slices that have ended so far."""
        return _cost(self._slices)


def _cost(slices_ns: list[int]) -> protocol.PauseCost:
    """Nanoseconds to microseconds, rounded up: a measured cost is never 0."""
    return protocol.PauseCost(
        longest_us=-(-max(slices_ns, default=0) // 1000), total_us=-(-sum(slices_ns) // 1000), slices=len(slices_ns)
    )


@dataclass(slots=True)
class Lease:
    """The pause in force, by whoever took it."""

    request_id: str
    expires_ns: int
    resume_when_abandoned: bool
    weights_complete: bool = False
    version_before: str | None = None
    """The engine's weight version when the pause took hold; None until then."""
    withdrawn: bool = False
    """Its owner gave it up: it ends as if it had expired, and nobody is told that it did."""


@dataclass(slots=True)
class Memory:
    """What outlives one operation on one engine."""

    lease: Lease | None = None
    abandoned: str = ""
    """Request id of the pause whose weight update was abandoned; the engine is still paused for it."""
    ended_by_lease: str = ""
    """Request id of the last pause that the engine ended by itself."""
    relief_attempts: int = 0
    """Reliefs spent on the present stall."""
    relief_tokens: int = 0
    """Tokens the engine had scheduled at the last relief, to tell one stall from the next."""


@dataclass(slots=True)
class Context:
    """What an operation gets beside the port and its request."""

    clock: Callable[[], int]
    """CLOCK_MONOTONIC nanoseconds; a fake in tests."""
    deadline_ns: int
    memory: Memory = field(default_factory=Memory)
    note_reset: Callable[[protocol.RunningMode], None] = lambda mode: None
    """Called at the instant the prefix cache was dropped."""
    meter: Meter = field(default_factory=lambda: Meter(lambda: 0))
    untouched: bool = False
    """An operation sets this while it has begun, has changed nothing yet, and may still be withdrawn at a yield."""


RequestT = TypeVar("RequestT", bound=protocol.Mutation, contravariant=True)
Operation = Callable[[EnginePort, RequestT, Context], Work[Verdict]]

NO_COST = protocol.PauseCost()
"""What an operation puts where the dispatcher fills in the cost."""
