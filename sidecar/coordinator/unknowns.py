"""Operations that ended without knowing what happened at some replica: asked for again until it is known.

A lost answer is neither a success nor a failure, and an operator who reads UNKNOWN has to find out by hand. The replica
may be back a minute later and still have the result on record, so it is asked now and then for an hour after the end.
What it says becomes the target's row, and the operation's state follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvctl.v1 import fleet_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.attempt import settled
from sidecar.coordinator.live import wall_age_s
from sidecar.coordinator.metrics import CoordinatorMetrics
from sidecar.coordinator.port import Aim, Answer, Replicas
from sidecar.coordinator.retry import NEVER_TOLD, outcome_unknown
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.store import Store

ASK_EVERY_S: Final = 15.0
ASK_FOR_S: Final = 3600.0
ASK_TIMEOUT_S: Final = 5.0
_LOOK_BACK: Final = 200
"""Operations on record that a coordinator looks through when it starts."""

_log = logging.getLogger(__name__)

OnLearned = Callable[[fleet_pb2.FleetOperation, fleet_pb2.TargetResult], None]
"""Told the operation as it now is, and the row that became known."""


class Unknowns:
    """See the module. Belongs to one loop."""

    def __init__(
        self, store: Store, replicas: Replicas, metrics: CoordinatorMetrics, on_learned: OnLearned = lambda *_: None
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._metrics = metrics
        self._on_learned = on_learned
        self._open: dict[str, float] = {}
        """Id -> when it was put on record, on the loop's clock: the wall clock may be stepped meanwhile."""

    def watch(self, operation: fleet_pb2.FleetOperation, age_s: float) -> None:
        """An operation has ended that was put on record `age_s` ago; ask for what is unknown about it."""
        if operation.counts.unknown and age_s < ASK_FOR_S:
            self._open[operation.operation_id] = asyncio.get_running_loop().time() - age_s
        self._metrics.unknown.set(len(self._open))

    async def run(self) -> None:
        """Ask for ever; begins with what the last coordinator left."""
        try:
            for _, operation in await self._store.page(_LOOK_BACK, 0):
                self.watch(operation, wall_age_s(operation))
        except StoreError as error:
            _log.warning("operations with unknown outcomes cannot be looked up: %s", error)
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await self.ask_all()

    async def ask_all(self) -> None:
        """One round."""
        now = asyncio.get_running_loop().time()
        for operation_id, began in list(self._open.items()):
            try:
                left = await self._ask_for(operation_id, began)
            except StoreError as error:
                _log.warning("operation %s: what was learned is not on record: %s", operation_id, error)
                continue
            if not left or now - began >= ASK_FOR_S:
                self._open.pop(operation_id, None)
        self._metrics.unknown.set(len(self._open))

    async def _ask_for(self, operation_id: str, began: float) -> int:
        """How many targets are still unknown."""
        stored = await self._store.read(operation_id)
        if stored is None:
            return 0
        aims = {aim.name: aim for aim in stored.aims}
        unknown = [
            row
            for row in stored.operation.results
            if row.outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN and row.request_id and row.replica in aims
            if row.reason not in NEVER_TOLD
        ]
        learned = await asyncio.gather(*(self._ask(aims[row.replica], row, began) for row in unknown))
        for row, answer in zip(unknown, learned, strict=True):
            if answer is not None:
                await self._learn(stored.operation, row, answer.result)
        return sum(answer is None for answer in learned)

    async def _ask(self, aim: Aim, row: fleet_pb2.TargetResult, began: float) -> Answer | None:
        asked = await self._replicas.ask(aim, row.request_id, ASK_TIMEOUT_S)
        # Only now: while the question was on its way, a successor's records have grown as old as the call was before.
        answer = settled(asked, Answer(row), asyncio.get_running_loop().time() - began)
        return None if outcome_unknown(answer.result) else answer

    async def _learn(
        self, operation: fleet_pb2.FleetOperation, row: fleet_pb2.TargetResult, result: fleet_pb2.TargetResult
    ) -> None:
        known = fleet_pb2.TargetResult()
        known.CopyFrom(result)
        for field in ("replica", "address", "request_id", "attempts", "wave"):
            setattr(known, field, getattr(row, field))
        known.labels.update(row.labels)
        known.took.CopyFrom(row.took)
        await self._store.result(operation.operation_id, known)
        row.CopyFrom(known)
        operation.counts.CopyFrom(outcomes.count(operation.results))
        outcomes.conclude(operation)
        operation.version += 1
        operation.warnings.append(f"{known.replica}: its outcome became known after the end ({known.code})")
        await self._store.update(operation, ended=True)
        _log.info("outcome learned id=%s replica=%s code=%s", operation.operation_id, known.replica, known.code)
        self._on_learned(operation, known)
