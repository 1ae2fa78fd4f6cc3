"""What callers ask of the fleet operations of one coordinator: start, steer, look, watch.

An operation is on record with all its targets, and in the audit log, before its first call. A store that fails refuses
new operations and lets the running ones go on (see `running`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import grpc
from kvctl.v1 import fleet_pb2

from sidecar.coordinator import calls, resolution
from sidecar.coordinator.audit import Asker, FleetAudit, asked_for, kind_of
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.execution import Execution
from sidecar.coordinator.fanout import GrpcReplicas
from sidecar.coordinator.live import ENDED, LiveOperation, in_messages
from sidecar.coordinator.pods import PodReplicas
from sidecar.coordinator.refusals import as_failure, check_spec, invalid
from sidecar.coordinator.running import Running
from sidecar.coordinator.schema import StoredOperation, StoreError
from sidecar.coordinator.selectors import read_targets
from sidecar.coordinator.store import Store
from sidecar.rpc.errors import Failure, failure

_T = TypeVar("_T")

MAX_ACTIVE: Final = 32
"""Operations under way at once; each may have 1,024 calls in flight."""

_WATCH_PAUSE_S: Final = 0.01
_CANCELLED: Final = "the operation was cancelled before this target's turn"


class Operations:
    """See the module. Belongs to one loop; raises `rpc.errors.Failure` for what a caller must hear."""

    def __init__(
        self, store: Store, discovery: Discovery, channels: Channels, running: Running, audit: FleetAudit
    ) -> None:
        self._store = store
        self._discovery = discovery
        self._channels = channels
        self._running = running
        self._audit = audit
        self._starting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One start at a time of an id. A lock is there for as long as somebody has it or waits for it."""
        self._beginning: set[str] = set()
        """Ids on their way to being on record."""

    @property
    def stopping(self) -> asyncio.Event:
        """Set once the coordinator shuts down."""
        return self._running.stopping

    # --- starting ------------------------------------------------------------------------------------------------

    async def start(self, operation_id: str, spec: fleet_pb2.OperationSpec, asker: Asker) -> fleet_pb2.FleetOperation:
        """Put an operation on record and begin it; a repeat gives the one on record."""
        operation_id = _checked_id(operation_id) if operation_id else str(uuid.uuid4())
        check_spec(spec)
        async with self._starting.setdefault(operation_id, asyncio.Lock()):
            known = await self._known(operation_id)
            if known is not None:
                return _same(known, spec)
            self._refuse_when_stopping()
            self._refuse_when_full()
            self._beginning.add(operation_id)
            try:
                return await self._start_new(operation_id, spec, asker)
            finally:
                self._beginning.discard(operation_id)

    async def _start_new(
        self, operation_id: str, spec: fleet_pb2.OperationSpec, asker: Asker
    ) -> fleet_pb2.FleetOperation:
        if self._store.trouble.startswith("the store is corrupt"):
            raise as_failure(StoreError(self._store.trouble))
        try:
            resolved, replicas = await self._resolve(spec)
            # Made before anything is on record: a rollout that makes no sense is refused, not remembered.
            Execution(operation_id, spec, resolved.aims, replicas)
        except Exception as error:
            raise as_failure(error) from error
        kind = str(spec.WhichOneof("operation"))
        about = {**asked_for(spec), "targets": len(resolved.aims)}
        self._audit.begin(asker, kind, operation_id, about)
        return await _to_its_end(self._begin(_new(operation_id, spec, resolved), resolved, replicas, asker))

    async def _begin(
        self,
        operation: fleet_pb2.FleetOperation,
        resolved: resolution.Resolved,
        replicas: GrpcReplicas,
        asker: Asker,
    ) -> fleet_pb2.FleetOperation:
        try:
            stored = await self._put_on_record(operation, resolved, asker)
        except StoreError as error:
            refusal = {"state": "refused", "code": "INTERNAL", "reason": "STORE_FAILED", "message": str(error)}
            self._audit.end(asker.caller.name, kind_of(operation), operation.operation_id, refusal)
            raise as_failure(error) from error
        return self._running.begin(stored, replicas).snapshot()

    async def _put_on_record(
        self, operation: fleet_pb2.FleetOperation, resolved: resolution.Resolved, asker: Asker
    ) -> StoredOperation:
        await self._store.create(operation, resolved.aims, resolved.apart, asker.caller.name)
        stored = await self._store.read(operation.operation_id)
        if stored is None:
            raise StoreError(f"operation {operation.operation_id} is not on record although it was written")
        return stored

    async def _resolve(self, spec: fleet_pb2.OperationSpec) -> tuple[resolution.Resolved, GrpcReplicas]:
        selection = read_targets(spec.targets)
        discovered = await self._discovery.targets()
        counted = spec.rollout.strategy == fleet_pb2.ROLLOUT_STRATEGY_ROLLING or spec.rollout.max_failures > 0
        asked = time.monotonic()
        limit_s = calls.seconds(spec.timeout) or resolution.CONNECT_TIMEOUT_S
        resolved = await resolution.resolve(selection, discovered, self._channels, ask_all=counted, within_s=limit_s)
        named_in_s = time.monotonic() - asked
        replicas = PodReplicas(self._channels, self._discovery, resolved.identities, resolved.failures, named_in_s)
        return resolved, replicas

    # --- steering ------------------------------------------------------------------------------------------------

    async def hold(self, operation_id: str, asker: Asker) -> fleet_pb2.FleetOperation:
        """Start no further target. In force even when the store refuses to record it."""
        live = await self._under_way(operation_id)
        self._audit.begin(asker, "hold", live.operation.operation_id)
        live.held = True
        return await _to_its_end(self._steered(live, "hold", asker))

    async def release(self, operation_id: str, asker: Asker) -> fleet_pb2.FleetOperation:
        """Go on."""
        self._refuse_when_stopping()
        live = await self._under_way(operation_id)
        self._audit.begin(asker, "release", live.operation.operation_id)
        live.held = False
        return await _to_its_end(self._steered(live, "release", asker))

    async def cancel(self, operation_id: str, asker: Asker) -> fleet_pb2.FleetOperation:
        """Start no further target, for good. An operation that has ended is given back as it is."""
        live = self._running.find(_checked_id(operation_id))
        if live is None or live.ended:
            return await self.get(operation_id)
        self._audit.begin(asker, "cancel", live.operation.operation_id)
        live.cancelled = live.cancelled or _CANCELLED
        return await _to_its_end(self._steered(live, "cancel", asker))

    async def _steered(self, live: LiveOperation, what: str, asker: Asker) -> fleet_pb2.FleetOperation:
        operation_id = live.operation.operation_id
        recorded = True
        try:
            await self._store.steer(operation_id, held=live.held, cancelled=live.cancelled)
        except StoreError as error:
            # Stopping must work when nothing else does; only a restart would forget it, and that is said.
            recorded = False
            live.warn(f"{what} is in force but not on record, a restarted coordinator will not know it: {error}")
        self._running.steer(live)
        if not live.ended:
            live.show_under_way()
        self._audit.end(asker.caller.name, what, operation_id, {"recorded": recorded})
        return live.snapshot()

    async def _under_way(self, operation_id: str) -> LiveOperation:
        live = self._running.find(_checked_id(operation_id))
        if live is not None and not live.ended:
            return live
        ended = await self.get(operation_id)
        state = fleet_pb2.OperationState.Name(ended.state).removeprefix("OPERATION_STATE_")
        raise failure(
            grpc.StatusCode.FAILED_PRECONDITION,
            "OPERATION_ENDED",
            f"operation {ended.operation_id} has ended ({state}); only one that runs can be held or let go on",
            metadata={"operation_id": ended.operation_id, "state": state},
        )

    # --- looking -------------------------------------------------------------------------------------------------

    async def get(self, operation_id: str) -> fleet_pb2.FleetOperation:
        """One operation, whole."""
        found = await self._known(_checked_id(operation_id))
        if found is None:
            raise _not_found(operation_id)
        return found

    async def page(self, size: int, before: int) -> Sequence[tuple[int, fleet_pb2.FleetOperation]]:
        """(sequence, operation without rows), newest first."""
        try:
            rows = await self._store.page(size, before)
        except StoreError as error:
            raise as_failure(error) from error
        live = ((sequence, self._running.find(found.operation_id), found) for sequence, found in rows)
        return [(sequence, runs.snapshot() if runs is not None else found) for sequence, runs, found in live]

    async def watch(self, operation_id: str, after_version: int) -> AsyncIterator[fleet_pb2.FleetOperation]:
        """The operation with what changed after a version, again and again until it has ended."""
        live = self._running.find_recent(_checked_id(operation_id))
        if live is None:
            ended = await self.get(operation_id)
            if ended.version > after_version:
                for message in in_messages(ended, list(ended.results)):
                    yield message
            return
        while True:
            version = live.operation.version
            if version > after_version:
                for message in live.since(after_version):
                    yield message
                after_version = version
                # Changes come in swarms; a message for each would cost more than the operation.
                await asyncio.sleep(_WATCH_PAUSE_S)
                continue
            if live.ended:
                return
            await self._changed_or_stopping(live, after_version)

    async def _changed_or_stopping(self, live: LiveOperation, version: int) -> None:
        changed = asyncio.ensure_future(live.changed_after(version))
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait([changed, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            stopping.cancel()
        if self.stopping.is_set() and live.operation.version <= version:
            raise _stopping("watch again after the version seen last, at the coordinator that follows")

    async def _known(self, operation_id: str) -> fleet_pb2.FleetOperation | None:
        live = self._running.find(operation_id)
        if live is not None:
            return live.snapshot()
        try:
            stored = await self._store.read(operation_id)
        except StoreError as error:
            raise as_failure(error) from error
        return None if stored is None else stored.operation

    def _refuse_when_full(self) -> None:
        under_way = len(self._running) + sum(self._running.find(each) is None for each in self._beginning)
        if under_way >= MAX_ACTIVE:
            raise failure(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_OPERATIONS",
                f"{under_way} operations are under way, the most a coordinator runs; try again later",
                retry_after=5.0,
            )

    def _refuse_when_stopping(self) -> None:
        if self.stopping.is_set():
            raise _stopping("try again at the coordinator that follows")


async def _to_its_end(work: Coroutine[None, None, _T]) -> _T:
    """What it gives. A caller that goes away meanwhile does not stop it half way: what is on record is in force."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _new(operation_id: str, spec: fleet_pb2.OperationSpec, resolved: resolution.Resolved) -> fleet_pb2.FleetOperation:
    operation = fleet_pb2.FleetOperation(
        operation_id=operation_id,
        kind=calls.KINDS[str(spec.WhichOneof("operation"))],
        spec=spec,
        state=fleet_pb2.OPERATION_STATE_PENDING,
        targets_incomplete=resolved.incomplete,
        warnings=resolved.warnings,
        version=1,
    )
    operation.started_at.GetCurrentTime()
    return operation


def _checked_id(operation_id: str) -> str:
    try:
        return str(uuid.UUID(operation_id))
    except ValueError:
        text = f"operation_id {operation_id[:64]!r} is not a UUID; make one with `uuidgen`"
        raise invalid("operation_id", text) from None


def _same(known: fleet_pb2.FleetOperation, spec: fleet_pb2.OperationSpec) -> fleet_pb2.FleetOperation:
    """What a start gives under an id that is on record: the operation on record, also when replicas refused it."""
    begun = known.started_at.ToDatetime().strftime("%Y-%m-%d %H:%M:%S UTC")
    if known.spec == spec:
        if known.state in ENDED:
            text = f"this is the operation on record since {begun}, nothing was run now: a new one needs a new id"
            known.warnings.append(text)
        return known
    raise failure(
        grpc.StatusCode.ABORTED,
        "REQUEST_ID_REUSED",
        f"id {known.operation_id} is on record since {begun} for another request (`kvctl ops get` with it tells); "
        "give a new id, or none",
        metadata={"operation_id": known.operation_id},
    )


def _not_found(operation_id: str) -> Failure:
    return failure(
        grpc.StatusCode.NOT_FOUND,
        "OPERATION_NOT_FOUND",
        f"operation {operation_id[:64]!r} is not on record here; it may be older than what is kept",
        metadata={"operation_id": operation_id},
    )


def _stopping(what_to_do: str) -> Failure:
    return failure(
        grpc.StatusCode.UNAVAILABLE,
        "SERVER_STOPPING",
        f"this coordinator is shutting down; {what_to_do}",
        retry_after=1.0,
    )
