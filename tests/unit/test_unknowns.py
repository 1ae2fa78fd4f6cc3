"""What a coordinator makes of a replica's word on an outcome that was unknown at the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.port import Aim, Asked
from sidecar.coordinator.unknowns import Unknowns
from tests import fake_time
from tests.fake_fleet import UNKNOWN, UNREACHABLE


@pytest.mark.parametrize(("records_s", "outcome"), [(3.0, UNKNOWN), (6.0, UNREACHABLE)])
def test_records_are_compared_with_the_age_that_the_call_has_when_they_are_told(
    records_s: float, outcome: fleet_pb2.TargetOutcome.ValueType
) -> None:
    """The call was made 1 s before the question, whose answer takes 4 s: records of 3 s began after the call."""
    row = fleet_pb2.TargetResult(replica="r0", outcome=UNKNOWN, request_id="id", code="UNAVAILABLE")
    operation = fleet_pb2.FleetOperation(operation_id="op", results=[row], counts={"total": 1, "unknown": 1})

    async def read(_: str) -> Any:
        return SimpleNamespace(operation=operation, aims=[Aim("r0", "10.0.0.1:7700")])

    async def write(*_: object, **__: object) -> None:
        return None

    async def ask(*_: object) -> Asked:
        await asyncio.sleep(4)
        return Asked(False, records_s=records_s)

    async def one_round() -> None:
        store: Any = SimpleNamespace(read=read, result=write, update=write)
        metrics: Any = SimpleNamespace(unknown=SimpleNamespace(set=lambda _: None))
        replicas: Any = SimpleNamespace(ask=ask)
        unknowns = Unknowns(store, replicas, metrics)
        unknowns.watch(operation, age_s=1.0)
        await unknowns.ask_all()

    fake_time.run(one_round())
    assert operation.results[0].outcome == outcome
