"""What kvctl's exit code says, decided in one place.

    0  every replica did all that was asked
    1  no replica did
    2  the command was wrong, also by a request id that belongs to another operation; nothing was done
    3  some replicas did, or the set of replicas may be incomplete
    4  no replica could be reached, or every one denied the call
    5  the deadline passed, or what happened is unknown or could not be shown

When nothing succeeded the code says what the caller has to do about it: 5 (look before trying again) goes before 1
(what was asked was refused), and 4 is kept for when every replica was out of reach. A duplicate address stands for a
replica that has a row of its own, so it counts neither way.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.outcomes import DUPLICATE_TARGET, NOT_CALLED

DEADLINE_CODES = frozenset({"DEADLINE_EXCEEDED"})
DENIED_CODES = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
UNREACHABLE_CODES = frozenset({"UNAVAILABLE"}) | DENIED_CODES


class Exit(IntEnum):
    """Exit codes of kvctl."""

    SUCCEEDED = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    UNREACHABLE = 4
    UNKNOWN = 5


def of_operation(operation: fleet_pb2.FleetOperation) -> Exit:
    """The exit code for a fleet operation that has ended, or that was left while it ran."""
    if operation.state in _NOT_ENDED:
        return Exit.UNKNOWN
    rows = [row for row in operation.results if row.reason != DUPLICATE_TARGET]
    succeeded = sum(row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED for row in rows)
    if rows and succeeded == len(rows):
        return Exit.PARTIAL if operation.targets_incomplete else Exit.SUCCEEDED
    if succeeded:
        return Exit.PARTIAL
    if any(row.outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN or row.code in DEADLINE_CODES for row in rows):
        return Exit.UNKNOWN
    called = [row for row in rows if row.outcome not in NOT_CALLED]
    if called and all(row.reason == _REUSED for row in called):
        return Exit.USAGE
    if called and all(row.outcome == fleet_pb2.TARGET_OUTCOME_UNREACHABLE for row in called):
        return Exit.UNREACHABLE
    return Exit.FAILED


def of_reads(codes: Iterable[str], *, incomplete: bool) -> Exit:
    """The exit code for a read (admission, replicas), from the gRPC code name of each replica's answer."""
    found = list(codes)
    answered = sum(code == "OK" for code in found)
    if found and answered == len(found):
        return Exit.PARTIAL if incomplete else Exit.SUCCEEDED
    if answered:
        return Exit.PARTIAL
    if any(code in DEADLINE_CODES for code in found):
        return Exit.UNKNOWN
    return of_code(found[0]) if found else Exit.UNREACHABLE


def of_admission(fleet: fleet_pb2.FleetAdmissionResponse) -> Exit:
    """The exit code for admission: as of any read, and 1 when every replica answered and an engine stalls."""
    code = of_reads((row.code for row in fleet.replicas), incomplete=fleet.incomplete)
    return Exit.FAILED if fleet.stalled and code == Exit.SUCCEEDED else code


def of_code(code: str, reason: str = "") -> Exit:
    """The exit code for one call that failed as a whole, such as one to the coordinator."""
    if code == "OK":
        return Exit.SUCCEEDED
    if code == "INVALID_ARGUMENT" or reason == _REUSED:
        return Exit.USAGE
    if code in UNREACHABLE_CODES:
        return Exit.UNREACHABLE
    if code in DEADLINE_CODES:
        return Exit.UNKNOWN
    return Exit.FAILED


_NOT_ENDED = frozenset(
    {fleet_pb2.OPERATION_STATE_PENDING, fleet_pb2.OPERATION_STATE_RUNNING, fleet_pb2.OPERATION_STATE_PAUSED}
)
_REUSED = "REQUEST_ID_REUSED"
