"""Engines that cannot be reached and must be listed: a reset that reached only the other ranks is not a success.

One serves without the bridge, because the bridge could not attach; it left a note instead of a socket. Of another there
is no trace at all but what the ranks beside it say: that its process runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engine_bridge import page, protocol
from sidecar.backends.bridge import process
from sidecar.backends.engine import EngineFacts, Liveness, Lost, Submitted, Unreachable

ATTACH_GRACE_S: Final = 120.0
"""How long after the first rank of a replica the last one may attach: their weights load beside each other."""


class UnreachableEngine:
    """Implements `sidecar.backends.engine.EngineBackend` by saying why it cannot."""

    facts: EngineFacts | None = None
    connected = False

    def __init__(self, key: str, rank: int, incarnation: str) -> None:
        self.key = key
        self.rank = rank
        self.incarnation = incarnation

    @property
    def trouble(self) -> Unreachable:
        """Why not."""
        raise NotImplementedError

    def liveness(self) -> Liveness:
        """Nothing is known of the process."""
        return Liveness.UNKNOWN

    def page(self) -> page.Snapshot | None:
        """There is none."""
        return None

    async def submit(self, _mutation: protocol.Mutation, _deadline_ns: int) -> Submitted:
        """See EngineBackend."""
        return self.trouble

    async def renew(self, _renewal: protocol.Renew, _deadline_ns: int) -> Submitted:
        """See EngineBackend."""
        return self.trouble

    async def lookup(self, _request_id: str, _deadline_ns: int) -> protocol.Found | Lost | Unreachable:
        """See EngineBackend."""
        return self.trouble

    async def cancel(self, _request_id: str, _deadline_ns: int) -> protocol.Cancelled | Lost | Unreachable:
        """See EngineBackend."""
        return self.trouble

    async def evidence(
        self, _timeout_s: float, _contiguity_blocks: int = 4096
    ) -> protocol.Evidence | Lost | Unreachable:
        """See EngineBackend."""
        return self.trouble


class FailedEngine(UnreachableEngine):
    """One that left a note."""

    def __init__(self, key: str, rank: int, reason: str, pid: int) -> None:
        """`reason` is the bridge's own; `pid` 0 when unknown."""
        super().__init__(key, rank, key.rpartition("-")[2])
        self._pid = pid
        self._reason = reason

    @property
    def trouble(self) -> Unreachable:
        """In the bridge's own words."""
        return Unreachable(
            "BRIDGE_NOT_ATTACHED",
            f"engine {self.rank} (pid {self._pid}) serves without the kvctl bridge, which could not attach: "
            f"{self._reason}",
        )

    @property
    def dead(self) -> bool:
        """Whether its process is gone, as far as can be told: a stale note."""
        return self.liveness() is Liveness.DEAD

    def liveness(self) -> Liveness:
        """See EngineBackend."""
        return process.liveness(self._pid, 0)


class MissingEngine(UnreachableEngine):
    """One that the ranks beside it know of, or that was promised, and that has never attached."""

    def __init__(
        self, rank: int, place: str, clock: Callable[[], float] = time.monotonic, *, expected: int = 0
    ) -> None:
        """`place` is where its files would be; `clock` gives seconds; `expected`: how many were promised."""
        super().__init__(f"engine-{rank}-missing", rank, "")
        self._place = place
        self._clock = clock
        self._since = clock()
        self._expected = expected

    @property
    def trouble(self) -> Unreachable:
        """Starting for as long as ranks may start one after another, missing from then on."""
        if self._expected:
            text = f"engine {self.rank} has not appeared in {self._place}; {self._expected} engines are expected"
            return Unreachable("NO_ENGINE", text)
        missing_s = self._clock() - self._since
        if missing_s < ATTACH_GRACE_S:
            return Unreachable("ENGINE_STARTING", f"engine {self.rank} has not attached yet; the ranks beside it have")
        return Unreachable(
            "BRIDGE_NOT_ATTACHED",
            f"engine {self.rank} has not appeared in {self._place} for {missing_s:.0f} s, and the ranks beside it say "
            "that it runs: see its log for why the kvctl bridge did not attach",
        )
