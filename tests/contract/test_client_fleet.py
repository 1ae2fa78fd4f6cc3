"""The Python client against sidecars behind real gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_sidecar_server import FakeSidecar, refused, serving
from kvctl.v1 import replica_pb2, types_pb2

from sidecar import client
from sidecar.client import aio, errors, weights
from sidecar.client.results import EngineReset
from sidecar.replica import rules


@contextmanager
def served_elsewhere(*fakes: FakeSidecar) -> Iterator[list[str]]:
    """Fakes on a loop of another thread, for blocking callers."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = serving(*fakes)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# --- results and errors --------------------------------------------------------------------------------------------


def test_a_blocking_reset_gives_typed_results_per_replica_engine_and_tier() -> None:
    with served_elsewhere(FakeSidecar("r0", engines=2)) as addresses, client.Fleet(addresses) as fleet:
        result = fleet.reset_prefix_cache(running_requests="keep", quarantine_running=True)
    assert result.raise_for_failures() is result
    engine = result.replicas[0].engines[1]
    assert isinstance(engine, EngineReset)
    assert (engine.rank, engine.code, engine.cached_blocks_dropped) == (1, "OK", 812)
    assert (engine.prefix_cache.state, engine.connector.state) == ("done", "not_requested")


async def test_a_refusal_raises_only_when_asked_and_names_the_replica() -> None:
    good, bad = FakeSidecar("good"), FakeSidecar("bad")
    bad.fail_with = [refused()]
    async with serving(good, bad) as addresses, aio.Fleet(addresses) as fleet:
        result = await fleet.reset_prefix_cache()
    assert not result.ok
    with pytest.raises(errors.FleetFailed, match="1 of 2 replicas did not succeed: bad: 12 blocks") as caught:
        result.raise_for_failures()
    [failure] = caught.value.failures
    assert isinstance(failure, errors.PreconditionFailed)
    assert (failure.replica, failure.reason) == ("bad", "BLOCKS_HELD_BY_REQUESTS")


async def test_an_unreachable_fleet_is_a_result_with_an_error_a_replica() -> None:
    async with aio.Fleet(["r0=127.0.0.1:1"]) as fleet:
        result = await fleet.reset_prefix_cache(timeout_s=1.0)
    assert isinstance(result.replicas[0].error, errors.ReplicaUnavailable)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"running_requests": "stop"}, "running_requests is 'stop'; expected one of 'fail', 'preempt', 'keep'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"operation_id": "seven"}, "not a UUID"),
        ({"replicas": "r9"}, "no replica matches 'r9'; known: r0"),
    ],
)
async def test_requests_that_make_no_sense_raise_before_anything_is_called(arguments: dict, text: str) -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        with pytest.raises(errors.RequestInvalid, match=text.replace("(", r"\(")):
            await fleet.reset_prefix_cache(**arguments)
    assert fake.requests == []


def test_a_fleet_is_named_in_exactly_one_way() -> None:
    with pytest.raises(errors.RequestInvalid, match="exactly one"):
        aio.Fleet()
    with pytest.raises(errors.RequestInvalid, match="exactly one"):
        aio.Fleet(["127.0.0.1:1"], coordinator="127.0.0.1:2")


def test_a_closed_blocking_fleet_says_so_instead_of_hanging() -> None:
    fleet = client.Fleet(["127.0.0.1:1"])
    fleet.close()
    with pytest.raises(errors.RequestInvalid, match="closed"):
        fleet.reset_prefix_cache()


async def test_admission_gives_the_verdict_of_each_engine() -> None:
    fake = FakeSidecar("r0")
    fake.stalled, fake.verdict = True, types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK
    async with serving(fake) as addresses, aio.Fleet([*addresses, "gone=127.0.0.1:1"]) as fleet:
        gone, there = sorted(await fleet.admission(), key=lambda row: row.name)
    assert there.stalled
    assert there.engines[0].verdict == "HELD_BLOCKS_DEADLOCK"
    assert (gone.code, gone.engines) == ("UNAVAILABLE", ())


async def test_watching_admission_gives_samples_until_the_caller_stops() -> None:
    async with serving(FakeSidecar("r0")) as addresses, aio.Fleet(addresses) as fleet:
        seen = []
        async for sample in fleet.watch_admission(interval_s=0.1):
            seen.append(sample.name)
            if len(seen) == 3:
                break
    assert seen == ["r0"] * 3


async def test_an_operation_that_its_caller_gives_up_leaves_another_one_of_that_fleet_alone() -> None:
    fake = FakeSidecar("r0")
    both, let_go = asyncio.Event(), asyncio.Event()

    async def hold(kind: str) -> None:
        if len(fake.requests) == 2:
            both.set()
        await let_go.wait()

    fake.before = hold
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        given_up, kept = (asyncio.create_task(fleet.reset_prefix_cache(running_requests="keep")) for _ in range(2))
        await asyncio.wait_for(both.wait(), 30)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        let_go.set()
        assert (await kept).ok


# --- weight updates ------------------------------------------------------------------------------------------------


async def test_a_weight_update_pauses_transfers_completes_resets_and_resumes_in_this_order() -> None:
    order: list[str] = []
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    for fake in fakes:
        fake.order = order
    async with serving(*fakes) as addresses, aio.Fleet(addresses) as fleet:
        async with fleet.weight_update("step-12") as update:
            assert update.replicas == ("r0", "r1")
            order.append("transfer")
        update.raise_for_failures()
    for name in ("r0", "r1"):
        mine = [entry for entry in order if entry == "transfer" or entry.startswith(name)]
        assert mine == [f"{name}:pause", "transfer", f"{name}:complete", f"{name}:reset", f"{name}:resume"]
    reset = next(r for r in fakes[0].requests if isinstance(r, replica_pb2.ResetPrefixCacheRequest))
    assert reset.running_requests == types_pb2.RUNNING_REQUESTS_KEEP
    assert reset.quarantine_running
    assert reset.reset_connector
    assert reset.reset_mm_cache
    assert reset.reset_encoder_cache
    resume = next(r for r in fakes[0].requests if isinstance(r, replica_pb2.ResumeSchedulingRequest))
    assert resume.weight_version == "step-12"


async def test_a_raised_body_neither_completes_nor_resumes_and_ends_the_lease_at_once() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        with pytest.raises(ZeroDivisionError):
            async with fleet.weight_update("step-12"):
                raise ZeroDivisionError
    assert [type(r).__name__ for r in fake.requests] == ["PauseSchedulingRequest"]
    assert fake.requests[0].on_abandon == replica_pb2.ABANDON_POLICY_STAY_PAUSED
    assert fake.cancelled == [fake.requests[0].request_id]
    assert not fake.leases
    assert not any(renewal.weights_complete for renewal in fake.renewals)


async def test_a_caller_may_choose_that_abandoned_engines_resume() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet, fleet.weight_update(on_abandon="resume"):
        pass
    assert fake.requests[0].on_abandon == replica_pb2.ABANDON_POLICY_RESUME


async def test_the_lease_is_renewed_while_the_body_runs() -> None:
    fake = FakeSidecar("r0")
    renewed = asyncio.Event()

    async def see(kind: str) -> None:
        if kind == "renew":
            renewed.set()

    fake.before = see
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet, fleet.weight_update(lease_s=1.0):
        await asyncio.wait_for(renewed.wait(), 10)


def test_the_lease_is_renewed_while_a_blocking_body_holds_its_thread() -> None:
    fake = FakeSidecar("r0")
    renewed = threading.Event()

    async def see(kind: str) -> None:
        if kind == "renew":
            renewed.set()

    fake.before = see
    with (
        served_elsewhere(fake) as addresses,
        client.Fleet(addresses) as fleet,
        fleet.weight_update("v1", lease_s=1.0) as update,
    ):
        assert renewed.wait(10)
    assert not update.lost


async def test_a_replica_lost_on_the_way_does_not_hold_up_the_others() -> None:
    good, lost = FakeSidecar("good"), FakeSidecar("lost")
    async with serving(good, lost) as addresses, aio.Fleet(addresses) as fleet:
        async with fleet.weight_update("v2") as update:
            lost.leases.clear()
        assert set(update.lost) == {"lost"}
        assert isinstance(update.lost["lost"], errors.LeaseLost)
        with pytest.raises(errors.FleetFailed, match="1 of 2 replicas were lost"):
            update.raise_for_failures()
    assert len(good.effects) == 3
    assert [type(r).__name__ for r in lost.requests] == ["PauseSchedulingRequest"]


def lose_all(fakes: list[FakeSidecar]) -> None:
    for fake in fakes:
        fake.leases.clear()


async def test_an_update_that_has_lost_every_replica_when_its_block_ends_raises() -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    async with serving(*fakes) as addresses, aio.Fleet(addresses) as fleet:
        with pytest.raises(errors.FleetFailed, match="2 of 2 replicas were lost") as caught:
            async with fleet.weight_update("v2"):
                lose_all(fakes)
        assert [type(error) for error in caught.value.failures] == [errors.LeaseLost] * 2
    for fake in fakes:
        assert [type(r).__name__ for r in fake.requests] == ["PauseSchedulingRequest"]


async def test_a_second_address_of_a_replica_is_not_a_lost_replica() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        port = address.rpartition(":")[2]
        async with aio.Fleet([address, f"localhost:{port}"]) as fleet:
            async with fleet.weight_update(require_all=True) as update:
                assert update.replicas == ("r0",)
            update.raise_for_failures()
    assert len(fake.effects) == 3


async def test_replicas_resume_while_another_still_tries_to_say_that_its_weights_are_whole() -> None:
    good, slow = FakeSidecar("good"), FakeSidecar("slow")
    resumed = asyncio.Event()

    async def note_resume(kind: str) -> None:
        if kind == "resume":
            resumed.set()

    async def wait_for_the_other(kind: str) -> None:
        if kind == "reset":
            await asyncio.wait_for(resumed.wait(), 10)

    good.before, slow.before = note_resume, wait_for_the_other
    async with (
        serving(good, slow) as addresses,
        aio.Fleet(addresses) as fleet,
        fleet.weight_update("v2", step_timeout_s=15) as update,
    ):
        pass
    assert not update.lost


async def test_a_replica_that_cannot_be_reset_is_not_resumed_with_stale_cache() -> None:
    fake, other = FakeSidecar("r0"), FakeSidecar("r1")

    async def refuse_reset(kind: str) -> None:
        fake.fail_with = [refused()] if kind == "reset" else []

    fake.before = refuse_reset
    async with serving(fake, other) as addresses, aio.Fleet(addresses) as fleet:
        async with fleet.weight_update("v2", step_timeout_s=0.8) as update:
            pass
        assert set(update.lost) == {"r0"}
    assert not any(isinstance(r, replica_pb2.ResumeSchedulingRequest) for r in fake.requests)
    assert fake.renewals[-1].weights_complete


async def test_a_replica_that_cannot_be_paused_in_time_keeps_the_others_paused_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "LONGEST_PAUSE_S", 0.5)
    good, hung = FakeSidecar("good"), FakeSidecar("hung")
    left = asyncio.Event()

    async def hang(kind: str) -> None:
        if kind == "pause":
            await left.wait()

    hung.before = hang
    async with serving(good, hung) as addresses, aio.Fleet(addresses) as fleet:
        async with asyncio.timeout(30), fleet.weight_update("v2", step_timeout_s=120) as update:
            assert update.replicas == ("good",)
            left.set()
        assert set(update.lost) == {"hung"}


async def test_an_unreachable_replica_is_left_out_by_default() -> None:
    fake = FakeSidecar("r0")
    async with (
        serving(fake) as addresses,
        aio.Fleet([*addresses, "gone=127.0.0.1:1"]) as fleet,
        fleet.weight_update() as update,
    ):
        assert update.replicas == ("r0",)
        assert set(update.lost) == {"gone"}


async def test_require_all_ends_the_update_before_it_begins_and_resumes_everyone() -> None:
    fake = FakeSidecar("r0")
    entered = False
    async with serving(fake) as addresses, aio.Fleet([*addresses, "gone=127.0.0.1:1"]) as fleet:
        with pytest.raises(errors.FleetFailed, match="did not begin"):
            async with fleet.weight_update(require_all=True):
                entered = True
    assert not entered
    assert isinstance(fake.requests[-1], replica_pb2.ResumeSchedulingRequest)


async def test_an_update_that_pauses_nobody_raises() -> None:
    async with aio.Fleet(["gone=127.0.0.1:1"]) as fleet:
        with pytest.raises(errors.FleetFailed, match="did not begin"):
            async with fleet.weight_update():
                pytest.fail("the body ran without a paused engine")


def test_a_lease_out_of_range_is_refused() -> None:
    with pytest.raises(errors.RequestInvalid, match=r"lease_s is 0\.5; expected 1 to 600 seconds"):
        aio.Fleet(["127.0.0.1:1"]).weight_update(lease_s=0.5)


@pytest.mark.parametrize("version", [12, None, "v" * (weights.LONGEST_WEIGHT_VERSION + 1), "\ud800"])
def test_a_weight_version_that_no_sidecar_takes_is_refused_before_the_transfer(version: Any) -> None:
    assert weights.LONGEST_WEIGHT_VERSION == rules.LONGEST_WEIGHT_VERSION
    with pytest.raises(errors.RequestInvalid):
        aio.Fleet(["127.0.0.1:1"]).weight_update(version)


def test_every_code_of_the_error_contract_has_its_exception() -> None:
    codes = ["INVALID_ARGUMENT", "FAILED_PRECONDITION", "ABORTED", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"]
    codes += ["UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INTERNAL", "NOT_FOUND", "CANCELLED"]
    for code in codes:
        assert type(errors.error_for(code, "", "text")) is not errors.KvctlError
    assert isinstance(errors.error_for("DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", ""), errors.OutcomeUnknown)
