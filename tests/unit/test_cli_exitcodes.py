"""What the exit code of kvctl says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvctl.v1 import fleet_pb2

from sidecar.cli.exitcodes import Exit, of_code, of_operation, of_reads
from sidecar.coordinator import outcomes

SUCCEEDED = (fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK", "")
FAILED = (fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS")
LATE = (fleet_pb2.TARGET_OUTCOME_FAILED, "DEADLINE_EXCEEDED", "NOT_EXECUTED")
DEAD_ENGINE = (fleet_pb2.TARGET_OUTCOME_FAILED, "UNAVAILABLE", "ENGINE_DEAD")
REUSED = (fleet_pb2.TARGET_OUTCOME_FAILED, "ABORTED", "REQUEST_ID_REUSED")
UNREACHABLE = (fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE")
DENIED = (fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "PERMISSION_DENIED", "ROLE_TOO_SMALL")
UNKNOWN = (fleet_pb2.TARGET_OUTCOME_UNKNOWN, "DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN")
NOT_READY = (fleet_pb2.TARGET_OUTCOME_SKIPPED, "CANCELLED", "TARGET_NOT_READY")
DUPLICATE = (fleet_pb2.TARGET_OUTCOME_SKIPPED, "CANCELLED", "DUPLICATE_TARGET")
CANCELLED = (fleet_pb2.TARGET_OUTCOME_CANCELLED, "CANCELLED", "CANCELLED")

Row = tuple[int, str, str]


def operation(rows: list[Row], *, incomplete: bool = False) -> fleet_pb2.FleetOperation:
    made = fleet_pb2.FleetOperation(targets_incomplete=incomplete)
    for number, (outcome, code, reason) in enumerate(rows):
        made.results.add(replica=f"r{number}", outcome=outcome, code=code, reason=reason)
    made.state = outcomes.final_state(made)
    return made


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([SUCCEEDED, SUCCEEDED], Exit.SUCCEEDED),
        ([SUCCEEDED, DUPLICATE], Exit.SUCCEEDED),
        ([FAILED, FAILED], Exit.FAILED),
        ([SUCCEEDED, DEAD_ENGINE], Exit.PARTIAL),
        ([SUCCEEDED, UNKNOWN], Exit.PARTIAL),
        ([SUCCEEDED, NOT_READY], Exit.PARTIAL),
        ([UNREACHABLE, DENIED], Exit.UNREACHABLE),
        ([UNREACHABLE, NOT_READY], Exit.UNREACHABLE),
        ([UNREACHABLE, FAILED], Exit.FAILED),
        ([FAILED, UNKNOWN], Exit.UNKNOWN),
        ([LATE, LATE], Exit.UNKNOWN),
        ([DEAD_ENGINE], Exit.FAILED),
        ([CANCELLED], Exit.FAILED),
        ([REUSED, REUSED], Exit.USAGE),
        ([REUSED, FAILED], Exit.FAILED),
        ([REUSED, SUCCEEDED], Exit.PARTIAL),
        ([SUCCEEDED, CANCELLED], Exit.PARTIAL),
        ([], Exit.FAILED),
    ],
)
def test_the_exit_code_of_an_operation(rows: list[Row], expected: Exit) -> None:
    assert of_operation(operation(rows)) is expected


ROWS = st.lists(
    st.sampled_from([SUCCEEDED, FAILED, LATE, DEAD_ENGINE, UNREACHABLE, DENIED, UNKNOWN, NOT_READY, CANCELLED]),
    max_size=6,
)


@given(ROWS, st.booleans())
def test_zero_means_every_replica_succeeded_and_none_may_be_missing(rows: list[Row], incomplete: bool) -> None:
    code = of_operation(operation(rows, incomplete=incomplete))
    assert (code == Exit.SUCCEEDED) == (bool(rows) and set(rows) == {SUCCEEDED} and not incomplete)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "PAUSED"])
def test_an_operation_that_has_not_ended_is_unknown(state: str) -> None:
    under_way = operation([SUCCEEDED, (fleet_pb2.TARGET_OUTCOME_UNSPECIFIED, "", "")])
    under_way.state = fleet_pb2.OperationState.Value(f"OPERATION_STATE_{state}")
    assert of_operation(under_way) is Exit.UNKNOWN


@pytest.mark.parametrize(
    ("codes", "incomplete", "expected"),
    [
        (["OK", "OK"], False, Exit.SUCCEEDED),
        (["OK"], True, Exit.PARTIAL),
        (["OK", "UNAVAILABLE"], False, Exit.PARTIAL),
        (["UNAVAILABLE"], False, Exit.UNREACHABLE),
        (["PERMISSION_DENIED"], False, Exit.UNREACHABLE),
        (["DEADLINE_EXCEEDED"], False, Exit.UNKNOWN),
        (["INTERNAL"], False, Exit.FAILED),
        ([], False, Exit.UNREACHABLE),
    ],
)
def test_the_exit_code_of_a_read(codes: list[str], incomplete: bool, expected: Exit) -> None:
    assert of_reads(codes, incomplete=incomplete) is expected


def test_a_request_id_of_another_operation_is_a_wrong_command() -> None:
    assert of_code("ABORTED", "REQUEST_ID_REUSED") is Exit.USAGE
    assert of_code("ABORTED", "OPERATION_IN_PROGRESS") is Exit.FAILED


@pytest.mark.parametrize(
    ("code", "expected"),
    [("INVALID_ARGUMENT", 2), ("UNAUTHENTICATED", 4), ("UNAVAILABLE", 4), ("INTERNAL", 1), ("OK", 0)],
)
def test_the_exit_code_of_one_call(code: str, expected: int) -> None:
    assert of_code(code) == expected
