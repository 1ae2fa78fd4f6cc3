"""Many starts at one moment: no more operations than a coordinator runs, and one operation an id."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator import app
from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.operations import MAX_ACTIVE
from sidecar.coordinator.targets import Discovered, Target
from sidecar.rpc import errors
from tests.contract.coordinator_in_process import coordinator, keep_reset, until
from tests.contract.fake_sidecar_server import FakeSidecar, serving


async def test_no_more_operations_are_taken_at_one_moment_than_a_coordinator_runs(tmp_path: Path) -> None:
    fake = FakeSidecar()
    gate = asyncio.Event()

    async def wait(_: str) -> None:
        await gate.wait()

    fake.before = wait
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        starts = [running.start(keep_reset()) for _ in range(MAX_ACTIVE + 8)]
        answers = await asyncio.gather(*starts, return_exceptions=True)
        gate.set()
        refused = [errors.parse(each) for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        taken = [each.operation_id for each in answers if isinstance(each, fleet_pb2.FleetOperation)]
        assert {refusal.reason for refusal in refused} == {"TOO_MANY_OPERATIONS"}
        assert (len(taken), len(refused)) == (MAX_ACTIVE, 8)
        for operation_id in taken:
            await running.ended(operation_id)
        await running.run(keep_reset())


class SlowDiscovery:
    """Fails once, after everybody who asks at this moment has come, and is slow afterwards."""

    def __init__(self) -> None:
        self.address = ""
        self.asked = 0
        self.may_fail = asyncio.Event()

    async def targets(self) -> Discovered:
        if not self.address:
            return Discovered(())
        self.asked += 1
        if self.asked == 1:
            await self.may_fail.wait()
            raise DiscoveryError("not now")
        await asyncio.sleep(0)
        return Discovered((Target(self.address, "r0"),))

    def describe(self) -> str:
        return "a test"


async def test_one_id_is_one_operation_also_for_those_who_waited_for_a_start_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery = SlowDiscovery()
    monkeypatch.setattr(app, "discovery_of", lambda *_: discovery)
    fake = FakeSidecar()
    operation_id = str(uuid.uuid4())
    async with serving(fake) as addresses, coordinator(tmp_path, ["dns:///vllm.example:1"]) as running:
        await until(lambda: running.app._roster.up)
        discovery.address = addresses[0]
        first = asyncio.ensure_future(running.start(keep_reset(), operation_id))
        await until(lambda: bool(discovery.asked))
        waiting = [asyncio.ensure_future(running.start(keep_reset(), operation_id)) for _ in range(4)]
        await running.stub.ListOperations(fleet_pb2.ListOperationsRequest())
        discovery.may_fail.set()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await first
        assert errors.parse(failed.value).reason == "DISCOVERY_FAILED"
        late = [asyncio.ensure_future(running.start(keep_reset(), operation_id)) for _ in range(4)]
        answers = await asyncio.gather(*waiting, *late)
        await running.ended(operation_id)
    assert {each.operation_id for each in answers} == {operation_id}
    assert len(fake.effects) == 1
