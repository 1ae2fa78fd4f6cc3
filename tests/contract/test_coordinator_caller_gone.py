"""Callers that go away while what they asked for is being put on record: it is in force all the same."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.store import Store
from tests.contract.coordinator_in_process import Running, coordinator, keep_reset, until
from tests.contract.fake_sidecar_server import FakeSidecar, serving

ROLLING = fleet_pb2.ROLLOUT_STRATEGY_ROLLING


class SlowWrite:
    """The disk takes its time for one kind of write."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()


@contextmanager
def slow(monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[SlowWrite]:
    write = SlowWrite()
    real = getattr(Store, method)

    async def slowly(*given: Any, **named: Any) -> None:
        write.begun.set()
        await write.may_end.wait()
        await real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Store, method, slowly)
        yield write


async def leave(running: Running, call: grpc.aio.UnaryUnaryCall[Any, Any], write: SlowWrite) -> None:
    """Go away in the middle of the write, and let it end once the server knows: one connection keeps the order."""
    async with asyncio.timeout(60):
        await write.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await running.stub.ListOperations(fleet_pb2.ListOperationsRequest())
    write.may_end.set()


async def test_an_operation_whose_caller_leaves_while_it_is_recorded_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSidecar()
    operation_id = str(uuid.uuid4())
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        with slow(monkeypatch, "create") as write:
            request = fleet_pb2.StartOperationRequest(operation_id=operation_id, spec=keep_reset())
            await leave(running, running.stub.StartOperation(request), write)
            await until(lambda: running.app._running.find_recent(operation_id) is not None)
        ended = await running.ended(operation_id)
        again = await running.start(keep_reset(), operation_id)
    assert ended.state == again.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert len(fake.effects) == 1


async def test_a_hold_whose_caller_leaves_while_it_is_recorded_is_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    gate = asyncio.Event()

    async def wait(kind: str) -> None:
        if kind == "reset":
            await gate.wait()

    fakes[0].before = wait
    async with serving(*fakes) as addresses, coordinator(tmp_path, addresses) as running:
        started = await running.start(keep_reset(strategy=ROLLING))
        by_id = {"operation_id": started.operation_id}
        with slow(monkeypatch, "steer") as write:
            await leave(running, running.stub.PauseOperation(fleet_pb2.PauseOperationRequest(**by_id)), write)
            live = running.app._running.find(started.operation_id)
            assert live is not None
            await until(lambda: live.execution is not None and live.execution.held)
        gate.set()
        async for message in running.stub.WatchOperation(fleet_pb2.WatchOperationRequest(**by_id)):
            if message.operation.counts.succeeded:
                break
        assert (await running.get(started.operation_id)).state == fleet_pb2.OPERATION_STATE_PAUSED
        assert fakes[1].requests == []
        await running.stub.CancelOperation(fleet_pb2.FleetAdminCancelOperationRequest(**by_id))
        await running.ended(started.operation_id)
