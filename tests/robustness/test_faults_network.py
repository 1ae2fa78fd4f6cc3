"""A bad network between the coordinator and one replica: silence, late answers, resets, half-open and narrow lines.

The engine of r0 is held while the network is made bad, so that the fault meets a call under way. Every test ends with
the checker.
"""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2

from tests.contract.sidecar_process import wait_until
from tests.fake_engine.gate import AFTER_EFFECT, BEFORE_EFFECT
from tests.robustness.history import now_ns
from tests.robustness.recorded_fleet import LONG_S, RecordedFleet
from tests.robustness.tcp_proxy import Direction

PING_BYTES = 60
"""More than HTTP/2 says by itself at one time."""
SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED
UNKNOWN = fleet_pb2.TARGET_OUTCOME_UNKNOWN


def held(fleet: RecordedFleet, point: str = AFTER_EFFECT, timeout_s: int = 60, max_unavailable: int = 0) -> str:
    """An operation whose call to r0 is under way: r0's engine is held. With `max_unavailable` r1 has not been called
    yet, and is known to be there.
    """
    fleet.wait_reached()
    engine = fleet.replicas["r0"].engine
    engine.do("hold_at", point=point)
    operation_id = fleet.start(timeout_s, max_unavailable=max_unavailable)
    engine.do("wait_held")
    fleet.look(operation_id)
    return operation_id


def test_an_answer_that_is_lost_in_silence_is_unknown_until_the_replica_is_asked(loaded_fleet: RecordedFleet) -> None:
    operation_id = held(loaded_fleet, timeout_s=5)
    r0 = loaded_fleet.replicas["r0"]
    r0.break_network("black hole", lambda proxy: proxy.black_hole("back"))
    r0.engine.do("let_go")
    assert loaded_fleet.end(operation_id).results[0].outcome == UNKNOWN
    loaded_fleet.mend()
    assert loaded_fleet.settle(operation_id)[0].outcome == "succeeded"
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_an_answer_that_is_lost_by_a_reset_is_asked_for(loaded_fleet: RecordedFleet) -> None:
    for _ in range(5):
        operation_id = held(loaded_fleet)
        r0 = loaded_fleet.replicas["r0"]
        r0.break_network("reset", lambda proxy: proxy.reset())
        r0.engine.do("let_go")
        assert loaded_fleet.end(operation_id).results[0].outcome in (SUCCEEDED, UNKNOWN)
        assert loaded_fleet.settle(operation_id)[0].outcome == "succeeded"
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_a_replica_that_nobody_can_reach_any_more_is_unknown_and_known_when_it_can_be_asked(
    loaded_fleet: RecordedFleet,
) -> None:
    operation_id = held(loaded_fleet, BEFORE_EFFECT)
    r0 = loaded_fleet.replicas["r0"]
    r0.break_network("refuse", lambda proxy: proxy.reset(refuse=True))
    r0.engine.do("let_go")
    assert loaded_fleet.end(operation_id).results[0].outcome == UNKNOWN
    loaded_fleet.mend()
    assert loaded_fleet.settle(operation_id)[0].outcome == "succeeded"
    loaded_fleet.load(1)
    loaded_fleet.check()


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_a_half_closed_connection_costs_nothing_but_a_question(
    loaded_fleet: RecordedFleet, direction: Direction
) -> None:
    operation_id = held(loaded_fleet)
    r0 = loaded_fleet.replicas["r0"]
    r0.break_network("half close", lambda proxy: proxy.half_close(direction))
    r0.engine.do("let_go")
    assert loaded_fleet.end(operation_id).results[0].outcome in (SUCCEEDED, UNKNOWN)
    assert loaded_fleet.settle(operation_id)[0].outcome == "succeeded"
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_a_network_that_delays_by_two_seconds_makes_an_operation_slow_and_not_different(
    loaded_fleet: RecordedFleet,
) -> None:
    operation_id = held(loaded_fleet, max_unavailable=1)
    loaded_fleet.replicas["r1"].break_network("delay", lambda proxy: proxy.delay(2))
    loaded_fleet.replicas["r0"].engine.do("let_go")
    assert loaded_fleet.end(operation_id).state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_a_narrow_network_makes_an_operation_slow_and_not_different(loaded_fleet: RecordedFleet) -> None:
    operation_id = held(loaded_fleet, max_unavailable=1)
    loaded_fleet.replicas["r1"].break_network("throttle", lambda proxy: proxy.throttle(500))
    loaded_fleet.replicas["r0"].engine.do("let_go")
    assert loaded_fleet.end(operation_id).state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_a_call_that_a_network_keeps_beyond_its_deadline_is_never_executed(loaded_fleet: RecordedFleet) -> None:
    operation_id = held(loaded_fleet, timeout_s=4, max_unavailable=1)
    r1 = loaded_fleet.replicas["r1"]
    r1.break_network("black hole", lambda proxy: proxy.black_hole())
    loaded_fleet.replicas["r0"].engine.do("let_go")
    wait_until(lambda: r1.proxy.kept("forth") > PING_BYTES, LONG_S)
    # What comes later, such as "forget that call", comes even later.
    r1.proxy.black_hole()
    assert loaded_fleet.end(operation_id).results[1].outcome != SUCCEEDED
    over_ns = loaded_fleet.latest_start(operation_id, "r1")
    wait_until(lambda: now_ns() > over_ns, LONG_S)
    r1.proxy.release_first_lot()
    r1.proxy.wait_kept("back", 5)
    loaded_fleet.mend()
    loaded_fleet.load(2)
    loaded_fleet.check()
    assert loaded_fleet.settle(operation_id)[1].execution == "not_executed"
