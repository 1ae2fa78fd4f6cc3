"""Operations without a coordinator, as kvctl runs them, over a bad network: who asks again with the same id learns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvctl.v1 import fleet_pb2

from tests.fake_engine.gate import AFTER_EFFECT
from tests.robustness.recorded_fleet import RecordedFleet


def test_an_answer_that_is_lost_is_unknown_and_asking_again_with_its_id_changes_nothing(
    loaded_fleet: RecordedFleet,
) -> None:
    r0 = loaded_fleet.replicas["r0"]
    r0.engine.do("hold_at", point=AFTER_EFFECT)
    with ThreadPoolExecutor(1) as caller:
        lost = caller.submit(loaded_fleet.run_directly, 5)
        r0.engine.do("wait_held")
        r0.break_network("lost answers", lambda proxy: proxy.black_hole("back"))
        r0.let_go()
        first = lost.result()
    assert first.results[0].outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN
    loaded_fleet.mend()
    again = loaded_fleet.run_directly(60, first.operation_id)
    assert again.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert again.results[0].reset.engines[0].status.replayed
    loaded_fleet.load(1)
    loaded_fleet.check()


def test_the_engine_itself_knows_an_id_that_its_restarted_sidecar_does_not(loaded_fleet: RecordedFleet) -> None:
    r0 = loaded_fleet.replicas["r0"]
    r0.engine.do("hold_at", point=AFTER_EFFECT)
    with ThreadPoolExecutor(1) as caller:
        lost = caller.submit(loaded_fleet.run_directly, 60)
        r0.engine.do("wait_held")
        r0.kill_sidecar()
        r0.let_go()
        loaded_fleet.mend()
        first = lost.result()
    again = loaded_fleet.run_directly(60, first.operation_id)
    assert again.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert again.results[0].reset.engines[0].status.replayed
    loaded_fleet.load(1)
    loaded_fleet.check()
