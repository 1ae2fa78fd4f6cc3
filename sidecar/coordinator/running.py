"""Fleet operations under way: begun, taken up again after a crash, brought to their end, left to a successor.

The order is always: on record, then done, then told (see `execution` for one target). A store that fails lets what
runs end in memory; what it could not record is tried again until it can.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import calls, outcomes, resolution
from sidecar.coordinator.audit import FleetAudit, kind_of
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.execution import Execution
from sidecar.coordinator.fanout import GrpcReplicas
from sidecar.coordinator.journal import StoreJournal
from sidecar.coordinator.live import RESUME_GAP, LiveOperation
from sidecar.coordinator.metrics import CoordinatorMetrics
from sidecar.coordinator.pods import PodReplicas
from sidecar.coordinator.port import Aim, Recorded
from sidecar.coordinator.schema import StoredOperation, StoreError
from sidecar.coordinator.store import Store
from sidecar.coordinator.targets import Target
from sidecar.coordinator.unknowns import Unknowns

_RECENT: Final = 8
"""Ended operations kept whole: each takes some 5 KB a target."""
_IDENTIFY_S: Final = 2.0
_FLUSH_EVERY_S: Final = 5.0
_STOPPED: Final = "not called: the operation was stopped when the store could not be written, before a restart"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of the past is kept. Operations that have not ended are always kept."""

    operations: int = 1000
    age_s: float = 30 * 86400.0

    @property
    def most_by_age(self) -> int:
        """Operations that one hour may forget for their age: a wall clock that jumps by a year takes a day to empty the
        store, in which it can be set right.
        """
        return max(10, -(-self.operations // 24))


class Running:
    """See the module. Belongs to one loop."""

    def __init__(
        self,
        store: Store,
        discovery: Discovery,
        channels: Channels,
        metrics: CoordinatorMetrics,
        audit: FleetAudit,
        retention: Retention,
    ) -> None:
        self._store = store
        self._discovery = discovery
        self._channels = channels
        self._metrics = metrics
        self._audit = audit
        self._retention = retention
        self.unknowns = Unknowns(store, PodReplicas(channels, discovery), metrics, self._learned)
        self.stopping = asyncio.Event()
        """Set once the coordinator shuts down."""
        self._live: dict[str, LiveOperation] = {}
        self._recent: OrderedDict[str, LiveOperation] = OrderedDict()
        """The last that ended: a watch that comes back for the end gets what it missed and no more."""

    # --- looking -------------------------------------------------------------------------------------------------

    def find(self, operation_id: str) -> LiveOperation | None:
        """An operation that runs, or whose end is not on record yet."""
        return self._live.get(operation_id)

    def find_recent(self, operation_id: str) -> LiveOperation | None:
        """One that runs, or ended a moment ago."""
        return self._live.get(operation_id) or self._recent.get(operation_id)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def active(self) -> int:
        """Operations under way."""
        return sum(not live.ended for live in self._live.values())

    # --- beginning -----------------------------------------------------------------------------------------------

    def begin(self, stored: StoredOperation, replicas: GrpcReplicas | None, *, stopped: bool = False) -> LiveOperation:
        """Run what is on record. Without `replicas` it was begun by a coordinator that is gone. `stopped`: one
        that had told that it calls no further target, and could not record that.
        """
        operation_id = stored.operation.operation_id
        live = LiveOperation(stored, StoreJournal(self._store, operation_id))
        self._live[operation_id] = live
        if stopped:
            _skip_what_was_not_called(live)
        live.task = asyncio.create_task(self._run(live, replicas), name=f"operation-{operation_id}")
        return live

    async def resume_all(self) -> int:
        """Take up every operation on record that has not ended; how many."""
        unfinished = await self._store.unfinished()
        stopped = set(self._store.stopped.ids())
        for operation_id in stopped - {stored.operation.operation_id for stored in unfinished}:
            self._store.stopped.remove(operation_id)
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
            self._audit.resumed(stored.operation, stored.caller)
            self.begin(stored, None, stopped=stored.operation.operation_id in stopped)
        return len(unfinished)

    async def _called_before(self, stored: StoredOperation) -> GrpcReplicas:
        """The replicas, knowing who the targets are that were called before the crash: a further address of one of them
        must not be called as if it were another replica.
        """
        called = [aim for aim in stored.aims if aim.name in stored.recorded and stored.recorded[aim.name].request_id]
        if len(called) == len(stored.aims):
            return PodReplicas(self._channels, self._discovery)

        async def one(aim: Aim) -> tuple[str, types_pb2.ReplicaInfo | None]:
            target = Target(aim.address, aim.name, server_name=aim.server_name)
            async with self._channels.lease(target) as channel:
                found = await calls.get_replica(channel, aim.address, _IDENTIFY_S, self._channels.metadata())
            return aim.address, found if isinstance(found, types_pb2.ReplicaInfo) else None

        answers = await asyncio.gather(*(one(aim) for aim in called))
        identities = {address: info for address, info in answers if info is not None}
        replicas = PodReplicas(self._channels, self._discovery, identities)
        for aim in called:
            replicas.claim(aim)
        return replicas

    # --- running -------------------------------------------------------------------------------------------------

    async def _run(self, live: LiveOperation, replicas: GrpcReplicas | None) -> None:
        stored, operation = live.stored, live.operation
        try:
            replicas = replicas or await self._called_before(stored)
            live.execution = execution = Execution(
                operation.operation_id,
                operation.spec,
                stored.aims,
                replicas,
                journal=self._audit.journal(live.journal, operation, stored.aims, stored.caller),
                recorded=stored.recorded,
                on_change=lambda row: self._row_changed(live, row),
                on_health=live.row_changed,
                spent_s=replicas.spent_s(stored.aims),
                most_calls=self._channels.limit,
            )
            self.steer(live)
            live.show_under_way()
            await execution.run()
            self._metrics.retries.inc(execution.retries)
            for text in (*execution.warnings, *replicas.other_names()):
                live.warn(text)
        except Exception:  # noqa: BLE001 - logged and told; the coordinator goes on with the others
            # Not recorded as ended: whoever starts next takes it up again from what is on record.
            _log.exception("operation %s stopped by a defect", operation.operation_id)
            live.warn("a defect here stopped the operation, the log has the trace; restart the coordinator to go on")
            live.tell()
            return
        await self._conclude(live)

    def steer(self, live: LiveOperation) -> None:
        """Carry hold, release and cancel over to what runs."""
        if live.execution is None:
            return
        if live.held or self.stopping.is_set():
            live.execution.hold()
        else:
            live.execution.release()
        if live.cancelled:
            live.execution.cancel(live.cancelled)

    async def _conclude(self, live: LiveOperation) -> None:
        """On record, then told. While the store refuses, the end is told all the same and recorded later."""
        operation_id = live.operation.operation_id
        while True:
            final = live.conclude()
            try:
                await live.journal.flush()
                await self._store.update(final, ended=True)
                await asyncio.to_thread(self._store.stopped.remove, operation_id)
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
        await self._prune(0)

    def _ended(self, live: LiveOperation) -> None:
        operation = live.operation
        self._metrics.operation_ended(operation)
        self.unknowns.watch(operation, live.age_s)
        state = fleet_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower()
        counts = {"succeeded": operation.counts.succeeded, "total": operation.counts.total}
        self._audit.end(live.stored.caller, kind_of(operation), operation.operation_id, {"state": state, **counts})

    def _learned(self, operation: fleet_pb2.FleetOperation, _row: fleet_pb2.TargetResult) -> None:
        """The store has a newer end than the one in memory."""
        self._recent.pop(operation.operation_id, None)

    def _row_changed(self, live: LiveOperation, row: fleet_pb2.TargetResult) -> None:
        if row.outcome != fleet_pb2.TARGET_OUTCOME_RUNNING:
            self._metrics.target_ended(live.operation, row)
        live.row_changed(row)

    # --- the end -------------------------------------------------------------------------------------------------

    async def prune(self) -> None:
        """Forget what retention no longer keeps; to be called once an hour."""
        await self._prune(self._retention.most_by_age)

    async def _prune(self, most_by_age: int) -> None:
        try:
            forgotten = await self._store.prune(self._retention.operations, self._retention.age_s, most_by_age)
        except StoreError as error:
            _log.warning("old operations not removed: %s", error)
            return
        if forgotten:
            _log.info("operations forgotten count=%d", forgotten)

    async def drain(self, grace_s: float) -> None:
        """Start nothing more, let calls under way end within the grace, leave the rest to whoever starts next."""
        self.stopping.set()
        for live in self._live.values():
            self.steer(live)
        deadline = asyncio.get_running_loop().time() + grace_s
        for live in list(self._live.values()):
            if live.execution is not None:
                left = deadline - asyncio.get_running_loop().time()
                await live.execution.quiet(max(0.0, left))
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _skip_what_was_not_called(live: LiveOperation) -> None:
    """As its callers were told; on record with the operation's end."""
    for aim in live.stored.aims:
        if aim.name not in live.stored.recorded:
            row = resolution.skipped(aim.name, aim.address, outcomes.ROLLOUT_STOPPED, _STOPPED)
            row.labels.update(aim.labels)
            live.stored.recorded[aim.name] = Recorded("", 0, row)
            live.journal.unrecorded[aim.name] = row
            live.row_changed(row)
