"""One operation over fake replicas under fake time, with crashes at any point."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator.execution import Execution
from sidecar.coordinator.port import Aim, Answer, Asked, Health
from sidecar.coordinator.targets import derive_request_id, next_request_id
from tests import fake_time
from tests.fake_fleet import (
    CANCELLED,
    FAILED,
    OPERATION,
    ROLLING,
    SKIPPED,
    SUCCEEDED,
    UNKNOWN,
    UNREACHABLE,
    FakeDisk,
    FakeFleet,
    aims,
    answer,
    now,
    reset,
    run,
)


def test_no_more_calls_are_under_way_than_there_are_connections_for() -> None:
    fleet = FakeFleet()
    results, _, _ = run(fleet, 40, reset(concurrency=30), most_calls=7)
    assert fleet.most_under_way == 7
    assert all(row.outcome == SUCCEEDED for row in results.values())


# --- one target --------------------------------------------------------------------------------------------------


def test_every_target_ends_with_one_result() -> None:
    fleet = FakeFleet()
    results, _, _ = run(fleet, 5)
    assert [results[f"r{i}"].outcome for i in range(5)] == [SUCCEEDED] * 5
    assert fleet.effects == Counter({f"r{i}": 1 for i in range(5)})


def test_one_black_hole_costs_its_own_timeout_and_delays_nobody() -> None:
    fleet = FakeFleet()
    fleet.script["r7"] = ["hole"] * 10
    results, took, _ = run(fleet, 50)
    assert took <= 30.5
    assert results["r7"].outcome == UNREACHABLE
    assert results["r7"].execution == types_pb2.EXECUTION_NOT_EXECUTED
    started = {name: at for at, name, _ in fleet.calls}
    assert max(at for name, at in started.items() if name != "r7") - min(started.values()) < 0.1
    assert sum(row.outcome == SUCCEEDED for row in results.values()) == 49


def test_a_lost_answer_is_asked_for_and_never_called_again() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = ["lost"]
    results, _, _ = run(fleet, 1)
    assert results["r0"].outcome == SUCCEEDED
    assert fleet.effects["r0"] == 1
    assert len(fleet.calls) == 1
    assert fleet.asked == ["r0"]


def test_a_lost_answer_that_nobody_can_tell_stays_unknown() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = ["lost"]
    fleet.cannot_ask = {"r0"}
    results, took, _ = run(fleet, 1)
    assert results["r0"].outcome == UNKNOWN
    assert results["r0"].execution == types_pb2.EXECUTION_UNKNOWN
    assert took <= 30.5


def test_a_broken_connection_is_repeated_only_after_the_replica_denied_the_id() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = [answer(UNKNOWN, "UNAVAILABLE"), answer()]
    results, _, execution = run(fleet, 1)
    assert results["r0"].outcome == SUCCEEDED
    assert fleet.asked == ["r0"]
    assert results["r0"].attempts == 2
    assert len({request_id for _, _, request_id in fleet.calls}) == 1
    assert execution.retries == 1


def test_a_refusal_is_final_unless_waiting_was_asked_for() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = [answer(FAILED, "FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS"), answer()]
    results, _, _ = run(fleet, 1)
    assert results["r0"].code == "FAILED_PRECONDITION"
    assert len(fleet.calls) == 1


def test_waiting_for_a_refusal_to_end_uses_a_fresh_request_id_for_each_try() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = [answer(FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", retry=1.0)] * 3 + [answer()]
    spec = reset()
    spec.wait = True
    results, took, _ = run(fleet, 1, spec)
    assert results["r0"].outcome == SUCCEEDED
    assert len({request_id for _, _, request_id in fleet.calls}) == 4
    assert results["r0"].request_id == fleet.calls[-1][2]
    assert took >= 3.0


def test_a_refusal_that_never_ends_gives_the_last_reason_and_why_it_was_not_tried_again() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = [answer(FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", retry=2.0)] * 100
    spec = reset()
    spec.wait = True
    results, took, _ = run(fleet, 1, spec)
    assert results["r0"].reason == "CONNECTOR_BUSY"
    assert "no time is left" in results["r0"].message
    assert took <= 30.5


@pytest.mark.parametrize(
    ("a_try_takes_s", "told"), [(5.0, r"\(4 tries in 2[0-2] s; gave up\)"), (0.1, r"\(4 tries; gave up\)")]
)
def test_tries_are_told_and_with_long_ones_how_long_all_of_them_took(a_try_takes_s: float, told: str) -> None:
    fleet = FakeFleet()
    fleet.took = a_try_takes_s
    silent = answer(UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE", types_pb2.EXECUTION_NOT_EXECUTED)
    silent.result.message = "no answer"
    silent.result.took.FromMilliseconds(int(a_try_takes_s * 1000))
    fleet.script["r0"] = [silent] * 9
    results, _, _ = run(fleet, 1)
    assert results["r0"].attempts == 4
    assert re.fullmatch(f"no answer {told}", results["r0"].message)


@pytest.mark.parametrize("wait", [False, True])
def test_a_short_last_try_does_not_hide_how_long_there_was_no_answer(wait: bool) -> None:
    class Silent(FakeFleet):
        async def call(self, aim: Aim, spec: fleet_pb2.OperationSpec, request_id: str, timeout_s: float) -> Answer:
            await asyncio.sleep(min(timeout_s, 26.9))
            return answer(UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE", types_pb2.EXECUTION_NOT_EXECUTED)

    spec = reset()
    spec.wait = wait
    results, _, _ = run(Silent(), 1, spec)
    assert re.match("tried for (2[789]|30) s; ", results["r0"].message)


def test_cancelling_stops_further_tries_of_what_is_under_way() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = [answer(FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY")] * 100
    spec = reset()
    spec.wait = True

    async def work():
        execution = Execution(OPERATION, spec, aims(1), fleet)
        asyncio.get_running_loop().call_later(2.0, execution.cancel)
        results = await execution.run()
        return results["r0"]

    row = fake_time.run(work())
    assert row.reason == "CONNECTOR_BUSY"
    assert "cancelled" in row.message


def test_a_cancel_ends_the_wait_for_the_next_try_and_there_is_none() -> None:
    fleet = FakeFleet()
    fleet.script["r0"] = [answer(FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", retry=10.0)] * 100
    spec = reset()
    spec.wait = True

    async def work():
        execution = Execution(OPERATION, spec, aims(1), fleet)
        asyncio.get_running_loop().call_later(2.0, execution.cancel)
        began = now()
        results = await execution.run()
        return results["r0"], now() - began

    row, took = fake_time.run(work())
    assert (row.reason, row.attempts) == ("CONNECTOR_BUSY", 1)
    assert len(fleet.calls) == 1
    assert took < 2.5


def test_a_defect_in_the_fan_out_is_that_targets_result_and_nobody_elses() -> None:
    fleet = FakeFleet()
    real = fleet._call

    async def broken(aim: Aim, request_id: str, timeout_s: float) -> Answer:
        if aim.name == "r1":
            raise KeyError("oops")
        return await real(aim, request_id, timeout_s)

    fleet._call = broken  # type: ignore[method-assign]
    results, _, _ = run(fleet, 3)
    assert [results[name].outcome for name in ("r0", "r1", "r2")] == [SUCCEEDED, UNKNOWN, SUCCEEDED]
    assert results["r1"].reason == "SERVER_DEFECT"


def test_a_listener_that_raises_keeps_no_target_from_its_result() -> None:
    def listener(_row: fleet_pb2.TargetResult) -> None:
        raise BrokenPipeError

    results, _, _ = run(FakeFleet(), 3, on_change=listener)
    assert all(row.outcome == SUCCEEDED for row in results.values())


# --- the rollout -------------------------------------------------------------------------------------------------


def test_rolling_never_calls_more_than_max_unavailable_at_once() -> None:
    fleet = FakeFleet()
    results, _, _ = run(fleet, 7, reset(strategy=ROLLING, max_unavailable="2"))
    assert fleet.most_under_way == 2
    assert all(row.outcome == SUCCEEDED for row in results.values())
    assert [results[f"r{i}"].wave for i in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_replica_that_stalls_after_its_turn_stops_the_rollout_with_its_verdict() -> None:
    fleet = FakeFleet()
    fleet.ill["r1"] = "HELD_BLOCKS_DEADLOCK"
    results, _, execution = run(fleet, 4, reset(strategy=ROLLING))
    assert [results[f"r{i}"].outcome for i in range(4)] == [SUCCEEDED, SUCCEEDED, SKIPPED, SKIPPED]
    assert results["r2"].reason == "ROLLOUT_STOPPED"
    assert "HELD_BLOCKS_DEADLOCK" in results["r2"].message
    assert "HELD_BLOCKS_DEADLOCK" in execution.warnings[0]


def test_a_health_look_that_raises_counts_as_not_healthy_and_does_not_hang() -> None:
    fleet = FakeFleet()

    async def broken(aim: Aim, spec: fleet_pb2.OperationSpec, timeout_s: float) -> Health:
        raise KeyError("oops")

    fleet.health = broken  # type: ignore[method-assign]
    results, _, _ = run(fleet, 2, reset(strategy=ROLLING))
    assert results["r1"].outcome == SKIPPED


def test_cancel_leaves_the_rest_cancelled_and_hold_keeps_it_waiting() -> None:
    fleet = FakeFleet()

    async def work():
        execution = Execution(OPERATION, reset(strategy=ROLLING), aims(3), fleet)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, execution.hold)
        loop.call_later(500.0, execution.release)
        loop.call_later(500.05, execution.cancel)
        return await execution.run()

    results = fake_time.run(work())
    assert [results[f"r{i}"].outcome for i in range(3)] == [SUCCEEDED, SUCCEEDED, CANCELLED]
    assert fleet.calls[1][0] - fleet.calls[0][0] > 400


def test_validate_only_needs_no_waves() -> None:
    fleet = FakeFleet()
    spec = reset(strategy=ROLLING)
    spec.validate_only = True
    run(fleet, 5, spec)
    assert fleet.most_under_way == 5


# --- the journal -------------------------------------------------------------------------------------------------


def test_no_target_is_called_whose_intent_is_not_on_record() -> None:
    fleet, disk = FakeFleet(), FakeDisk()
    disk.full_after = 2
    results, _, execution = run(fleet, 3, reset(concurrency=1), journal=disk)
    assert results["r0"].outcome == SUCCEEDED
    assert [results[name].outcome for name in ("r1", "r2")] == [SKIPPED, SKIPPED]
    assert results["r1"].reason == "STORE_FAILED"
    assert {name for _, name, _ in fleet.calls} == {"r0"}
    assert any("store failed" in warning for warning in execution.warnings)


def test_quiet_waits_for_calls_under_way() -> None:
    fleet = FakeFleet()
    fleet.took = 3.0

    async def work() -> tuple[bool, bool]:
        execution = Execution(OPERATION, reset(), aims(2), fleet)
        task = asyncio.create_task(execution.run())
        await asyncio.sleep(0.1)
        soon, later = await execution.quiet(1.0), await execution.quiet(5.0)
        await task
        return soon, later

    assert fake_time.run(work()) == (False, True)


def test_after_a_crash_in_a_cancel_the_rest_is_cancelled_too_not_stopped_by_a_failure() -> None:
    fleet, disk = FakeFleet(), FakeDisk()
    dropped = fleet_pb2.TargetResult(replica="r1", outcome=CANCELLED, code="CANCELLED", reason="CANCELLED")  # type: ignore[arg-type]
    disk.intents["r0"] = ("2d931510-d99f-494a-8c67-87feb05e1594", 0)
    disk.results["r1"] = dropped

    async def work():
        spec = reset(strategy=ROLLING)
        execution = Execution(OPERATION, spec, aims(3), fleet, journal=disk, recorded=disk.recorded())
        execution.cancel("stop it")
        return await execution.run()

    results = fake_time.run(work())
    assert [results[f"r{i}"].outcome for i in range(3)] == [SUCCEEDED, CANCELLED, CANCELLED]
    assert results["r2"].message == "stop it"


@pytest.mark.parametrize("before_the_intent", [True, False], ids=["when it is looked up", "when it is called"])
def test_a_target_that_is_gone_by_its_turn_is_skipped_and_does_not_stop_the_rollout(before_the_intent: bool) -> None:
    class Leaving(FakeFleet):
        async def identify(self, aim: Aim, timeout_s: float) -> str | Answer:
            gone = aim.name == "r1" and before_the_intent
            return answer(SKIPPED, "CANCELLED", "TARGET_NOT_READY") if gone else aim.name

    fleet, disk = Leaving(), FakeDisk()
    if not before_the_intent:
        fleet.script["r1"] = [answer(SKIPPED, "CANCELLED", "TARGET_NOT_READY")]
    spec = reset(strategy=ROLLING)
    results, _, _ = run(fleet, 4, spec, journal=disk)
    assert [results[f"r{number}"].outcome for number in range(4)] == [SUCCEEDED, SKIPPED, SUCCEEDED, SUCCEEDED]

    # Whoever goes on after a crash counts it as little.
    for name in ("r2", "r3"):
        del disk.results[name], disk.intents[name]
    results, _, _ = run(fleet, 4, spec, journal=disk, recorded=disk.recorded())
    assert [results[f"r{number}"].outcome for number in range(4)] == [SUCCEEDED, SKIPPED, SUCCEEDED, SUCCEEDED]


def test_a_target_that_is_gone_stays_unknown_when_an_earlier_call_may_have_been_executed() -> None:
    class Restarted(FakeFleet):
        async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
            return Asked(False, records_s=0.0)

    fleet, disk = Restarted(), FakeDisk()
    fleet.script["r0"] = [answer(SKIPPED, "CANCELLED", "TARGET_NOT_READY")] * 9
    disk.intents["r0"] = derive_request_id(OPERATION, "r0"), 0
    results, _, _ = run(fleet, 1, journal=disk, recorded=disk.recorded())
    assert results["r0"].outcome == UNKNOWN


@pytest.mark.parametrize(("records_s", "outcome"), [(0.0, UNKNOWN), (3600.0, UNREACHABLE)])
def test_a_lost_call_stays_unknown_when_only_the_call_to_a_successor_was_surely_not_executed(
    records_s: float, outcome: fleet_pb2.TargetOutcome.ValueType
) -> None:
    class Successor(FakeFleet):
        async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
            return Asked(False, records_s=records_s)

    fleet = Successor()
    never_sent = answer(UNREACHABLE, "DEADLINE_EXCEEDED", "", types_pb2.EXECUTION_NOT_EXECUTED)
    fleet.script["r0"] = [answer(UNKNOWN, "UNAVAILABLE"), never_sent]
    results, _, _ = run(fleet, 1)
    assert len(fleet.calls) == 2
    assert results["r0"].outcome == outcome


def test_after_a_crash_a_target_that_could_not_be_reached_still_counts_as_a_failure() -> None:
    fleet, disk = FakeFleet(), FakeDisk()
    gone = fleet_pb2.TargetResult(replica="r0", outcome=UNREACHABLE, code="UNAVAILABLE")  # type: ignore[arg-type]
    disk.results["r0"] = gone
    results, _, _ = run(fleet, 3, reset(strategy=ROLLING), journal=disk, recorded=disk.recorded())
    assert [results[f"r{i}"].outcome for i in range(3)] == [UNREACHABLE, SKIPPED, SKIPPED]
    assert fleet.calls == []


def test_no_request_id_is_used_again_after_its_refusal_whenever_the_run_is_taken_up_again() -> None:
    fleet, disk = FakeFleet(), FakeDisk()
    fleet.script["r0"] = [answer(FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY")] * 9 + [answer()] * 9
    spec = reset()
    spec.wait = True

    async def work() -> fleet_pb2.TargetResult:
        for _ in range(6):
            execution = Execution(OPERATION, spec, aims(1), fleet, journal=disk, recorded=disk.recorded())
            task = asyncio.create_task(execution.run())
            await asyncio.wait([task], timeout=1.0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        last = Execution(OPERATION, spec, aims(1), fleet, journal=disk, recorded=disk.recorded())
        return (await last.run())["r0"]

    row = fake_time.run(work())
    assert row.outcome == SUCCEEDED
    assert fleet.effects["r0"] == 1
    ids = [request_id for _, _, request_id in fleet.calls]
    first = derive_request_id(OPERATION, "r0")
    chain = [first]
    while len(chain) < len(set(ids)):
        chain.append(next_request_id(chain[-1]))
    assert list(dict.fromkeys(ids)) == chain, "each id follows from the one before"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 6),
    rolling=st.booleans(),
    seed=st.integers(0, 2**32),
    crashes=st.lists(st.floats(0.0, 8.0), max_size=5),
)
def test_a_crash_at_any_instant_leaves_one_effect_a_replica(
    count: int, rolling: bool, seed: int, crashes: list[float]
) -> None:
    dice = random.Random(seed)
    fleet, disk = FakeFleet(), FakeDisk()
    steps: list[Answer | str] = [answer(), "lost", answer(FAILED, "UNAVAILABLE", "ENGINE_STARTING")]
    for index in range(count):
        fleet.script[f"r{index}"] = [dice.choice(steps) for _ in range(2)]
    spec = reset(strategy=ROLLING, max_unavailable="2", max_failures=99) if rolling else reset()
    spec.timeout.seconds = 3

    async def work() -> dict[str, fleet_pb2.TargetResult]:
        for lives in crashes:
            execution = Execution(OPERATION, spec, aims(count), fleet, journal=disk, recorded=disk.recorded())
            task = asyncio.create_task(execution.run())
            done, _ = await asyncio.wait([task], timeout=lives)
            if done:
                break
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            fleet.under_way.clear()
        last = Execution(OPERATION, spec, aims(count), fleet, journal=disk, recorded=disk.recorded())
        return await last.run()

    results = fake_time.run(work())
    assert set(results) == {f"r{index}" for index in range(count)}
    assert set(disk.results) == set(results)
    for name, row in results.items():
        assert fleet.effects[name] <= 1, f"{name} was changed twice"
        assert (row.outcome == SUCCEEDED) == (fleet.effects[name] == 1), f"{name}: {row} after {fleet.effects[name]}"
