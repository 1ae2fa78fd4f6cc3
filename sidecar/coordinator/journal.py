"""What one operation puts on record in the store, and what becomes of it while the store takes no writes."""

from __future__ import annotations

import asyncio

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.port import JournalError
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.store import Store


class StoreJournal:
    """The `port.Journal` of one operation in a store."""

    def __init__(self, store: Store, operation_id: str) -> None:
        self._store = store
        self._operation_id = operation_id
        self.unrecorded: dict[str, fleet_pb2.TargetResult] = {}
        """Results that the store refused; `flush` tries them again."""

    async def intent(self, target: str, request_id: str, wave: int) -> None:
        """Put on record that this target is about to be called."""
        try:
            await self._store.intent(self._operation_id, target, request_id, wave)
        except StoreError as error:
            await self._note_stopped()
            raise JournalError(str(error)) from error

    async def result(self, result: fleet_pb2.TargetResult) -> None:
        """Put on record how this target has ended."""
        try:
            await self._store.result(self._operation_id, result)
        except StoreError as error:
            self.unrecorded[result.replica] = result
            if not result.request_id:
                # Whoever starts next asks for what was called; what was not called must not be called then.
                await self._note_stopped()
            raise JournalError(str(error)) from error

    async def unhealthy(self, target: str, why: str) -> None:
        """Put on record that this target did not become healthy."""
        try:
            await self._store.unhealthy(self._operation_id, target, why)
        except StoreError as error:
            raise JournalError(str(error)) from error

    async def flush(self) -> None:
        """Record what could not be recorded before. StoreError when it still cannot."""
        for target, result in list(self.unrecorded.items()):
            await self._store.result(self._operation_id, result)
            del self.unrecorded[target]

    async def _note_stopped(self) -> None:
        await asyncio.to_thread(self._store.stopped.add, self._operation_id)
