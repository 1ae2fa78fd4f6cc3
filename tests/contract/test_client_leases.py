"""Weight updates over a real sidecar and fake engines: what an abandoned one leaves behind, and what comes after it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar import client
from sidecar.client import aio, leases, weights
from sidecar.client.errors import OutcomeUnknown
from sidecar.rpc.errors import failure
from sidecar.rpc.late_calls import NOT_AFTER_KEY
from tests.contract.fake_sidecar_server import FakeSidecar, serving
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess, spawn_engine
from tests.robustness.tcp_proxy import Network


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


# --- a pause whose answer was lost ------------------------------------------------------------------------------------


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a loaded machine to take one back."""
    monkeypatch.setattr(weights, "LONGEST_PAUSE_S", 3.0)


def resumed(fake: FakeSidecar) -> asyncio.Event:
    """Set once the fake has resumed."""
    event, done = asyncio.Event(), fake._did

    def did(kind: str, request_id: str, answer: object) -> None:
        done(kind, request_id, answer)
        if kind == "resume":
            event.set()

    fake._did = did  # type: ignore[method-assign]
    return event


async def test_a_pause_whose_answer_was_lost_is_taken_back_while_the_update_goes_on_elsewhere(
    short_pauses: None,
) -> None:
    good, lost = FakeSidecar("good"), FakeSidecar("lost")
    lost.forget_answers = True
    goes_on = resumed(lost)
    async with serving(good, lost) as addresses, aio.Fleet(addresses) as fleet:
        async with fleet.weight_update(lease_s=600.0) as update:
            assert update.replicas == ("good",)
            await asyncio.wait_for(goes_on.wait(), 60)
        error = update.lost["lost"]
    assert "could not be paused, and goes on as before" in str(error)
    assert not isinstance(error, OutcomeUnknown)
    assert [type(each).__name__ for each in lost.requests] == ["PauseSchedulingRequest", "ResumeSchedulingRequest"]


@pytest.mark.parametrize("how", ["nobody_is_left", "require_all", "body_raises"])
async def test_a_pause_whose_answer_was_lost_is_taken_back_however_the_update_ends(
    how: str, short_pauses: None
) -> None:
    good, lost = FakeSidecar("good"), FakeSidecar("lost")
    lost.forget_answers = True
    goes_on = resumed(lost)
    fakes = [lost] if how == "nobody_is_left" else [good, lost]
    async with serving(*fakes) as addresses, aio.Fleet(addresses) as fleet:
        update = fleet.weight_update(lease_s=600.0, require_all=how == "require_all")
        with pytest.raises(HalfWrittenError if how == "body_raises" else client.FleetFailed):
            async with update:
                raise HalfWrittenError
    assert goes_on.is_set()
    assert not lost.leases
    assert lost.cancelled == []  # that would leave it paused, as an abandoned update


async def test_a_pause_that_takes_hold_when_its_caller_has_gone_is_taken_back() -> None:
    fake = FakeSidecar("r0")
    sent = asyncio.Event()
    resumes: list[str] = []

    async def run_on(kind: str) -> None:
        if kind == "pause":
            sent.set()
            await asyncio.sleep(3600)
        resumes.append(kind)
        # As a sidecar does: the pause runs on without the caller of its RPC, and anything else is told to wait for it.
        fake.fail_with = [failure(grpc.StatusCode.ABORTED, "OPERATION_IN_PROGRESS", "a pause is under way here")]
        if len(resumes) == 2:
            fake.fail_with = []
            fake.leases[fake.requests[0].request_id] = 600.0

    fake.before = run_on
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        entering = asyncio.create_task(fleet.weight_update(lease_s=600.0).__aenter__())
        await asyncio.wait_for(sent.wait(), 60)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    assert resumes == ["resume", "resume"]
    assert not fake.leases


async def test_a_pause_that_the_network_still_holds_is_looked_for_until_it_can_begin_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeSidecar("r0")
    now, resumes = 0.0, 0
    monkeypatch.setattr(leases, "_now", lambda: now)

    async def arrive_late(kind: str) -> None:
        nonlocal now, resumes
        fake.lose_calls = kind == "pause"
        now = weights.LONGEST_PAUSE_S - 0.1
        resumes += kind == "resume"
        if resumes == 3:
            fake.leases[fake.requests[0].request_id] = 600.0

    fake.before = arrive_late
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        with pytest.raises(client.FleetFailed, match="every engine goes on as before"):
            async with fleet.weight_update(lease_s=600.0):
                pytest.fail("the body ran without a paused engine")
    assert resumes == 3
    assert not fake.leases


async def test_a_replica_that_may_be_paused_and_does_not_answer_is_told_with_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "LONGEST_PAUSE_S", 1.0)
    fake = FakeSidecar("r0")
    fake.forget_answers = True

    async def silent(kind: str) -> None:
        if kind == "resume":
            await asyncio.sleep(3600)

    fake.before = silent
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        with pytest.raises(client.FleetFailed, match="every engine that is known not to be paused goes on") as caught:
            async with fleet.weight_update(lease_s=600.0):
                pytest.fail("the body ran without a paused engine")
    [error] = caught.value.failures
    assert isinstance(error, OutcomeUnknown)
    assert "stands still until its lease of 600 s ends, and then stays paused" in str(error)
    assert f"`kvctl scheduling resume --pause {fake.requests[0].request_id} --replicas r0`" in str(error)


async def test_a_pause_that_every_rank_of_several_refused_is_no_doubt() -> None:
    fake, text = FakeSidecar("r0"), "another pause holds the lease on this engine"
    refused = types_pb2.EngineScheduling(status=types_pb2.EngineStatus(code=9, reason="WRONG_SCHEDULING_STATE"))
    answer = replica_pb2.PauseSchedulingResponse(engines=[refused, refused])
    fake.fail_with = [failure(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_SCHEDULING_STATE", text, result=answer)]
    async with serving(fake, FakeSidecar("r1")) as addresses, aio.Fleet(addresses) as fleet:
        update = await fleet.weight_update().__aenter__()
        assert str(update.lost["r0"]) == f"r0: could not be paused, and goes on as before: {text}"
        await update.__aexit__(None, None, None)


async def test_an_engine_that_a_black_hole_left_paused_goes_on_once_it_can_be_reached(
    served: tuple[SidecarProcess, EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LONGEST_PAUSE_S", 5.0)  # with less, a loaded machine's clock is asked for once more
    sidecar, engine = served
    network = Network()
    proxy = network.proxy(sidecar.address)
    found: list[str] = []
    taking_part, begin = aio.Fleet._taking_part, leases.Lease._begin_to_take_back

    async def then_silence(fleet: aio.Fleet, chosen: fleet_pb2.Targets) -> object:
        known = await taking_part(fleet, chosen)
        proxy.black_hole("back")
        return known

    def then_a_way(lease: leases.Lease) -> None:
        found.append(engine.do("state")["paused"])
        proxy.reset()
        proxy.mend()
        begin(lease)

    monkeypatch.setattr(aio.Fleet, "_taking_part", then_silence)
    monkeypatch.setattr(leases.Lease, "_begin_to_take_back", then_a_way)
    try:
        async with aio.Fleet([f"r0={proxy.address}"]) as fleet:
            with pytest.raises(client.FleetFailed, match="every engine goes on as before"):
                async with fleet.weight_update(lease_s=600.0):
                    pytest.fail("the body ran without a paused engine")
        assert [bool(paused) for paused in found] == [True]
        assert engine.do("state")["paused"] == ""
    finally:
        network.close()
