"""The journal of an operation kept in its own resource: status before call, in as few writes as the order allows.

Every write to the API server costs milliseconds and rewrites the object. So what is to be recorded is gathered while
a write is under way and goes with the next one (group commit), and whoever recorded an intent waits for the write that
carries it. A resource deleted and made anew under the same name is another one, and its status is not ours. API servers
do not compare the uid in a write to a custom resource's status, so a write names the version that it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError, MergePatch
from sidecar.coordinator.discovery.kube_rows import Meta
from sidecar.coordinator.port import JournalError
from sidecar.operator import status
from sidecar.operator.ended import EndedTargets
from sidecar.operator.resource import GROUP, PLURAL, VERSION, Entry, Resource
from sidecar.operator.status import Patch


class _Answer(msgspec.Struct):
    metadata: Meta


def path_of(namespace: str, name: str = "") -> str:
    """URL path of the collection, or of one resource."""
    base = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
    return f"{base}/{name}" if name else base


class StatusWriter:
    """Merge-patches to one resource's status, gathered into one write at a time."""

    def __init__(self, api: Api, resource: Resource, may_write: Callable[[], bool]) -> None:
        """`may_write`: whether this process is still the one to run operations (it holds the lease)."""
        self._api = api
        self._path = path_of(resource.metadata.namespace, resource.metadata.name)
        self._uid, self._version = resource.metadata.uid, resource.metadata.resource_version
        self._may_write = may_write
        self._pending: Patch = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None
        self.detached = ""
        """Why nothing is written any more: the resource is gone, or another process leads."""

    async def write(self, patch: Patch) -> None:
        """Return when it is on record. JournalError when it is not."""
        if self.detached:
            raise JournalError(self.detached)
        _merge(self._pending, patch)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._flush())
        await done

    def detach(self, why: str) -> None:
        """Write nothing more."""
        self.detached = self.detached or why

    async def _flush(self) -> None:
        while self._waiting:
            patch, waiting = self._pending, self._waiting
            self._pending, self._waiting = {}, []
            error: Exception | None = None
            try:
                await self._send(patch)
            except (ApiError, DiscoveryError, msgspec.DecodeError) as failed:
                error = JournalError(str(failed))
            except JournalError as failed:
                error = failed
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise
            for future in waiting:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    async def _send(self, patch: Patch, tries: int = 5) -> None:
        if not self._may_write():
            self.detach("this operator no longer leads; the next leader goes on")
        if self.detached:
            raise JournalError(self.detached)
        body = msgspec.json.encode({"metadata": {"resourceVersion": self._version}, "status": patch})
        try:
            self._see(await self._api.request("PATCH", self._path + "/status", body=body, content_type=MergePatch))
        except ApiError as error:
            if error.status == 404:
                self.detach("the CacheOperation was deleted")
            if error.status != 409 or tries == 1:
                raise
            self._see(await self._api.request("GET", self._path))
            await self._send(patch, tries - 1)

    def _see(self, answer: bytes) -> None:
        meta = msgspec.json.decode(answer, type=_Answer).metadata
        if meta.uid != self._uid:
            self.detach("the CacheOperation was deleted, and another one has its name")
            raise JournalError(self.detached)
        self._version = meta.resource_version


def _merge(into: Patch, patch: Patch) -> None:
    for key, value in patch.items():
        mine = into.get(key)
        if isinstance(value, dict) and isinstance(mine, dict):
            _merge(mine, value)
        else:
            into[key] = value


class ResourceJournal:
    """coordinator.port.Journal over a resource's status. Also keeps what the status shows while it runs."""

    def __init__(
        self, writer: StatusWriter, ledger: dict[str, Entry], results: Mapping[str, fleet_pb2.TargetResult]
    ) -> None:
        """`ledger` as it is on record, kept current here; `results` of the targets that have ended already."""
        self._writer = writer
        self.ledger = ledger
        self._ended = EndedTargets.of(ledger, results.values())

    async def intent(self, target: str, request_id: str, wave: int) -> None:
        """On record before the call."""
        entry = self.ledger[target]
        entry.request_id, entry.wave = request_id, wave
        await self._writer.write({"ledger": {target: msgspec.to_builtins(entry)}})

    async def result(self, result: fleet_pb2.TargetResult) -> None:
        """On record before anyone is told."""
        name = result.replica
        kept = self.ledger[name]
        entry = status.entry_of(result, kept.uid)
        entry.request_id, entry.unhealthy = result.request_id or kept.request_id, kept.unhealthy
        self.ledger[name] = entry
        self._ended.put(result, kept.uid)
        await self._writer.write({"ledger": {name: msgspec.to_builtins(entry)}, **self.shown()})

    async def unhealthy(self, target: str, why: str) -> None:
        """On record: succeeded, and not healthy in time."""
        entry = self.ledger[target]
        entry.unhealthy = why[: status.MAX_MESSAGE]
        await self._writer.write({"ledger": {target: msgspec.to_builtins(entry)}})

    def shown(self) -> Patch:
        """Counts, progress and rows as they are now."""
        return self._ended.patch()
