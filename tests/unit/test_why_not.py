"""Why an operation is no success, in one phrase: what a list of operations tells of each."""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.outcomes import DUPLICATE_TARGET, conclude, why_not

SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED
FAILED = fleet_pb2.TARGET_OUTCOME_FAILED
UNREACHABLE = fleet_pb2.TARGET_OUTCOME_UNREACHABLE
SKIPPED = fleet_pb2.TARGET_OUTCOME_SKIPPED


def operation(*rows: tuple[int, str, str], incomplete: bool = False) -> fleet_pb2.FleetOperation:
    results = [
        fleet_pb2.TargetResult(replica=f"r{number}", outcome=outcome, reason=reason, code=code)  # type: ignore[arg-type]
        for number, (outcome, reason, code) in enumerate(rows)
    ]
    return fleet_pb2.FleetOperation(results=results, targets_incomplete=incomplete)


DONE = (SUCCEEDED, "", "OK")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([DONE] * 3, ""),
        ([DONE] * 6 + [(FAILED, "ENGINE_SLEEPING", "FAILED_PRECONDITION")] * 2, "2 of 8 failed: ENGINE_SLEEPING"),
        ([(FAILED, "", "INTERNAL")], "1 of 1 failed: INTERNAL"),
        (
            [DONE, (UNREACHABLE, "A", "X")] + [(FAILED, "B", "X")] * 2 + [(SKIPPED, "ROLLOUT_STOPPED", "X")] * 9,
            "2 of 13 failed: B; 1 unreachable: A; 9 skipped: ROLLOUT_STOPPED",
        ),
        (
            [(FAILED, reason, "X") for reason in "ABCDE"],
            "1 of 5 failed: A; 1 failed: B; 1 failed: C; 2 for other reasons",
        ),
        ([DONE, (SKIPPED, DUPLICATE_TARGET, "")], ""),
    ],
)  # fmt: skip
def test_the_reasons_of_most_targets_come_first_and_what_followed_from_them_last(
    rows: list[tuple[int, str, str]], told: str
) -> None:
    assert why_not(operation(*rows)) == told


def test_a_set_of_targets_that_may_be_incomplete_is_a_reason() -> None:
    assert why_not(operation(DONE, incomplete=True)) == "replicas may have been missed"


def test_an_operation_that_has_ended_has_its_state_and_the_reason() -> None:
    ended = operation(DONE, (FAILED, "CONNECTOR_BUSY", "FAILED_PRECONDITION"))
    conclude(ended)
    assert (ended.state, ended.why) == (fleet_pb2.OPERATION_STATE_PARTIAL, "1 of 2 failed: CONNECTOR_BUSY")
