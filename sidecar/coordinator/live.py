"""One operation while it runs: the message that callers see, and who waits for it to change.

A version is drawn for every change that can be seen, so that a watch that broke goes on where it was. Versions seen
before a crash may not be on record (a call that had begun, a result the store refused), so a resumed operation jumps
far ahead: nobody's "after version" lies in its future.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from kvctl.v1 import fleet_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.execution import Execution
from sidecar.coordinator.journal import StoreJournal
from sidecar.coordinator.schema import StoredOperation

RESUME_GAP: Final = 1_000_000
ROWS_IN_A_MESSAGE: Final = 200
"""Rows in one message of a watch: with eight engines each about 0.5 MB, well under the 4 MB a message may have."""

ENDED: Final = frozenset(
    {
        fleet_pb2.OPERATION_STATE_SUCCEEDED,
        fleet_pb2.OPERATION_STATE_FAILED,
        fleet_pb2.OPERATION_STATE_PARTIAL,
        fleet_pb2.OPERATION_STATE_CANCELLED,
    }
)
"""States an operation never leaves."""

Row = tuple[str, str]
"""Replica name and address: what identifies a row in its operation."""


class LiveOperation:
    """See the module. Belongs to one loop."""

    def __init__(self, stored: StoredOperation, journal: StoreJournal) -> None:
        self.operation = stored.operation
        self.stored = stored
        self.journal = journal
        self.execution: Execution | None = None
        self.task: asyncio.Task[None] | None = None
        self.held = stored.held
        self.cancelled = stored.cancelled
        self._rows = {(row.replica, row.address): row for row in self.operation.results}
        self._versions: dict[Row, int] = {}
        self._base = self.operation.version
        """Version of the rows that have not changed since this process has the operation."""
        self._changed = asyncio.Event()
        self._began = time.monotonic() - wall_age_s(self.operation)

    @property
    def ended(self) -> bool:
        """Whether it has its final state."""
        return self.operation.state in ENDED

    @property
    def age_s(self) -> float:
        """Seconds since it was put on record, whatever the wall clock did while this process has it."""
        return time.monotonic() - self._began

    # --- changes -------------------------------------------------------------------------------------------------

    def row_changed(self, result: fleet_pb2.TargetResult) -> None:
        """A target has a new row."""
        key = (result.replica, result.address)
        row = self._rows[key]
        # Counted by difference: a thousand rows counted anew at each of their changes is a second of work.
        outcomes.recount(self.operation.counts, row.outcome, result.outcome)
        row.CopyFrom(result)
        self._versions[key] = self.operation.version + 1
        self.tell()

    def show(self, state: fleet_pb2.OperationState.ValueType) -> None:
        """It stands elsewhere now."""
        if self.operation.state != state:
            self.operation.state = state
            self.tell()

    def show_under_way(self) -> None:
        """Held or running; what is cancelled is held no more."""
        held = self.held and not self.cancelled
        self.show(fleet_pb2.OPERATION_STATE_PAUSED if held else fleet_pb2.OPERATION_STATE_RUNNING)

    def warn(self, text: str) -> None:
        """Something worth telling."""
        if text not in self.operation.warnings:
            self.operation.warnings.append(text)

    def conclude(self) -> fleet_pb2.FleetOperation:
        """The operation as it will be once `end` is called: to be put on record before anybody is told."""
        final = fleet_pb2.FleetOperation()
        final.CopyFrom(self.operation)
        outcomes.conclude(final)
        final.took.FromTimedelta(timedelta(seconds=self.age_s))
        final.version += 1
        return final

    def end(self, final: fleet_pb2.FleetOperation) -> None:
        """Take over what `conclude` gave, and tell."""
        self.operation.state, self.operation.why = final.state, final.why
        self.operation.took.CopyFrom(final.took)
        self.operation.version = final.version
        self._wake()

    def tell(self) -> None:
        """Draw a version and wake whoever waits."""
        self.operation.version += 1
        self._wake()

    # --- looking -------------------------------------------------------------------------------------------------

    def snapshot(self) -> fleet_pb2.FleetOperation:
        """The whole operation, a copy."""
        copied = fleet_pb2.FleetOperation()
        copied.CopyFrom(self.operation)
        return copied

    def since(self, version: int) -> Iterator[fleet_pb2.FleetOperation]:
        """The operation in messages of bounded size, with the rows that changed after `version`; the first of them has
        everything else as well.
        """
        changed = [row for key, row in self._rows.items() if self._versions.get(key, self._base) > version]
        yield from in_messages(self.operation, changed)

    async def changed_after(self, version: int) -> None:
        """Returns once there is something newer than `version`."""
        while self.operation.version <= version:
            changed = self._changed
            await changed.wait()

    # --- inside --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def in_messages(
    operation: fleet_pb2.FleetOperation, rows: list[fleet_pb2.TargetResult]
) -> Iterator[fleet_pb2.FleetOperation]:
    """An operation with these rows, ROWS_IN_A_MESSAGE at a time; at least one message.

    Only the last message carries the version and may say that it ended: a watch that breaks between two of them gets
    all rows again.
    """
    for start in range(0, max(len(rows), 1), ROWS_IN_A_MESSAGE):
        part = fleet_pb2.FleetOperation()
        part.CopyFrom(without_rows(operation))
        part.results.extend(rows[start : start + ROWS_IN_A_MESSAGE])
        if start + ROWS_IN_A_MESSAGE < len(rows):
            part.version = 0
            part.state = fleet_pb2.OPERATION_STATE_RUNNING
        yield part


def wall_age_s(operation: fleet_pb2.FleetOperation) -> float:
    """Seconds since it was put on record, by the wall clock; 0 when that was set back meanwhile."""
    return max(0.0, time.time() - operation.started_at.ToNanoseconds() / 1e9)


def without_rows(operation: fleet_pb2.FleetOperation) -> fleet_pb2.FleetOperation:
    """A copy without results."""
    bare = fleet_pb2.FleetOperation(
        operation_id=operation.operation_id,
        kind=operation.kind,
        spec=operation.spec,
        state=operation.state,
        counts=operation.counts,
        targets_incomplete=operation.targets_incomplete,
        warnings=operation.warnings,
        started_at=operation.started_at,
        version=operation.version,
        why=operation.why,
    )
    if operation.HasField("took"):
        bare.took.CopyFrom(operation.took)
    return bare
