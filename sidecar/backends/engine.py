"""How a replica reaches one engine, whatever the way.

The server above knows engines only through this interface: the bridge behind a Unix socket and stock vLLM behind HTTP
implement it. Its one hard point is the lost answer. An engine can be stopped, stuck in a step, killed or restarted
while an operation is under way, so a mutation ends in exactly one of three words: Answered (the engine said what
happened), Lost (no answer by the deadline, with what is known about its execution), or Unreachable (it was never sent,
or the process is gone). None of them is ever guessed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine_bridge import page, protocol

Execution = Literal["not_executed", "unknown"]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while one engine process lives."""

    data_parallel_rank: int
    incarnation: str
    """32 hex digits drawn when the bridge attached; another value is another process with a cold cache."""
    backend: Literal["bridge", "http"]
    pid: int = 0
    """As the engine sees it; 0 when unknown."""
    data_parallel_size: int = 1
    local_ranks: Sequence[int] = ()
    """Ranks that run beside it, itself among them, whether or not they can be reached; empty when unknown."""
    vllm_version: str = ""
    bridge_version: str = ""
    model: str = ""
    block_size: int = 0
    """Tokens in a block."""
    blocks: int = 0
    """Usable blocks, without null blocks."""
    prefix_caching: bool = True
    attached_at: float = 0.0
    """CLOCK_MONOTONIC, seconds, when it began to record operations; 0 when it does not or that is not known."""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    """protocol.CAPABILITIES name -> "" when available, else why not and what would give it."""


class Liveness(enum.Enum):
    """What the operating system says of the engine's process."""

    ALIVE = "alive"
    STOPPED = "stopped"
    """Stopped by a signal or a debugger."""
    DEAD = "dead"
    UNKNOWN = "unknown"
    """/proc of the process cannot be read from here."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine said what happened."""

    outcome: protocol.Outcome


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer by the deadline."""

    execution: Execution
    message: str
    reason: str = ""
    """Of errors.proto; NOT_EXECUTED or OUTCOME_UNKNOWN when empty."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The engine cannot be asked."""

    reason: str
    """Of errors.proto, e.g. ENGINE_DEAD, ENGINE_STARTING, ENGINE_DIED_DURING_OPERATION."""
    message: str
    sent: bool = False
    """True when the mutation may have reached the engine before it went away."""


Submitted = Answered | Lost | Unreachable


class EngineBackend(Protocol):
    """One engine of this replica. All methods belong to the event loop; none blocks it."""

    @property
    def key(self) -> str:
        """Stable name of this engine process within the replica, e.g. "engine-0-1a2b3c4d"."""
        ...

    @property
    def rank(self) -> int:
        """Data-parallel rank."""
        ...

    @property
    def incarnation(self) -> str:
        """Of this process, as far as known; empty when not."""
        ...

    @property
    def facts(self) -> EngineFacts | None:
        """None until the engine has introduced itself."""
        ...

    @property
    def connected(self) -> bool:
        """Whether it can be asked now."""
        ...

    @property
    def trouble(self) -> Unreachable | None:
        """Why it cannot be asked now; None when connected."""
        ...

    def liveness(self) -> Liveness:
        """The process as /proc shows it now. Cheap: one small read, no cache."""
        ...

    def page(self) -> page.Snapshot | None:
        """The engine's page; None when this backend has none. page.PageError says why it cannot be read."""
        ...

    async def submit(self, mutation: protocol.Mutation, deadline_ns: int) -> Submitted:
        """Run a mutation, once. Its `call` and `deadline_ns` are overwritten. Returns shortly after the deadline
        (CLOCK_MONOTONIC) at the latest, whatever state the engine is in. Safe to repeat with the same request id.

        Cancelled, it returns at once what is known, or raises CancelledError where nothing was sent and will not be.
        """
        ...

    async def renew(self, renewal: protocol.Renew, deadline_ns: int) -> Submitted:
        """Extend the lease of a pause."""
        ...

    async def lookup(self, request_id: str, deadline_ns: int) -> protocol.Found | Lost | Unreachable:
        """The recorded outcome of a request id."""
        ...

    async def cancel(self, request_id: str, deadline_ns: int) -> protocol.Cancelled | Lost | Unreachable:
        """Withdraw an operation that has not had an effect yet."""
        ...

    async def evidence(self, timeout_s: float, contiguity_blocks: int = 4096) -> protocol.Evidence | Lost | Unreachable:
        """Everything a verdict needs, from the engine thread (over HTTP: from vLLM's metrics, -1 for unknown)."""
        ...


class EngineSet(Protocol):
    """The engines of one replica, coming and going."""

    @property
    def place(self) -> str:
        """Where engines are looked for, for error messages: a directory or a URL."""
        ...

    def engines(self) -> Sequence[EngineBackend]:
        """By rank. A dead engine stays listed until its successor appears, so that it can be told from none."""
        ...

    def trouble(self) -> Unreachable | None:
        """Why no engine is listed: NO_ENGINE, BRIDGE_NOT_ATTACHED with the bridge's own words, ...; None when some
        are.
        """
        ...

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back (on the loop, cheap) whenever an engine appears, connects, disconnects or goes."""
        ...

    async def start(self) -> None:
        """Look once, then keep looking in the background."""
        ...

    async def close(self) -> None:
        """Stop looking and close every connection."""
        ...
