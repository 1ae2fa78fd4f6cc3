"""A time limit bounds everything a person waits for, and messages name the real wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_sidecar_server import FakeSidecar, serving
from kvctl.v1 import fleet_pb2, replica_pb2

from sidecar.client.remote import CoordinatorError, CoordinatorReach
from sidecar.coordinator import reading, resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery.static import StaticDiscovery
from sidecar.coordinator.fanout import Run
from sidecar.coordinator.port import Aim
from sidecar.coordinator.targets import Target


@contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def spec_for(timeout_s: float) -> fleet_pb2.OperationSpec:
    spec = fleet_pb2.OperationSpec(reset=replica_pb2.ResetPrefixCacheRequest(), targets=fleet_pb2.Targets(all=True))
    spec.timeout.FromMilliseconds(int(timeout_s * 1000))
    return spec


@pytest.mark.parametrize("timeout_s", [0.4, 1.6])
def test_naming_and_calling_an_unnamed_target_share_the_time_limit(timeout_s: float) -> None:
    async def reset(address: str) -> tuple[fleet_pb2.FleetOperation, float]:
        channels = Channels()
        began = asyncio.get_running_loop().time()
        try:
            done = await Run(spec_for(timeout_s), StaticDiscovery([Target(address)]), channels).run()
        finally:
            await channels.close()
        return done, asyncio.get_running_loop().time() - began

    with silent() as address:
        operation, took_s = asyncio.run(reset(address))
    assert took_s < timeout_s + 0.5
    assert operation.results[0].outcome == fleet_pb2.TARGET_OUTCOME_UNREACHABLE
    told_s = float(operation.results[0].message.rsplit("within ", 1)[1].split(" ")[0])
    assert abs(told_s - timeout_s) <= 0.25


@pytest.mark.parametrize("what", ["run", "admission"])
def test_a_silent_coordinator_costs_the_time_limit_and_is_named_once(what: str) -> None:
    async def ask(address: str) -> tuple[CoordinatorError, float]:
        reach = CoordinatorReach(address)
        began = asyncio.get_running_loop().time()
        try:
            asked = reach.run(spec_for(0.3)) if what == "run" else reach.admission(fleet_pb2.Targets(all=True), 0.3)
            with pytest.raises(CoordinatorError) as caught:
                await asked
        finally:
            await reach.close()
        return caught.value, asyncio.get_running_loop().time() - began

    with silent() as address:
        error, took_s = asyncio.run(ask(address))
    assert took_s < 1.5
    assert str(error) == f"no answer from the coordinator at {address} within 0.3 s"
    assert error.failure.code == "UNAVAILABLE"


def test_admission_shows_a_replica_with_two_addresses_once_and_says_so() -> None:
    class Known(FakeSidecar):
        def admission(self) -> replica_pb2.AdmissionStatusResponse:
            answer = super().admission()
            for engine in answer.engines:
                engine.engine.incarnation = self.instance_id
            return answer

    one, other = Known("r0"), Known("r1")
    other.instance_id = one.instance_id

    async def read() -> fleet_pb2.FleetAdmissionResponse:
        channels = Channels()
        try:
            async with serving(one, other, Known("r2")) as addresses:
                aims = tuple(Aim(f"n{i}", address, {}) for i, address in enumerate(addresses))
                return await reading.read_admission(resolution.Resolved(aims), channels, 5.0)
        finally:
            await channels.close()

    fleet = asyncio.run(read())
    assert [row.replica for row in fleet.replicas] == ["n0", "n2"]
    assert [text.endswith("are one replica; it is shown once, as n0") for text in fleet.warnings] == [True]
