"""What is told of a target's health while the next wave waits for it, and what is left of it at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from google.protobuf.duration_pb2 import Duration
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.execution import Execution
from tests import fake_time
from tests.fake_fleet import CANCELLED, OPERATION, ROLLING, SKIPPED, SUCCEEDED, FakeFleet, aims, now, reset

DEADLOCK = "HELD_BLOCKS_DEADLOCK for 3 s: 2 waiting requests hold 973 blocks"

Told = list[tuple[float, str, str]]
"""When (seconds since the start), of whom, what."""


def watched(
    fleet: FakeFleet,
    spec: fleet_pb2.OperationSpec,
    at_s: float = 0.0,
    then: Callable[[Execution], None] = lambda _: None,
) -> tuple[Told, dict[str, fleet_pb2.TargetResult]]:
    """Run two targets, `then` after so many seconds; what was told of health, and the results."""
    told: Told = []

    async def work() -> dict[str, fleet_pb2.TargetResult]:
        began = now()

        def hear(row: fleet_pb2.TargetResult) -> None:
            assert row.outcome == SUCCEEDED, "only a target that has ended well is looked at"
            told.append((now() - began, row.replica, row.health))

        execution = Execution(OPERATION, spec, aims(2), fleet, on_health=hear)
        asyncio.get_running_loop().call_later(at_s, then, execution)
        return await execution.run()

    return told, fake_time.run(work())


def test_a_wave_that_waits_says_for_whom_why_and_how_much_longer() -> None:
    fleet = FakeFleet()
    fleet.ill["r0"] = DEADLOCK
    told, results = watched(fleet, reset(strategy=ROLLING), 20.0, lambda _: fleet.ill.clear())
    at_s, name, text = told[0]
    assert (name, text) == ("r0", f"waiting for it to be healthy (60 s left): {DEADLOCK}")
    assert at_s < 1.0
    assert told[-1][1:] == ("r0", ""), "nothing waits for it any more"
    assert [row.health for row in results.values()] == ["", ""]
    assert {row.outcome for row in results.values()} == {SUCCEEDED}


def test_what_is_told_is_never_older_than_five_seconds_and_not_told_at_every_look() -> None:
    fleet = FakeFleet()
    fleet.ill["r0"] = DEADLOCK
    told, _ = watched(fleet, reset(strategy=ROLLING), 30.0, lambda _: fleet.ill.clear())
    times = [at_s for at_s, _, _ in told]
    assert max(after - before for before, after in pairwise(times)) <= 5.6
    assert len(times) <= 8


def test_a_target_that_must_stay_healthy_is_told_how_long_it_has_been() -> None:
    rollout = reset(strategy=ROLLING, min_healthy_time=Duration(seconds=12))
    told, _ = watched(FakeFleet(), rollout)
    texts = [text for _, _, text in told]
    assert texts[0] == "waiting for it to stay healthy for 12 s: healthy for 0 s"
    assert [text.rpartition(": ")[2] for text in texts[1:-1]] == ["healthy for 5 s", "healthy for 10 s"]
    assert texts[-1] == ""


def test_a_target_that_falls_ill_again_is_told_at_once() -> None:
    fleet = FakeFleet()

    def fall_ill(_: Execution) -> None:
        fleet.ill["r0"] = DEADLOCK
        asyncio.get_running_loop().call_later(1.0, fleet.ill.clear)

    told, _ = watched(fleet, reset(strategy=ROLLING, min_healthy_time=Duration(seconds=3)), 1.2, fall_ill)
    words = [text.partition(" for it to ")[2][:10] for _, _, text in told]
    assert words == ["stay healt", "be healthy", "stay healt", ""]


def test_a_healthy_fleet_has_nothing_to_tell() -> None:
    told, _ = watched(FakeFleet(), reset(strategy=ROLLING))
    assert told == []


def test_a_target_that_never_becomes_healthy_keeps_the_reason_in_its_row() -> None:
    fleet = FakeFleet()
    fleet.ill["r0"] = DEADLOCK
    told, results = watched(fleet, reset(strategy=ROLLING))
    assert results["r0"].outcome == SUCCEEDED
    assert results["r0"].health == told[-1][2] == f"not healthy within 60 s: {DEADLOCK}"
    assert results["r1"].outcome == SKIPPED


def test_a_cancelled_rollout_waits_for_nobody() -> None:
    fleet = FakeFleet()
    fleet.ill["r0"] = DEADLOCK
    told, results = watched(fleet, reset(strategy=ROLLING), 10.0, Execution.cancel)
    assert told[-1][1:] == ("r0", "")
    assert [results[name].outcome for name in ("r0", "r1")] == [SUCCEEDED, CANCELLED]


def test_a_listener_that_raises_does_not_stop_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    def listener(_row: fleet_pb2.TargetResult) -> None:
        raise BrokenPipeError

    async def work() -> dict[str, fleet_pb2.TargetResult]:
        spec = reset(strategy=ROLLING, min_healthy_time=Duration(seconds=2))
        return await Execution(OPERATION, spec, aims(2), FakeFleet(), on_health=listener).run()

    assert {row.outcome for row in fake_time.run(work()).values()} == {SUCCEEDED}
    assert "a listener raised" in caplog.text
