"""A full disk, a broken operation store, and a wall clock that jumps: what is on record is done, and nothing else.

Every test has a fleet of its own, because it spoils its files. Every test ends with the checker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvctl.v1 import fleet_pb2

from tests.contract.sidecar_process import wait_until
from tests.fake_engine.gate import AFTER_EFFECT
from tests.robustness import limited_files, stepped_clock
from tests.robustness.coordinator_process import get
from tests.robustness.recorded_fleet import LONG_S, RecordedFleet, recorded_fleet

MOST = 100
"""Operations until a disk of so few bytes is surely full."""
HOUR = 3600.0


@pytest.fixture
def fleet() -> Iterator[RecordedFleet]:
    with recorded_fleet() as made:
        made.new_run(floor=2)
        made.load(2)
        yield made


def size_of(*files: Path) -> int:
    return max(file.stat().st_size for file in files if file.exists())


def test_a_sidecar_that_cannot_write_its_audit_line_changes_nothing_until_it_can(fleet: RecordedFleet) -> None:
    r0 = fleet.replicas["r0"]
    r0.kill_sidecar()
    bytes_left = size_of(r0.audit_file, r0.sidecar.log_file) + 1500
    r0.start_sidecar(wrapper=["tests.robustness.limited_files", str(bytes_left)])
    refused = None
    for _ in range(MOST):
        refused, other = fleet.run().results
        assert other.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
        if refused.outcome != fleet_pb2.TARGET_OUTCOME_SUCCEEDED:
            break
    assert refused is not None
    assert (refused.code, refused.reason) == ("INTERNAL", "STORE_FAILED")
    limited_files.lift(r0.sidecar.process.pid)
    fleet.load(1)
    fleet.check()


def test_a_coordinator_on_a_full_disk_refuses_what_it_cannot_record_until_it_can(fleet: RecordedFleet) -> None:
    fleet.coordinator.terminate()
    files = (fleet.coordinator.store, fleet.coordinator.process.log_file)
    bytes_left = size_of(*files) + 300_000
    fleet.coordinator.start(wrapper=["tests.robustness.limited_files", str(bytes_left)])
    for _ in range(MOST):
        operation_id = fleet.start()
        if fleet.refusal is not None:
            break
        fleet.end(operation_id)
    assert fleet.refusal is not None
    assert (fleet.refusal.code.name, fleet.refusal.reason) == ("INTERNAL", "STORE_FAILED")
    limited_files.lift(fleet.coordinator.process.process.pid)

    def taken_again() -> bool:
        operation_id = fleet.start()
        return fleet.refusal is None and fleet.end(operation_id).state == fleet_pb2.OPERATION_STATE_SUCCEEDED

    wait_until(taken_again, LONG_S, fleet.coordinator.log)
    fleet.check()


def test_a_coordinator_killed_on_a_full_disk_is_followed_by_one_that_calls_nobody_told_as_not_called(
    fleet: RecordedFleet,
) -> None:
    engine = fleet.replicas["r0"].engine
    engine.do("hold_at", point=AFTER_EFFECT)
    operation_id = fleet.start(max_unavailable=1)
    engine.do("wait_held")
    fleet.fault("full disk", "coordinator")
    limited_files.fill(fleet.coordinator.process.process.pid)
    engine.do("let_go")
    told = [row.outcome for row in fleet.end(operation_id).results]
    assert told == [fleet_pb2.TARGET_OUTCOME_SUCCEEDED, fleet_pb2.TARGET_OUTCOME_SKIPPED]
    fleet.coordinator.kill()
    fleet.coordinator.start()
    # What was kept in memory only is asked for again, and under way meanwhile.
    wait_until(lambda: get(fleet.coordinator.stub, operation_id).HasField("took"), LONG_S, fleet.coordinator.log)
    assert [row.outcome for row in fleet.end(operation_id).results] == told
    fleet.load(1)
    fleet.check()


def test_a_coordinator_with_a_corrupt_store_changes_nothing_until_it_has_another(fleet: RecordedFleet) -> None:
    fleet.coordinator.terminate()
    store = fleet.coordinator.store
    for file in store.parent.glob("ops.db*"):
        file.write_bytes(b"\xa5" * file.stat().st_size)
    fleet.coordinator.start()
    fleet.start()
    assert fleet.refusal is not None
    assert (fleet.refusal.code.name, fleet.refusal.reason) == ("INTERNAL", "STORE_FAILED")
    fleet.coordinator.terminate()
    for file in store.parent.glob("ops.db*"):
        file.unlink()
    fleet.coordinator.start()
    fleet.load(1)
    fleet.check()


def test_a_wall_clock_that_jumps_changes_no_deadline_and_no_result(fleet: RecordedFleet) -> None:
    clock = fleet.folder / "clock"
    stepped_clock.step(clock, 0)
    wrapper = ["tests.robustness.stepped_clock", str(clock)]
    fleet.coordinator.kill()
    for replica in fleet.replicas.values():
        replica.kill_sidecar()
        replica.start_sidecar(wrapper=wrapper)
    fleet.coordinator.start(wrapper=wrapper)
    fleet.load(1)
    engine = fleet.replicas["r0"].engine
    for seconds in (HOUR, -HOUR, 20 * 24 * HOUR, 0):
        engine.do("hold_at", point=AFTER_EFFECT)
        operation_id = fleet.start()
        engine.do("wait_held")
        fleet.fault(f"step {seconds:g} s", "clock")
        stepped_clock.step(clock, seconds)
        engine.do("let_go")
        ended = fleet.end(operation_id)
        assert ended.state == fleet_pb2.OPERATION_STATE_SUCCEEDED, f"{seconds:g} s: {ended}"
        fleet.load(1)
    last_begun = fleet.run().started_at.ToSeconds()
    stepped_clock.step(clock, HOUR)
    assert fleet.run().started_at.ToSeconds() - last_begun > HOUR / 2, "the clock has not been stepped"
    fleet.check()
