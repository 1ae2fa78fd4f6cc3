"""A replica that is replaced by another one under the same name and address while an operation is under way there."""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2

from tests.fake_engine.gate import AFTER_EFFECT, POINTS
from tests.robustness.recorded_fleet import RecordedFleet


@pytest.mark.parametrize("point", POINTS)
def test_the_successor_is_never_taken_for_the_one_that_was_asked(loaded_fleet: RecordedFleet, point: str) -> None:
    r0 = loaded_fleet.replicas["r0"]
    r0.engine.do("hold_at", point=point)
    operation_id = loaded_fleet.start()
    r0.engine.do("wait_held")
    loaded_fleet.look(operation_id)
    r0.replace()
    first, second = loaded_fleet.end(operation_id).results
    # Either the successor did it itself, or nobody claims that it was done: the checker knows which is true.
    assert first.outcome != fleet_pb2.TARGET_OUTCOME_SKIPPED, first
    assert second.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED, second
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_a_successor_that_knows_nothing_cannot_say_that_nothing_was_done(
    loaded_fleet: RecordedFleet,
) -> None:
    r0 = loaded_fleet.replicas["r0"]
    r0.engine.do("hold_at", point=AFTER_EFFECT)
    operation_id = loaded_fleet.start()
    r0.engine.do("wait_held")
    loaded_fleet.cancel(operation_id)
    # The caller of the predecessor learns of its end only when there is somebody else to ask.
    r0.break_network("black hole", lambda proxy: proxy.black_hole())
    r0.replace()
    r0.proxy.reset()
    assert loaded_fleet.end(operation_id).results[0].outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN
    loaded_fleet.mend()
    loaded_fleet.load(1)
    loaded_fleet.check()
