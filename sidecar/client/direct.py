"""A fleet reached from here: this process calls every replica itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from kvctl.v1 import fleet_pb2

from sidecar.client.reach import OnProgress
from sidecar.coordinator import reading, resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.discovery.sources import Kept
from sidecar.coordinator.fanout import Run
from sidecar.coordinator.selectors import read_targets
from sidecar.rpc.channels import NO_SECURITY, ClientSecurity

STOP_GRACE_S: Final = 3.0
"""How long a cancelled operation may take to say how its calls under way have ended."""


class DirectReach:
    """Every replica that a discovery knows."""

    def __init__(self, discovery: Discovery, security: ClientSecurity = NO_SECURITY) -> None:
        self._discovery = discovery
        self.channels = Channels(security)
        self._run: Run | None = None
        self._task: asyncio.Task[fleet_pb2.FleetOperation] | None = None
        self._left: asyncio.Task[fleet_pb2.FleetOperation] | None = None
        """A run that `stop` has given up waiting for."""

    async def run(
        self, spec: fleet_pb2.OperationSpec, operation_id: str = "", on_progress: OnProgress | None = None
    ) -> fleet_pb2.FleetOperation:
        """Run an operation to its end, or to what is known `STOP_GRACE_S` after `stop`."""
        run = Run(
            spec,
            self._discovery,
            self.channels,
            operation_id=operation_id,
            on_change=lambda row: on_progress(row, run.targets) if on_progress else None,
        )
        task = asyncio.create_task(run.run())
        self._run, self._task = run, task
        try:
            return await task
        except asyncio.CancelledError:
            if self._left is not task:
                raise  # the caller itself was cancelled, and the run with it
            return run.leave()
        finally:
            if self._task is task:
                self._run = self._task = None

    async def stop(self) -> None:
        """Cancel the operation under way: start nothing more, withdraw what had no effect yet, then leave."""
        run, task = self._run, self._task
        if run is None or task is None:
            return
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await run.cancel()
                await asyncio.wait([task])
        except TimeoutError:
            self._left = task
            task.cancel()

    async def admission(self, targets: fleet_pb2.Targets, timeout_s: float) -> fleet_pb2.FleetAdmissionResponse:
        """Admission of every replica."""
        return await reading.read_admission(await self.resolve(targets), self.channels, timeout_s)

    async def watch(
        self, targets: fleet_pb2.Targets, interval_s: float
    ) -> AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse]:
        """Admission as it changes."""
        resolved = await self.resolve(targets)
        async for sample in reading.watch_admission(resolved.aims, self.channels, interval_s):
            yield sample

    async def replicas(self, targets: fleet_pb2.Targets) -> fleet_pb2.ListReplicasResponse:
        """Every replica with what it says of itself."""
        return reading.list_replicas(await self.resolve(targets, ask_all=True))

    async def resolve(self, targets: fleet_pb2.Targets, *, ask_all: bool = False) -> resolution.Resolved:
        """The replicas that a selection means now."""
        discovered = await self._discovery.targets()
        return await resolution.resolve(read_targets(targets), discovered, self.channels, ask_all=ask_all)

    async def close(self) -> None:
        """Close every channel, and what the discovery has opened."""
        if isinstance(self._discovery, Kept):
            await self._discovery.stop()
        await self.channels.close()
