"""A weight update from Python over real engines under load: one that ends well, and one that is abandoned."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.client import aio
from sidecar.client.results import ReplicaAdmission
from sidecar.local.load import finish


async def eventually(fleet: aio.Fleet, verdict: str, why: str = "") -> tuple[ReplicaAdmission, ...]:
    """Admission once every engine has this verdict, explained like this: sidecars look again and again."""
    async with asyncio.timeout(90):
        while True:
            rows = await fleet.admission(timeout_s=30)
            engines = [engine for row in rows for engine in row.engines]
            if len(engines) == 2 and all(each.verdict == verdict and why in each.explanation for each in engines):
                return rows
            await asyncio.sleep(0.1)


async def test_an_update_pauses_both_engines_keeps_their_streams_and_records_the_version(fleet, load):
    streams = [stream for each in load for stream in each.under_way()]
    async with aio.Fleet(inventory=fleet.state / "inventory.yaml") as client:
        async with client.weight_update("step-1") as update:
            assert update.replicas == ("r0", "r1")
            await eventually(client, "PAUSED")
        update.raise_for_failures()
        rows = await eventually(client, "FLOWING")
    engines = [engine for row in rows for engine in row.engines]
    assert [engine.weight_version for engine in engines] == ["step-1", "step-1"]
    assert all(engine.message.HasField("since_last_reset") for engine in engines)
    await finish(streams, 200)
    assert len(streams) == 8
    assert all(stream.finished for stream in streams), [stream.error for stream in streams]


async def test_an_update_whose_body_raises_leaves_both_engines_paused_until_a_person_resumes_them(fleet, load):
    streams = [stream for each in load for stream in each.under_way()]
    try:
        async with aio.Fleet(inventory=fleet.state / "inventory.yaml") as client:
            with pytest.raises(ZeroDivisionError):
                async with client.weight_update("step-2"):
                    raise ZeroDivisionError
            await eventually(client, "PAUSED", "abandoned")
            told = await fleet.run_beside("admission")
            assert told.code == 1, "an abandoned update counts as a stall"
            resumed = await fleet.run_beside("scheduling", "resume")
            assert resumed.code == 0, resumed.out
            assert resumed.err.count("its weight update was abandoned") == 2
            assert "step-2" not in resumed.err
            await eventually(client, "FLOWING")
    finally:
        await fleet.run_beside("scheduling", "resume", "--force")
    await finish(streams, 200)
    assert all(stream.finished for stream in streams), [stream.error for stream in streams]
