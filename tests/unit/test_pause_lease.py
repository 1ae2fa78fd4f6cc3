"""Pauses and their leases under a fake clock: who may end one, and what an ended one leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge import protocol
from engine_bridge.dispatcher import SLICE_NS
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
