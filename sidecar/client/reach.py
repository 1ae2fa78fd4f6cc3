"""Two ways to a fleet behind one interface: calling every replica from here, or through a coordinator.

Both speak in the API's own messages, so that `kvctl -o json` prints the same whichever way was taken.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.discovery.sources import JoinedDiscovery, discovery_of

__all__ = ["JoinedDiscovery", "OnProgress", "Reach", "checked_id", "discovery_of", "given_id", "new_id", "recorded_id"]

OnProgress = Callable[[fleet_pb2.TargetResult, int], None]
"""Told every change of a target, with the number of targets as far as it is known (0: not yet)."""


class Reach(Protocol):
    """A way to a fleet. Belongs to one event loop; close it."""

    async def run(
        self, spec: fleet_pb2.OperationSpec, operation_id: str = "", on_progress: OnProgress | None = None
    ) -> fleet_pb2.FleetOperation:
        """Run an operation to its end."""
        ...

    async def stop(self) -> None:
        """Stop a `run` under way: a direct one is cancelled, a coordinator's goes on without us."""
        ...

    async def admission(self, targets: fleet_pb2.Targets, timeout_s: float) -> fleet_pb2.FleetAdmissionResponse:
        """Admission of every replica."""
        ...

    def watch(
        self, targets: fleet_pb2.Targets, interval_s: float
    ) -> AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse]:
        """Admission as it changes, and a sample every `interval_s` when that is not 0."""
        ...

    async def replicas(self, targets: fleet_pb2.Targets) -> fleet_pb2.ListReplicasResponse:
        """Every replica with what it says of itself."""
        ...

    async def close(self) -> None:
        """Close every channel."""
        ...


def checked_id(operation_id: str) -> str:
    """The id in its usual form, or a new one. ValueError when it is not a UUID."""
    return given_id(operation_id) if operation_id else new_id()


def recorded_id(operation_id: str) -> str:
    """The id of an operation that is looked for, in its usual form. ValueError when it is not a UUID."""
    return given_id(operation_id, "operation id", "`kvctl ops list` shows those on record")


def new_id() -> str:
    """An id of its own."""
    return str(uuid.uuid4())


def given_id(operation_id: str, what: str = "request id", mend: str = "make one with `uuidgen`") -> str:
    """The id in its usual form. ValueError when it is not a UUID, also when it is empty: a script's variable that was
    never set must not become an operation that cannot be repeated.
    """
    try:
        return str(uuid.UUID(operation_id))
    except ValueError:
        raise ValueError(f"{what} {operation_id!r} is not a UUID; {mend}") from None
