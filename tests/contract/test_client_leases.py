"""Weight updates over a real sidecar and fake engines: what an abandoned one leaves behind, and what comes after it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sidecar import client
from sidecar.client import aio
from sidecar.rpc.late_calls import NOT_AFTER_KEY
from tests.contract.fake_sidecar_server import FakeSidecar, serving
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess, spawn_engine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[SidecarProcess, EngineProcess]]:
    (tmp_path / "e").mkdir()
    with spawn_engine(tmp_path / "e") as engine:
        sidecar = SidecarProcess(tmp_path / "e", tmp_path)
        try:
            sidecar.wait_ready(60)
            yield sidecar, engine
        finally:
            sidecar.end()


class HalfWrittenError(Exception):
    """Raised by the body of an update."""


def test_a_raised_body_leaves_its_replica_paused_at_once_and_the_next_update_is_accepted(
    served: tuple[SidecarProcess, EngineProcess],
) -> None:
    sidecar, _ = served
    with client.Fleet([sidecar.address]) as fleet:
        for _ in range(3):
            with pytest.raises(HalfWrittenError), fleet.weight_update("step-1", lease_s=600.0, require_all=True):
                raise HalfWrittenError

        def told() -> bool:
            [replica] = fleet.admission()
            return "weight update was abandoned" in replica.engines[0].explanation

        wait_until(told, 60, lambda: fleet.admission())
        [replica] = fleet.admission()
        assert "or it was cancelled" in replica.engines[0].explanation
        with fleet.weight_update("step-2", require_all=True) as update:
            assert len(update.replicas) == 1
        update.raise_for_failures()

        def goes_on() -> bool:
            return fleet.admission()[0].engines[0].verdict == "IDLE"

        wait_until(goes_on, 60, lambda: fleet.admission())


def test_a_raised_body_lets_its_replica_go_on_where_the_caller_chose_that(
    served: tuple[SidecarProcess, EngineProcess],
) -> None:
    sidecar, engine = served
    with client.Fleet([sidecar.address]) as fleet:
        with pytest.raises(HalfWrittenError), fleet.weight_update(lease_s=600.0, on_abandon="resume", require_all=True):
            raise HalfWrittenError
        assert engine.do("state")["paused"] == ""


def test_an_update_goes_on_with_a_sidecar_that_was_restarted_under_it(
    served: tuple[SidecarProcess, EngineProcess], tmp_path: Path
) -> None:
    sidecar, _ = served
    (tmp_path / "again").mkdir()
    with ExitStack() as stack, client.Fleet([f"r0={sidecar.address}"]) as fleet:
        with fleet.weight_update("step-7", lease_s=600.0, require_all=True) as update:
            sidecar.process.kill()
            sidecar.process.wait(30)
            again = SidecarProcess(tmp_path / "e", tmp_path / "again", "--listen", sidecar.address)
            stack.callback(again.end)
            again.wait_ready(60)
        update.raise_for_failures()
        [replica] = fleet.admission()
        assert replica.engines[0].weight_version == "step-7"


async def test_what_an_update_asks_for_is_not_begun_after_the_client_has_given_up() -> None:
    fake = FakeSidecar("r0")
    fake.tells_instance = True
    bound: list[str] = []

    async def look(kind: str) -> None:
        if any(key == NOT_AFTER_KEY for key, _ in fake.metadata):
            bound.append(kind)

    fake.before = look
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet, fleet.weight_update():
        pass
    assert [kind for kind in bound if kind != "renew"] == ["pause", "reset", "resume"]


async def test_a_replica_that_stops_answering_is_lost_with_the_time_it_was_given() -> None:
    fake = FakeSidecar("r0")

    async def silent(kind: str) -> None:
        if kind == "renew":
            await asyncio.sleep(60)

    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        fake.before = silent
        with pytest.raises(client.FleetFailed, match=f"no answer from {addresses[0]} within 1 s"):
            async with fleet.weight_update(lease_s=1.0):
                pass
