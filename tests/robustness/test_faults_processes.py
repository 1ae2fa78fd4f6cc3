"""kill -9 and SIGSTOP of an engine, a sidecar and the coordinator, between two instructions of one operation.

The engine of r0 is held at the point, so that the fault falls there on any machine. Every test ends with the checker.
"""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2

from tests.contract.sidecar_process import wait_until
from tests.fake_engine.gate import AFTER_EFFECT, POINTS
from tests.robustness.history import Ended
from tests.robustness.recorded_fleet import LONG_S, RecordedFleet

SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED
FAILED = fleet_pb2.TARGET_OUTCOME_FAILED
UNKNOWN = fleet_pb2.TARGET_OUTCOME_UNKNOWN
SKIPPED = fleet_pb2.TARGET_OUTCOME_SKIPPED


def held_at(
    point: str, fleet: RecordedFleet, timeout_s: int = 60, *, one_by_one: bool = False, failures: int = 0
) -> str:
    """An operation whose first replica is held at the point; one by one, it ends after so many failures."""
    engine = fleet.replicas["r0"].engine
    engine.do("hold_at", point=point)
    operation_id = fleet.start(timeout_s, max_unavailable=int(one_by_one), max_failures=failures)
    engine.do("wait_held")
    fleet.look(operation_id)
    return operation_id


def finish_at_the_engine(fleet: RecordedFleet, operation_id: str) -> None:
    """Let r0's engine go, and wait until it has answered."""
    before = len(ended_at(fleet, "r0"))
    fleet.replicas["r0"].engine.do("let_go")
    wait_until(lambda: len(ended_at(fleet, "r0")) > before, LONG_S, fleet.events)


def ended_at(fleet: RecordedFleet, replica: str) -> list[Ended]:
    return [event for event in fleet.events() if isinstance(event, Ended) and event.replica == replica]


@pytest.mark.parametrize("point", POINTS)
def test_an_engine_killed_at_this_point_is_never_told_as_done(loaded_fleet: RecordedFleet, point: str) -> None:
    operation_id = held_at(point, loaded_fleet)
    loaded_fleet.replicas["r0"].kill_engine()
    r0, r1 = loaded_fleet.end(operation_id).results
    assert r0.outcome in (FAILED, UNKNOWN), r0
    assert r1.outcome == SUCCEEDED, r1
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()


@pytest.mark.parametrize("point", POINTS)
def test_a_sidecar_killed_at_this_point_costs_no_second_effect_and_its_successor_knows(
    loaded_fleet: RecordedFleet, point: str
) -> None:
    operation_id = held_at(point, loaded_fleet)
    loaded_fleet.replicas["r0"].kill_sidecar()
    finish_at_the_engine(loaded_fleet, operation_id)
    loaded_fleet.mend()
    r0, r1 = loaded_fleet.end(operation_id).results
    assert r0.outcome in (SUCCEEDED, UNKNOWN), r0
    assert r1.outcome == SUCCEEDED, r1
    assert [row.outcome for row in loaded_fleet.settle(operation_id)] == ["succeeded", "succeeded"]
    loaded_fleet.load(1)
    loaded_fleet.check()


@pytest.mark.parametrize("point", POINTS)
def test_a_coordinator_killed_at_this_point_is_taken_over_without_a_second_effect(
    loaded_fleet: RecordedFleet, point: str
) -> None:
    operation_id = held_at(point, loaded_fleet)
    loaded_fleet.coordinator.kill()
    finish_at_the_engine(loaded_fleet, operation_id)
    loaded_fleet.coordinator.start()
    assert loaded_fleet.end(operation_id).state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    loaded_fleet.load(1)
    loaded_fleet.check()


@pytest.mark.parametrize("point", POINTS)
def test_an_engine_stopped_at_this_point_is_unknown_until_it_goes_on_and_is_asked(
    loaded_fleet: RecordedFleet, point: str
) -> None:
    operation_id = held_at(point, loaded_fleet, timeout_s=5)
    r0 = loaded_fleet.replicas["r0"]
    r0.stop_engine()
    assert loaded_fleet.end(operation_id).results[0].outcome == UNKNOWN
    r0.continue_engine()
    finish_at_the_engine(loaded_fleet, operation_id)
    assert loaded_fleet.settle(operation_id)[0].outcome == "succeeded"
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_an_engine_stopped_before_it_takes_the_operation_up_never_runs_it_later(loaded_fleet: RecordedFleet) -> None:
    r0 = loaded_fleet.replicas["r0"]
    r0.stop_engine()
    operation_id = loaded_fleet.start(timeout_s=3)
    assert loaded_fleet.end(operation_id).results[0].outcome != SUCCEEDED
    r0.continue_engine()
    loaded_fleet.mend()
    loaded_fleet.load(1)
    assert loaded_fleet.settle(operation_id)[0].execution == "not_executed"
    loaded_fleet.check()


def test_a_rollout_goes_on_past_a_target_that_it_gave_up_on_and_never_before(loaded_fleet: RecordedFleet) -> None:
    operation_id = held_at(AFTER_EFFECT, loaded_fleet, timeout_s=5, one_by_one=True, failures=2)
    r0 = loaded_fleet.replicas["r0"]
    r0.stop_engine()
    assert [row.outcome for row in loaded_fleet.end(operation_id).results] == [UNKNOWN, SUCCEEDED]
    r0.continue_engine()
    finish_at_the_engine(loaded_fleet, operation_id)
    assert [row.outcome for row in loaded_fleet.settle(operation_id)] == ["succeeded", "succeeded"]
    loaded_fleet.load(1)
    loaded_fleet.check()


@pytest.mark.parametrize("point", POINTS)
def test_a_rollout_that_ends_at_a_failure_gives_those_it_never_called_their_one_result_too(
    loaded_fleet: RecordedFleet, point: str
) -> None:
    operation_id = held_at(point, loaded_fleet, one_by_one=True, failures=1)
    loaded_fleet.replicas["r0"].kill_engine()
    r0, r1 = loaded_fleet.end(operation_id).results
    assert r0.outcome in (FAILED, UNKNOWN), r0
    assert (r1.outcome, r1.reason) == (SKIPPED, "ROLLOUT_STOPPED"), r1
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()


@pytest.mark.parametrize("whom", ["sidecar", "coordinator"])
@pytest.mark.parametrize("point", POINTS)
def test_a_server_stopped_at_this_point_finishes_the_operation_when_it_goes_on(
    loaded_fleet: RecordedFleet, point: str, whom: str
) -> None:
    operation_id = held_at(point, loaded_fleet)
    r0 = loaded_fleet.replicas["r0"]
    if whom == "sidecar":
        r0.stop_sidecar()
    else:
        loaded_fleet.coordinator.stop()
    finish_at_the_engine(loaded_fleet, operation_id)
    loaded_fleet.mend()
    assert loaded_fleet.end(operation_id).state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    loaded_fleet.load(1)
    loaded_fleet.check()
