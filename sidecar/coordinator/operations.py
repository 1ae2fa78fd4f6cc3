"""Every fleet operation of one coordinator: started, steered, watched, remembered, taken up again after a crash.

The order is always: on record, then done, then told. An operation is on record with all its targets before its first
call; whoever comes after a crash finds the rest in the store (see `execution` for one target). A store that fails
refuses new operations and lets the running ones end in memory; what it could not record is tried again until it can.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import calls, resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.execution import Execution
from sidecar.coordinator.fanout import GrpcReplicas
from sidecar.coordinator.live import RESUME_GAP, LiveOperation, in_messages
from sidecar.coordinator.metrics import CoordinatorMetrics
from sidecar.coordinator.port import Aim
from sidecar.coordinator.refusals import as_failure, check_spec, invalid
from sidecar.coordinator.schema import StoredOperation, StoreError
from sidecar.coordinator.selectors import read_targets
from sidecar.coordinator.store import Store, StoreJournal
from sidecar.coordinator.targets import Target
from sidecar.coordinator.unknowns import Unknowns
from sidecar.rpc.errors import Failure, failure

MAX_ACTIVE: Final = 32
"""Operations under way at once; each may have 1,024 calls in flight."""

_RECENT: Final = 8
_IDENTIFY_S: Final = 2.0
_FLUSH_EVERY_S: Final = 5.0
_WATCH_PAUSE_S: Final = 0.01
_CANCELLED: Final = "the operation was cancelled before this target's turn"

_log = logging.getLogger(__name__)
_audit = logging.getLogger("kvctl.audit")


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of the past is kept. Operations that have not ended are always kept."""

    operations: int = 1000
    age_s: float = 30 * 86400.0


class Operations:
    """See the module. Belongs to one loop; raises `rpc.errors.Failure` for what a caller must hear."""

    def __init__(
        self,
        store: Store,
        discovery: Discovery,
        channels: Channels,
        metrics: CoordinatorMetrics,
        retention: Retention | None = None,
    ) -> None:
        self._store = store
        self._discovery = discovery
        self._channels = channels
        self._metrics = metrics
        self._retention = retention or Retention()
        self.unknowns = Unknowns(store, GrpcReplicas(channels), metrics, self._learned)
        self._live: dict[str, LiveOperation] = {}
        self._recent: OrderedDict[str, LiveOperation] = OrderedDict()
        """The last that ended: a watch that comes back for the end gets what it missed and no more."""
        self._starting: dict[str, asyncio.Lock] = {}
        self._stopping = asyncio.Event()

    # --- starting ------------------------------------------------------------------------------------------------

    async def start(self, operation_id: str, spec: fleet_pb2.OperationSpec, caller: str) -> fleet_pb2.FleetOperation:
        """Put an operation on record and begin it; a repeat gives the one on record."""
        operation_id = _checked_id(operation_id) if operation_id else str(uuid.uuid4())
        check_spec(spec)
        lock = self._starting.setdefault(operation_id, asyncio.Lock())
        try:
            async with lock:
                known = await self._known(operation_id)
                if known is not None:
                    return _same(known, spec)
                return await self._start_new(operation_id, spec, caller)
        finally:
            if not lock.locked():
                self._starting.pop(operation_id, None)

    async def _start_new(
        self, operation_id: str, spec: fleet_pb2.OperationSpec, caller: str
    ) -> fleet_pb2.FleetOperation:
        self._refuse_when_stopping()
        if len(self._live) >= MAX_ACTIVE:
            raise failure(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_OPERATIONS",
                f"{len(self._live)} operations are under way, the most a coordinator runs; try again later",
                retry_after=5.0,
            )
        if self._store.trouble.startswith("the store is corrupt"):
            raise as_failure(StoreError(self._store.trouble))
        try:
            resolved = await self._resolve(spec)
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
            replicas = GrpcReplicas(self._channels, resolved.identities)
            # Made before anything is on record: a rollout that makes no sense is refused, not remembered.
            Execution(operation_id, spec, resolved.aims, replicas)
            await self._store.create(operation, resolved.aims, resolved.apart, caller)
            stored = await self._store.read(operation_id)
        except Exception as error:
            raise as_failure(error) from error
        if stored is None:
            raise failure(grpc.StatusCode.INTERNAL, "STORE_FAILED", f"operation {operation_id} is not on record")
        _audit.info(
            "fleet operation=%s id=%s caller=%s targets=%d phase=start",
            spec.WhichOneof("operation"),
            operation_id,
            caller,
            len(stored.aims),
        )
        return self._begin(stored, replicas).snapshot()

    async def _resolve(self, spec: fleet_pb2.OperationSpec) -> resolution.Resolved:
        selection = read_targets(spec.targets)
        discovered = await self._discovery.targets()
        counted = spec.rollout.strategy == fleet_pb2.ROLLOUT_STRATEGY_ROLLING or spec.rollout.max_failures > 0
        return await resolution.resolve(selection, discovered, self._channels, ask_all=counted)

    # --- after a crash -------------------------------------------------------------------------------------------

    async def resume_all(self) -> int:
        """Take up every operation on record that has not ended; how many."""
        unfinished = await self._store.unfinished()
        for stored in unfinished:
            stored.operation.version += RESUME_GAP
            asked = [was.request_id for was in stored.recorded.values() if was.result is None]
            _log.info(
                "operation resumed id=%s targets=%d recorded=%d to_ask=%d",
                stored.operation.operation_id,
                len(stored.aims),
                len(stored.recorded),
                len(asked),
            )
            self._begin(stored, None)
        return len(unfinished)

    async def _identities(self, stored: StoredOperation) -> dict[str, types_pb2.ReplicaInfo]:
        """Who the targets are that were called before the crash: a further address of one of them must not be called
        as if it were another replica.
        """
        called = [aim for aim in stored.aims if aim.name in stored.recorded and stored.recorded[aim.name].request_id]
        if len(called) == len(stored.aims):
            return {}

        async def one(aim: Aim) -> tuple[str, types_pb2.ReplicaInfo | None]:
            target = Target(aim.address, aim.name, server_name=aim.server_name)
            async with self._channels.lease(target) as channel:
                found = await calls.get_replica(channel, aim.address, _IDENTIFY_S, self._channels.metadata())
            return aim.address, found if isinstance(found, types_pb2.ReplicaInfo) else None

        answers = await asyncio.gather(*(one(aim) for aim in called))
        return {address: info for address, info in answers if info is not None}

    # --- running -------------------------------------------------------------------------------------------------

    def _begin(self, stored: StoredOperation, replicas: GrpcReplicas | None) -> LiveOperation:
        operation_id = stored.operation.operation_id
        live = LiveOperation(stored, StoreJournal(self._store, operation_id))
        self._live[operation_id] = live
        live.task = asyncio.create_task(self._run(live, replicas), name=f"operation-{operation_id}")
        return live

    async def _run(self, live: LiveOperation, replicas: GrpcReplicas | None) -> None:
        stored, operation = live.stored, live.operation
        try:
            if replicas is None:
                replicas = GrpcReplicas(self._channels, await self._identities(stored))
                for aim in stored.aims:
                    if aim.name in stored.recorded and stored.recorded[aim.name].request_id:
                        replicas.claim(aim)
            live.execution = execution = Execution(
                operation.operation_id,
                operation.spec,
                stored.aims,
                replicas,
                journal=live.journal,
                recorded=stored.recorded,
                on_change=lambda row: self._row_changed(live, row),
            )
            self._steer(live)
            live.show(fleet_pb2.OPERATION_STATE_PAUSED if live.held else fleet_pb2.OPERATION_STATE_RUNNING)
            await execution.run()
            self._metrics.retries.inc(execution.retries)
            for text in execution.warnings:
                live.warn(text)
        except Exception:  # noqa: BLE001 - logged and told; the coordinator goes on with the others
            # Not recorded as ended: whoever starts next takes it up again from what is on record.
            _log.exception("operation %s stopped by a defect", operation.operation_id)
            live.warn("a defect here stopped the operation, the log has the trace; restart the coordinator to go on")
            live.tell()
            return
        await self._conclude(live)

    async def _conclude(self, live: LiveOperation) -> None:
        """On record, then told. While the store refuses, the end is told all the same and recorded later."""
        operation_id = live.operation.operation_id
        while True:
            final = live.conclude()
            try:
                await live.journal.flush()
                await self._store.update(final, ended=True)
                break
            except StoreError as error:
                if not live.ended:
                    live.warn(f"the operation store failed, this result is kept in memory only: {error}")
                    live.end(live.conclude())
                    self._ended(live)
                await asyncio.sleep(_FLUSH_EVERY_S)
        if not live.ended:
            live.end(final)
            self._ended(live)
        self._live.pop(operation_id, None)
        self._recent[operation_id] = live
        while len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        await self.prune()

    def _ended(self, live: LiveOperation) -> None:
        operation = live.operation
        self._metrics.operation_ended(operation)
        self.unknowns.watch(operation)
        _audit.info(
            "fleet operation=%s id=%s caller=%s state=%s succeeded=%d total=%d phase=end",
            operation.spec.WhichOneof("operation"),
            operation.operation_id,
            live.stored.caller,
            fleet_pb2.OperationState.Name(operation.state),
            operation.counts.succeeded,
            operation.counts.total,
        )

    def _learned(self, operation: fleet_pb2.FleetOperation, _row: fleet_pb2.TargetResult) -> None:
        """The store has a newer end than the one in memory."""
        self._recent.pop(operation.operation_id, None)

    def _row_changed(self, live: LiveOperation, row: fleet_pb2.TargetResult) -> None:
        if row.outcome != fleet_pb2.TARGET_OUTCOME_RUNNING:
            self._metrics.target_ended(live.operation, row)
        live.row_changed(row)

    async def prune(self) -> None:
        """Forget what retention no longer keeps."""
        try:
            forgotten = await self._store.prune(self._retention.operations, self._retention.age_s)
        except StoreError as error:
            _log.warning("old operations not removed: %s", error)
            return
        if forgotten:
            _log.info("operations forgotten count=%d", forgotten)

    # --- steering ------------------------------------------------------------------------------------------------

    async def hold(self, operation_id: str, caller: str) -> fleet_pb2.FleetOperation:
        """Start no further target. In force even when the store refuses to record it."""
        live = await self._running(operation_id)
        live.held = True
        return await self._steered(live, "hold", caller)

    async def release(self, operation_id: str, caller: str) -> fleet_pb2.FleetOperation:
        """Go on."""
        self._refuse_when_stopping()
        live = await self._running(operation_id)
        live.held = False
        return await self._steered(live, "release", caller)

    async def cancel(self, operation_id: str, caller: str) -> fleet_pb2.FleetOperation:
        """Start no further target, for good. An operation that has ended is given back as it is."""
        live = self._live.get(_checked_id(operation_id))
        if live is None or live.ended:
            return await self.get(operation_id)
        live.cancelled = live.cancelled or _CANCELLED
        return await self._steered(live, "cancel", caller)

    async def _steered(self, live: LiveOperation, what: str, caller: str) -> fleet_pb2.FleetOperation:
        operation_id = live.operation.operation_id
        _audit.info("fleet operation=%s id=%s caller=%s phase=steer", what, operation_id, caller)
        try:
            await self._store.steer(operation_id, held=live.held, cancelled=live.cancelled)
        except StoreError as error:
            # Stopping must work when nothing else does; only a restart would forget it, and that is said.
            live.warn(f"{what} is in force but not on record, a restarted coordinator will not know it: {error}")
        self._steer(live)
        if not live.ended:
            live.show(fleet_pb2.OPERATION_STATE_PAUSED if live.held else fleet_pb2.OPERATION_STATE_RUNNING)
        return live.snapshot()

    def _steer(self, live: LiveOperation) -> None:
        if live.execution is None:
            return
        if live.held or self._stopping.is_set():
            live.execution.hold()
        else:
            live.execution.release()
        if live.cancelled:
            live.execution.cancel(live.cancelled)

    async def _running(self, operation_id: str) -> LiveOperation:
        live = self._live.get(_checked_id(operation_id))
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
        return [
            (sequence, self._live[found.operation_id].snapshot() if found.operation_id in self._live else found)
            for sequence, found in rows
        ]

    async def watch(self, operation_id: str, after_version: int) -> AsyncIterator[fleet_pb2.FleetOperation]:
        """The operation with what changed after a version, again and again until it has ended."""
        checked = _checked_id(operation_id)
        live = self._live.get(checked) or self._recent.get(checked)
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
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([changed, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            stopping.cancel()
        if self._stopping.is_set() and live.operation.version <= version:
            raise _stopping("watch again after the version seen last, at the coordinator that follows")

    async def _known(self, operation_id: str) -> fleet_pb2.FleetOperation | None:
        live = self._live.get(operation_id)
        if live is not None:
            return live.snapshot()
        try:
            stored = await self._store.read(operation_id)
        except StoreError as error:
            raise as_failure(error) from error
        return None if stored is None else stored.operation

    @property
    def active(self) -> int:
        """Operations under way."""
        return sum(not live.ended for live in self._live.values())

    @property
    def stopping(self) -> asyncio.Event:
        """Set once the coordinator shuts down."""
        return self._stopping

    # --- the end -------------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> None:
        """Start nothing more, let calls under way end within the grace, leave the rest to whoever starts next."""
        self._stopping.set()
        for live in self._live.values():
            self._steer(live)
        deadline = asyncio.get_running_loop().time() + grace_s
        for live in list(self._live.values()):
            if live.execution is not None:
                left = deadline - asyncio.get_running_loop().time()
                await live.execution.quiet(max(0.0, left))
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse_when_stopping(self) -> None:
        if self._stopping.is_set():
            raise _stopping("try again at the coordinator that follows")


def _checked_id(operation_id: str) -> str:
    try:
        return str(uuid.UUID(operation_id))
    except ValueError:
        text = f"operation_id {operation_id[:64]!r} is not a UUID; make one with `uuidgen`"
        raise invalid("operation_id", text) from None


def _same(known: fleet_pb2.FleetOperation, spec: fleet_pb2.OperationSpec) -> fleet_pb2.FleetOperation:
    if known.spec == spec:
        return known
    raise failure(
        grpc.StatusCode.ABORTED,
        "REQUEST_ID_REUSED",
        f"operation {known.operation_id} is on record with another request; use a new id for a new operation",
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
