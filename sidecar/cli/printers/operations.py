"""Operations on record: a row an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Console

from sidecar.cli.printers.style import fitting, table, words
from sidecar.coordinator.outcomes import enum_word

_COLUMNS: Final = ("OPERATION", "KIND", "STATE", "DONE", "STARTED")
_TELLING: Final = 8
"""Characters of an id that tell it from others in one list, unless people have chosen ids that begin alike."""

_TONES = {
    fleet_pb2.OPERATION_STATE_SUCCEEDED: "good",
    fleet_pb2.OPERATION_STATE_FAILED: "bad",
    fleet_pb2.OPERATION_STATE_PARTIAL: "doubtful",
    fleet_pb2.OPERATION_STATE_CANCELLED: "quiet",
}


def state_name(state: fleet_pb2.OperationState.ValueType) -> str:
    """running, paused, succeeded, ..."""
    return enum_word(fleet_pb2.OperationState.DESCRIPTOR, state, "OPERATION_STATE_")


def print_table(console: Console, operations: Sequence[fleet_pb2.FleetOperation]) -> None:
    """A row an operation, newest first, and below what those that did not do it all came to."""
    if not operations:
        console.print("no operation on record")
        return
    rows = []
    for operation in operations:
        counts = operation.counts
        kind = enum_word(types_pb2.OperationKind.DESCRIPTOR, operation.kind, "OPERATION_KIND_")
        rows.append(
            [
                words(operation.operation_id),
                words(kind),
                words(state_name(operation.state), _TONES.get(operation.state, "")),
                words(f"{counts.succeeded}/{counts.total}"),
                words(
                    operation.started_at.ToDatetime().strftime("%m-%d %H:%M")
                    if operation.HasField("started_at")
                    else "-"
                ),
            ]
        )
    shown = fitting(_COLUMNS, rows, console.width, 1)
    made = table(*_COLUMNS[:shown])
    for row in rows:
        made.add_row(*row[:shown])
    console.print(made)
    ids = {operation.operation_id for operation in operations}
    telling = _TELLING if len({each[:_TELLING] for each in ids}) == len(ids) else None
    for operation in operations:
        if operation.why:
            console.print(words(f"  {operation.operation_id[:telling]}  {operation.why}"))
