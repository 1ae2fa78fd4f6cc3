"""Pauses and their leases under a fake clock: who may end one, and what an ended one leaves alone."""

from __future__ import annotations

import logging
import queue
from logging.handlers import QueueHandler
from typing import Any

import pytest

from engine_bridge import protocol
from engine_bridge.dispatcher import SLICE_NS
from engine_bridge.operations.pause import UNKNOWN_VERSION
from tests.fake_engine.client import new_id
from tests.fake_engine.world import SECOND, World, slow_reorder


@pytest.fixture
def world() -> World:
    return World()


def pause(world: World, lease_seconds: float = 10, **options: Any) -> str:
    request_id = new_id()
    world.send(protocol.Pause(1, request_id, world.now + 5 * SECOND, int(lease_seconds * SECOND), **options))
    assert world.replies[-1].state == "done", world.replies[-1]
    return request_id


def test_a_lease_runs_out_by_the_clock_and_not_before(world: World) -> None:
    pause(world, 10)
    assert world.dispatcher.next_timer_ns() == world.now + 10 * SECOND
    world.tick(9.9)
    assert not world.log.abandoned
    world.tick(0.2)
    assert world.log.abandoned
    assert world.engine.pause_owner == "kvctl"


def test_weights_declared_whole_stay_declared(world: World) -> None:
    lease = pause(world, 1)
    world.send(protocol.Renew(2, lease, SECOND, weights_complete=True))
    world.send(protocol.Renew(3, lease, SECOND))
    world.tick(2)
    assert world.engine.pause_owner == ""
    assert ("reset", "keep") in world.log.events


def test_an_expired_lease_waits_for_the_operation_that_runs(world: World) -> None:
    pause(world, 1)
    slow_reorder(world, 2 * SLICE_NS, 2)
    world.send(protocol.Reorder(2, new_id(), world.now + 60 * SECOND, "all_free"))
    world.now += 2 * SECOND
    world.tick()
    assert not world.log.abandoned
    while world.dispatcher.wants_turn:
        world.tick()
    world.tick()
    assert world.log.abandoned


def test_a_lease_whose_reset_raises_leaves_the_engine_paused_and_marked(world: World) -> None:
    lease = pause(world, 1)
    world.send(protocol.Renew(2, lease, SECOND, weights_complete=True))
    world.engine.raise_in["drop_prefix_cache"] = "boom"
    world.tick(2)
    assert world.engine.pause_owner == "kvctl"
    assert world.log.abandoned
    world.engine.raise_in.clear()
    events = len(world.log.events)
    world.tick(1)
    assert len(world.log.events) == events, "the end of the lease was tried again"


def test_kept_requests_are_quarantined_when_a_lease_runs_out(world: World) -> None:
    world.engine.add("running", 2)
    pause(world, 1)
    world.tick(2)
    assert world.engine.quarantined == 1


def test_a_resume_by_vllm_itself_ends_lease_and_abandonment(world: World) -> None:
    lease = pause(world, 10)
    world.engine.pause_owner = ""
    world.tick()
    assert world.dispatcher.quiet
    world.send(protocol.Renew(2, lease, SECOND))
    assert world.replies[-1].state == "refused"


def test_a_pause_that_cannot_be_completed_is_undone(world: World) -> None:
    world.engine.steps_in_flight = 2
    world.send(protocol.Pause(1, new_id(), world.now + SECOND, 60 * SECOND))
    assert world.engine.pause_owner == "kvctl"
    world.tick(2)
    assert world.replies[0].state == "withdrawn"
    assert world.engine.pause_owner == ""
    assert world.dispatcher.quiet


def test_a_sleeping_engine_is_neither_paused_nor_resumed_but_can_be_reset(world: World) -> None:
    world.engine.asleep = True
    world.send(protocol.Pause(1, new_id(), world.now + SECOND, SECOND))
    world.send(protocol.Resume(2, new_id(), world.now + SECOND))
    assert [reply.reason for reply in world.replies] == ["ENGINE_SLEEPING", "ENGINE_SLEEPING"]
    assert world.reset().state == "done"


def test_an_empty_name_resumes_whatever_paused_the_engine(world: World) -> None:
    world.engine.pause_owner = "vllm"
    world.send(protocol.Resume(1, new_id(), world.now + SECOND))
    assert world.replies[0].state == "done"
    assert world.engine.pause_owner == ""


# --- vLLM's own pauses and sleeps ---------------------------------------------------------------------------------


def fall_asleep(world: World) -> None:
    """vLLM's own sleep, which pauses the scheduler first."""
    world.engine.pause_owner = "vllm"
    world.engine.asleep = True


@pytest.mark.parametrize("whole", [True, False], ids=["weights whole", "weights half written"])
def test_a_lease_that_runs_out_underneath_a_sleep_resets_and_wakes_nobody(world: World, whole: bool) -> None:
    lease = pause(world, 1)
    world.send(protocol.Renew(2, lease, SECOND, weights_complete=whole))
    fall_asleep(world)
    world.engine.cached = {1, 2}
    world.tick(2)
    assert world.engine.pause_owner == "vllm"
    assert world.engine.cached == set()
    assert world.log.abandoned is not whole
    assert world.dispatcher.memory.lease is None


def test_a_lease_that_runs_out_while_a_sleep_waits_for_steps_leaves_it_to_come(world: World) -> None:
    lease = pause(world, 1)
    world.send(protocol.Renew(2, lease, SECOND, weights_complete=True))
    world.engine.sleep_waits = True
    world.tick(2)
    assert world.engine.pause_owner == "kvctl"
    assert not world.log.abandoned


def test_an_owner_cannot_resume_underneath_a_sleep_and_keeps_its_lease(world: World) -> None:
    lease = pause(world, 60)
    fall_asleep(world)
    world.send(protocol.Resume(2, new_id(), world.now + SECOND, lease))
    assert world.replies[-1].reason == "ENGINE_SLEEPING"
    world.engine.asleep, world.engine.sleep_waits = False, True
    for force in (False, True):
        world.send(protocol.Resume(3, new_id(), world.now + SECOND, "" if force else lease, force=force))
        assert world.replies[-1].state == "refused"
        assert "still waits" in world.replies[-1].message
    assert world.engine.pause_owner == "vllm"
    assert world.dispatcher.memory.lease is not None


def test_an_owner_does_not_end_vllms_own_pause_with_its_lease(world: World) -> None:
    lease = pause(world, 60)
    world.engine.pause_owner = "vllm"
    world.send(protocol.Resume(2, new_id(), world.now + SECOND, lease))
    assert world.replies[-1].reason == "WRONG_SCHEDULING_STATE"
    assert "vLLM itself has paused" in world.replies[-1].message
    assert world.engine.pause_owner == "vllm"
    world.send(protocol.Resume(3, new_id(), world.now + SECOND, force=True))
    assert world.replies[-1].state == "done"
    assert world.engine.pause_owner == ""


@pytest.mark.parametrize("theirs", ["vllm", ""], ids=["paused", "resumed"])
@pytest.mark.parametrize("seconds", [0.1, 2], ids=["in time", "late"])
def test_what_vllm_does_while_a_pause_waits_for_steps_stands(world: World, theirs: Any, seconds: float) -> None:
    world.engine.steps_in_flight = 2
    world.send(protocol.Pause(1, new_id(), world.now + SECOND, 60 * SECOND))
    world.engine.pause_owner = theirs
    world.engine.steps_in_flight = 0
    world.tick(seconds)
    assert world.replies[-1].reason == "WRONG_SCHEDULING_STATE"
    assert "its word stands" in world.replies[-1].message
    assert world.engine.pause_owner == theirs
    assert world.dispatcher.memory.lease is None


def test_no_pause_is_taken_while_a_sleep_waits_for_steps(world: World) -> None:
    world.engine.sleep_waits = True
    world.send(protocol.Pause(1, new_id(), world.now + SECOND, SECOND))
    assert world.replies[-1].reason == "WRONG_SCHEDULING_STATE"
    assert world.engine.pause_owner == ""


# --- who may end a live lease -------------------------------------------------------------------------------------


def test_a_bare_resume_does_not_end_a_live_lease_and_is_told_whose_it_is(world: World) -> None:
    lease = pause(world, 60)
    world.now += 20 * SECOND
    world.send(protocol.Resume(2, new_id(), world.now + SECOND, weight_version="v9"))
    refused = world.replies[-1]
    assert (refused.state, refused.reason) == ("refused", "WRONG_SCHEDULING_STATE")
    assert lease in refused.message
    assert "40.0 s" in refused.message
    assert refused.result.lease_remaining_ns == 40 * SECOND
    assert world.engine.version == ""
    assert world.engine.pause_owner == "kvctl"


def test_force_ends_a_live_lease(world: World) -> None:
    lease = pause(world, 60)
    world.send(protocol.Resume(2, new_id(), world.now + SECOND, force=True))
    assert world.replies[-1].state == "done"
    assert world.engine.pause_owner == ""
    world.send(protocol.Renew(3, lease, SECOND))
    assert world.replies[-1].state == "refused"


def test_a_bare_resume_resolves_an_abandoned_update(world: World) -> None:
    pause(world, 1)
    world.tick(2)
    assert world.log.abandoned
    world.send(protocol.Resume(2, new_id(), world.now + SECOND))
    assert world.replies[-1].state == "done"
    assert not world.log.abandoned


def test_an_engine_that_steps_together_with_others_is_not_resumed_alone(world: World) -> None:
    world.engine.pause_owner = "vllm"
    world.engine.lacking["pause"] = "lockstep"
    world.send(protocol.Resume(1, new_id(), world.now + SECOND))
    assert world.replies[-1].state == "unsupported"
    assert world.engine.pause_owner == "vllm"


# --- which weights an engine says it serves -----------------------------------------------------------------------


def run_out(world: World, lease: str) -> None:
    world.tick(61)


def withdraw(world: World, lease: str) -> None:
    world.send(protocol.Cancel(7, lease))


def resume(world: World, version: str = "", **options: Any) -> None:
    world.send(protocol.Resume(8, new_id(), world.now + SECOND, weight_version=version, **options))
    assert world.replies[-1].state == "done", world.replies[-1]


@pytest.mark.parametrize("end", [run_out, withdraw])
@pytest.mark.parametrize("by_itself", [True, False], ids=["resumes by itself", "stays paused"])
def test_an_abandoned_update_leaves_weights_of_an_unknown_version_until_a_resume_names_one(
    world: World, end: Any, by_itself: bool
) -> None:
    world.engine.version = "step-1"
    end(world, pause(world, 60, resume_when_abandoned=by_itself))
    assert world.engine.pause_owner == ("" if by_itself else "kvctl")
    assert world.engine.version == UNKNOWN_VERSION
    resume(world)
    assert world.replies[-1].result.weight_version == UNKNOWN_VERSION
    resume(world, "step-2")
    assert world.engine.version == "step-2"


def test_the_version_before_an_abandoned_update_is_in_the_log(world: World) -> None:
    said = queue.SimpleQueue[logging.LogRecord]()
    handler = QueueHandler(said)
    logger = logging.getLogger("vllm.kvctl")
    logger.addHandler(handler)
    try:
        world.engine.version = "step-1"
        lease = pause(world, 60)
        run_out(world, lease)
    finally:
        logger.removeHandler(handler)
    line = said.get_nowait().getMessage()
    assert lease in line
    assert "'step-1'" in line


def test_an_abandoned_update_that_vllm_itself_resumes_is_of_an_unknown_version_too(world: World) -> None:
    world.engine.version = "step-1"
    run_out(world, pause(world, 60))
    world.engine.pause_owner = ""
    world.tick()
    assert world.engine.version == UNKNOWN_VERSION


def test_a_reset_that_raises_at_the_end_of_a_lease_leaves_no_old_version_behind(world: World) -> None:
    world.engine.version = "step-1"
    world.engine.raise_in["drop_prefix_cache"] = "boom"
    run_out(world, pause(world, 60))
    assert world.engine.version == UNKNOWN_VERSION


def test_a_new_update_does_not_bring_an_old_version_back(world: World) -> None:
    world.engine.version = "step-1"
    run_out(world, pause(world, 60))
    lease = pause(world, 60)
    assert world.engine.version == UNKNOWN_VERSION
    resume(world, pause_request_id=lease)
    assert world.engine.version == UNKNOWN_VERSION


def test_whole_weights_that_nobody_named_are_of_an_unknown_version(world: World) -> None:
    world.engine.version = "step-1"
    lease = pause(world, 60)
    world.send(protocol.Renew(2, lease, 60 * SECOND, weights_complete=True))
    run_out(world, lease)
    assert world.engine.pause_owner == ""
    assert world.engine.version == UNKNOWN_VERSION


@pytest.mark.parametrize(
    ("whole", "read"), [(True, UNKNOWN_VERSION), (False, "step-1")], ids=["declared whole", "nothing declared"]
)
def test_an_owner_that_resumes_without_a_name_has_new_weights_if_it_declared_them(
    world: World, whole: bool, read: str
) -> None:
    world.engine.version = "step-1"
    lease = pause(world, 60)
    world.send(protocol.Renew(2, lease, 60 * SECOND, weights_complete=whole))
    resume(world, pause_request_id=lease)
    assert world.engine.version == read


@pytest.mark.parametrize(("whole", "read"), [(True, "theirs"), (False, UNKNOWN_VERSION)])
def test_a_version_told_to_vllm_itself_stands_where_the_weights_are_whole(world: World, whole: bool, read: str) -> None:
    world.engine.version = "step-1"
    lease = pause(world, 60)
    world.engine.version = "theirs"
    world.send(protocol.Renew(2, lease, 60 * SECOND, weights_complete=whole))
    run_out(world, lease)
    assert world.engine.version == read


@pytest.mark.parametrize(("theirs", "read"), [("", UNKNOWN_VERSION), ("theirs", "theirs")])
def test_a_resume_by_vllm_itself_beneath_a_live_lease_leaves_only_a_version_told_to_it(
    world: World, theirs: str, read: str
) -> None:
    world.engine.version = "step-1"
    pause(world, 60)
    world.engine.version = theirs or world.engine.version
    world.engine.pause_owner = ""
    world.tick()
    assert world.engine.version == read


def test_force_over_a_live_lease_leaves_the_version_unknown_unless_it_names_one(world: World) -> None:
    world.engine.version = "step-1"
    pause(world, 60)
    resume(world, force=True)
    assert world.engine.version == UNKNOWN_VERSION
    pause(world, 60)
    resume(world, "step-2", force=True)
    assert world.engine.version == "step-2"


@pytest.mark.parametrize("renewed", [False, True])
def test_a_pause_that_never_took_hold_leaves_the_version_as_it_was(world: World, renewed: bool) -> None:
    world.engine.version = "step-1"
    world.engine.steps_in_flight = 2
    request_id = new_id()
    world.send(protocol.Pause(1, request_id, world.now + SECOND, 60 * SECOND))
    world.engine.pause_owner = ""
    if renewed:
        world.send(protocol.Renew(2, request_id, SECOND))
    world.engine.steps_in_flight = 0
    world.tick(0.1)
    assert world.replies[-1].state == "refused"
    assert world.engine.version == "step-1"
