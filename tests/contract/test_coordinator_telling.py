"""What a person is told while an operation runs, of names that differ, and of an id that was used before."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import live
from sidecar.coordinator.rollout import Policy
from sidecar.rpc import errors
from tests.contract.coordinator_in_process import coordinator, keep_reset
from tests.contract.fake_sidecar_server import FakeSidecar, refused, serving

ROLLING = fleet_pb2.ROLLOUT_STRATEGY_ROLLING


async def test_a_rolling_operation_tells_its_watchers_for_whose_health_it_waits(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    fakes[0].stalled, fakes[0].verdict = True, types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK
    seen: list[str] = []
    async with serving(*fakes) as addresses, coordinator(tmp_path, addresses) as running:
        started = await running.start(keep_reset(strategy=ROLLING))
        request = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id)
        async for message in running.stub.WatchOperation(request):
            for row in message.operation.results:
                if row.health:
                    seen.append(row.health)
                    assert row.replica == "r0"
                    assert row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
                    assert (await running.get(started.operation_id)).results[0].health.startswith("waiting for it")
                    fakes[0].stalled = False
        ended = await running.get(started.operation_id)
        _, metrics = await running.page("/metrics")
    assert seen
    assert seen[0].startswith("waiting for it to be healthy (60 s left): HELD_BLOCKS_DEADLOCK for 12 s: nothing runs, ")
    assert ended.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert [row.health for row in ended.results] == ["", ""]
    series = 'kvctl_coordinator_replica_results_total{operation="reset",result="succeeded"} 2.0'
    assert series in metrics, "telling of its health does not count a replica twice"


async def test_why_a_replica_did_not_become_healthy_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = Policy.resolve
    monkeypatch.setattr(Policy, "resolve", lambda *given: replace(resolve(*given), settle_s=0.5))
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    fakes[0].stalled = True
    async with serving(*fakes) as addresses:
        async with coordinator(tmp_path, addresses) as running:
            ended = await running.run(keep_reset(strategy=ROLLING))
        assert ended.results[0].health.startswith("not healthy within 0.5 s: FLOWING for 12 s")
        assert ended.results[1].reason == "ROLLOUT_STOPPED"
        async with coordinator(tmp_path, addresses) as again:
            assert await again.get(ended.operation_id) == ended


async def test_replicas_that_call_themselves_otherwise_are_told_once_with_both_names(tmp_path: Path) -> None:
    fakes = [FakeSidecar(name) for name in ("own-0", "r1", "own-2")]
    async with serving(*fakes) as addresses:
        targets = [f"r{index}={address}" for index, address in enumerate(addresses)]
        async with coordinator(tmp_path, targets) as running:
            ended = await running.run(keep_reset())
    (warning,) = ended.warnings
    assert warning.startswith("r0 calls itself own-0, r2 calls itself own-2: ")


async def test_an_id_used_again_is_told_what_is_on_record_and_what_a_new_operation_needs(tmp_path: Path) -> None:
    fake = FakeSidecar()
    fake.fail_with = [refused()]
    operation_id = str(uuid.uuid4())
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        assert (await running.start(keep_reset(), operation_id)).warnings == []
        first = await running.ended(operation_id)
        calls = len(fake.requests)
        again = await running.start(keep_reset(), operation_id)
        assert len(fake.requests) == calls
        assert again.state == first.state == fleet_pb2.OPERATION_STATE_FAILED
        assert len(again.warnings) == 1
        assert "nothing was run now: a new one needs a new id" in again.warnings[0]
        assert (await running.get(operation_id)).warnings == [], "said to who starts it, not put on record"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running.start(keep_reset(timeout=31), operation_id)
    refusal = errors.parse(raised.value)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "REQUEST_ID_REUSED")
    assert "`kvctl ops get`" in refusal.message
    assert refusal.message.endswith("give a new id, or none")


async def test_a_clock_set_back_after_the_end_does_not_make_a_restarted_replica_a_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSidecar()
    fake.lose_answers = True
    silent = True

    async def forgotten(_: object, context: grpc.aio.ServicerContext) -> object:
        if silent:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        metadata = {errors.RECORDS_REACH_BACK: "0"}
        gone = errors.failure(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", "not on record", metadata=metadata)
        return await errors.abort(context, gone)

    fake.GetOperation = forgotten  # type: ignore[method-assign]
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        ended = await running.run(keep_reset())
        real = live.time
        set_back = SimpleNamespace(time=lambda: real.time() - 7200, monotonic=real.monotonic)
        monkeypatch.setattr(live, "time", set_back)
        silent = False
        await running.app._running.unknowns.ask_all()
        left = await running.get(ended.operation_id)
    assert left.results[0].outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN


async def test_the_time_an_operation_took_does_not_follow_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSidecar()
    real = live.time

    async def step(_: str) -> None:
        ahead = SimpleNamespace(time=lambda: real.time() + 7200, monotonic=real.monotonic)
        monkeypatch.setattr(live, "time", ahead)

    fake.before = step
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        ended = await running.run(keep_reset())
    assert ended.took.ToTimedelta().total_seconds() < 3600
