"""Two ways to a fleet behind one interface: calling every replica from here, or through a coordinator.

Both speak in the API's own messages, so that `kvctl -o json` prints the same whichever way was taken.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.discovery import Discovery, DiscoveryError
from sidecar.coordinator.discovery.dns import DnsDiscovery
from sidecar.coordinator.discovery.static import InventoryDiscovery, StaticDiscovery
from sidecar.coordinator.targets import Discovered, Target
from sidecar.rpc import addresses

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


class JoinedDiscovery:
    """Several sources as one: `--target a --target dns:///b:7700`."""

    def __init__(self, sources: Sequence[Discovery]) -> None:
        self._sources = tuple(sources)

    async def targets(self) -> Discovered:
        """All of them; the first to give an address wins. Incomplete when any source is."""
        found: dict[str, Target] = {}
        incomplete = False
        warnings: list[str] = []
        for source in self._sources:
            try:
                part = await source.targets()
            except DiscoveryError as error:
                if len(self._sources) == 1:
                    raise
                incomplete = True
                warnings.append(str(error))
                continue
            incomplete |= part.incomplete
            warnings.extend(part.warnings)
            for target in part.targets:
                found.setdefault(target.address, target)
        if not found and warnings:
            raise DiscoveryError("; ".join(warnings))
        return Discovered(tuple(found.values()), incomplete, tuple(warnings))

    def describe(self) -> str:
        """Every source."""
        return " and ".join(source.describe() for source in self._sources)


def discovery_of(targets: Sequence[str] = (), inventory: str | Path = "") -> Discovery:
    """A discovery for `[NAME=]ADDRESS` texts, dns:///name:port texts, or an inventory file.

    ValueError or DiscoveryError when a text is neither.
    """
    if inventory:
        return InventoryDiscovery(Path(inventory))
    sources: list[Discovery] = [DnsDiscovery(text) for text in targets if text.startswith("dns:")]
    listed = [_target(text) for text in targets if not text.startswith("dns:")]
    if listed:
        sources.insert(0, StaticDiscovery(listed))
    return sources[0] if len(sources) == 1 else JoinedDiscovery(sources)


def _target(text: str) -> Target:
    name, separator, address = text.partition("=")
    if not separator:
        name, address = "", text
    if separator and not name:
        raise ValueError(f"target {text!r} has no name before '='; expected [NAME=]ADDRESS")
    return Target(address=addresses.parse(address, what="target").target, name=name)


def checked_id(operation_id: str) -> str:
    """The id in its usual form, or a new one. ValueError when it is not a UUID."""
    if not operation_id:
        return str(uuid.uuid4())
    try:
        return str(uuid.UUID(operation_id))
    except ValueError:
        raise ValueError(f"request id {operation_id!r} is not a UUID; make one with `uuidgen`") from None
