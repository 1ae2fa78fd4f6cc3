"""An engine that serves without the bridge, because the bridge could not attach.

It left a note instead of a socket. It must be listed: a reset that reached only the other ranks is not a success.
"""

from __future__ import annotations

from engine_bridge import page, protocol
from sidecar.backends.bridge import process
from sidecar.backends.engine import EngineFacts, Liveness, Lost, Submitted, Unreachable


class FailedEngine:
    """Implements `sidecar.backends.engine.EngineBackend` by saying why it cannot."""

    facts: EngineFacts | None = None
    connected = False

    def __init__(self, key: str, rank: int, reason: str, pid: int) -> None:
        """`reason` is the bridge's own; `pid` 0 when unknown."""
        self.key = key
        self.rank = rank
        self.incarnation = key.rpartition("-")[2]
        self._pid = pid
        self.trouble = Unreachable(
            "BRIDGE_NOT_ATTACHED",
            f"engine {rank} (pid {pid}) serves without the kvctl bridge, which could not attach: {reason}",
        )

    @property
    def dead(self) -> bool:
        """Whether its process is gone, as far as can be told: a stale note."""
        return process.liveness(self._pid, 0) is Liveness.DEAD

    def liveness(self) -> Liveness:
        """See EngineBackend."""
        return process.liveness(self._pid, 0)

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
