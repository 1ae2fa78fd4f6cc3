"""What happened to a fleet under test, as JSON lines: who called what, what engines did, what callers were told.

One file is made of the lines of several processes: callers (the test), fake engines (`tests.fake_engine.witness`) and
whoever does the faults. All of them run on one machine and stamp their lines with CLOCK_MONOTONIC, so that lines of
different processes have an order. `checker` reads a whole history and judges it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

TERMINAL = frozenset({"succeeded", "failed", "unreachable", "unknown", "skipped", "cancelled"})


class Row(msgspec.Struct, frozen=True):
    """One target as a caller was told of it."""

    replica: str
    outcome: str
    """"running", "succeeded", "failed", "unreachable", "unknown", "skipped", "cancelled"; empty before its turn."""
    code: str = ""
    reason: str = ""
    request_id: str = ""
    execution: str = ""
    """"not_executed", "unknown", or empty: an answer was received."""
    health: str = ""
    """Why a rollout waits for this target although its call has ended, or gave it up; empty when it does neither."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    at_ns: int


class Floor(Event, frozen=True, tag="floor"):
    """This run is worth something only when so many operations had succeeded before its first fault."""

    operations: int


class Called(Event, frozen=True, tag="called"):
    """Somebody asks for an operation, which has not been sent yet."""

    operation_id: str
    targets: Sequence[str]
    request_ids: dict[str, str]
    """Request id at a replica -> that replica."""
    timeout_s: float
    """Of one target."""
    max_unavailable: int = 0
    """0: all at once."""


class Told(Event, frozen=True, tag="told"):
    """What the caller read about its operation."""

    operation_id: str
    rows: Sequence[Row]
    final: bool
    """The operation has ended, as far as the one who tells it knows."""
    asked_ns: int = 0
    """When the caller asked: what is told was so at some instant since then. 0: not known."""


class Taken(Event, frozen=True, tag="taken"):
    """An engine took a request up; the deadline that came with it is looked at next."""

    replica: str
    incarnation: str
    request_id: str


class Effect(Event, frozen=True, tag="effect"):
    """An engine changed something."""

    replica: str
    incarnation: str
    request_id: str
    effect: str
    taken_ns: int
    """When it took the request up."""
    audited: bool
    """Whether the audit log had the request's first line by then."""


class Ended(Event, frozen=True, tag="ended"):
    """An engine has finished a request and is about to answer."""

    replica: str
    incarnation: str
    request_id: str


class Fault(Event, frozen=True, tag="fault"):
    """Something was broken on purpose, or mended."""

    what: str
    """"kill", "stop", "continue", "start", "black hole", ..."""
    whom: str
    """"coordinator", or the replica and its part: "r0 engine", "r0 sidecar", "r0 network"."""


AnyEvent = Floor | Called | Told | Taken | Effect | Ended | Fault
History = Sequence[AnyEvent]

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyEvent)


class Tape:
    """Appends lines to one file, each with one write. Any thread may use it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()

    def write(self, event: AnyEvent) -> None:
        with self._lock, self.file.open("ab", buffering=0) as file:
            file.write(_encoder.encode(event) + b"\n")


def now_ns() -> int:
    return time.monotonic_ns()


def read(files: Iterable[Path]) -> list[AnyEvent]:
    """The lines of all the files in the order of their instants. A last line that a kill cut short is left out."""
    events: list[AnyEvent] = []
    for file in files:
        for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else ():
            events.append(_decoder.decode(line))
    return sorted(events, key=lambda event: event.at_ns)
