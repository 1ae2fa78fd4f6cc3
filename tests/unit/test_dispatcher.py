"""The dispatcher under a fake clock, over the fake engine's model: no socket, no thread, no sleep."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge import dispatcher as module
from engine_bridge import protocol
from engine_bridge.dispatcher import SLICE_NS
from engine_bridge.outcomes import RECORDED_OUTCOMES
from tests.fake_engine.client import new_id
from tests.fake_engine.world import SECOND, World, slow_reorder


@pytest.fixture
def world() -> World:
    return World()


def test_an_id_is_noted_before_its_deadline_is_looked_at(world: World) -> None:
    request_id = new_id()
    outcome = world.reset(request_id=request_id, seconds=-1)
    assert outcome.state == "expired"
    assert world.log.events[0] == ("started", request_id)


def test_an_expired_operation_has_no_effect_and_is_on_record(world: World) -> None:
    world.engine.cached = {1, 2}
    request_id = new_id()
    assert world.reset(request_id=request_id, seconds=0).state == "expired"
    assert world.engine.cached == {1, 2}
    again = world.reset(request_id=request_id, seconds=100)
    assert again.state == "expired"
    assert again.replayed


def test_the_record_holds_so_many_outcomes_and_forgets_the_oldest(world: World) -> None:
    first = new_id()
    world.reset(request_id=first)
    ids = [new_id() for _ in range(RECORDED_OUTCOMES)]
    for request_id in ids:
        world.reset(request_id=request_id)
    assert world.reset(request_id=ids[0]).replayed
    assert not world.reset(request_id=first).replayed


def test_a_deadline_or_call_number_makes_no_other_request(world: World) -> None:
    request_id = new_id()
    world.reset(request_id=request_id, call=1, seconds=10)
    again = world.reset(request_id=request_id, call=9, seconds=20)
    assert again.replayed
    assert again.call == 9


@pytest.mark.parametrize(
    "options", [{"connector": True}, {"mm": True}, {"encoder": True}, {"reorder": True}, {"wait_for_idle": True}]
)
def test_every_argument_counts_when_requests_are_compared(world: World, options: dict[str, bool]) -> None:
    request_id = new_id()
    world.reset(request_id=request_id)
    assert world.reset(request_id=request_id, **options).state == "mismatch"


def test_spellings_of_a_uuid_are_one_id(world: World) -> None:
    request_id = new_id()
    world.reset(request_id=request_id)
    assert world.reset(request_id=request_id.upper().replace("-", "")).replayed


def test_long_work_is_cut_into_slices_and_the_engine_gets_its_turns(world: World) -> None:
    slow_reorder(world, SLICE_NS // 2, 10)
    request_id = new_id()
    world.send(protocol.Reorder(1, request_id, world.now + 60 * SECOND, "all_free"))
    turns = 0
    while not world.replies:
        assert world.dispatcher.wants_turn
        world.tick()
        turns += 1
    assert turns >= 4
    outcome = world.replies[0]
    assert outcome.state == "done"
    assert outcome.result.cost.slices == turns + 1
    assert SLICE_NS // 1000 <= outcome.result.cost.longest_us <= 2 * SLICE_NS // 1000
    assert outcome.result.cost.total_us >= 5 * SLICE_NS // 1000


def test_a_request_that_arrives_between_slices_joins(world: World) -> None:
    slow_reorder(world, 2 * SLICE_NS, 3)
    request_id = new_id()
    for call in (1, 2, 3):
        world.send(protocol.Reorder(call, request_id, world.now + 60 * SECOND, "all_free"))
        world.tick()
    while world.dispatcher.wants_turn:
        world.tick()
    assert sorted(reply.call for reply in world.replies) == [1, 2, 3]
    assert {reply.state for reply in world.replies} == {"done"}


def test_what_runs_between_slices_cannot_be_cancelled(world: World) -> None:
    slow_reorder(world, 2 * SLICE_NS, 3)
    request_id = new_id()
    world.send(protocol.Reorder(1, request_id, world.now + 60 * SECOND, "all_free"))
    world.send(protocol.Cancel(2, request_id))
    assert world.replies == [
        protocol.Cancelled(2, request_id, cancelled=False, message="it has started and will finish")
    ]


@pytest.mark.parametrize("method", ["drop_prefix_cache", "holders", "publish_cleared"])
def test_an_operation_that_raises_is_answered_and_the_next_one_runs(world: World, method: str) -> None:
    world.engine.raise_in[method] = "boom \udcff"
    outcome = world.reset()
    assert outcome.state == "raised"
    assert "RuntimeError: boom" in outcome.message
    world.engine.raise_in.clear()
    assert world.reset().state == "done"


def test_a_raise_between_slices_is_answered_too(world: World) -> None:
    def fail() -> None:
        raise ValueError("halfway")

    slow_reorder(world, 2 * SLICE_NS, 2, then=fail)
    world.send(protocol.Reorder(1, new_id(), world.now + 60 * SECOND, "all_free"))
    while world.dispatcher.wants_turn:
        world.tick()
    assert world.replies[0].state == "raised"
    assert "halfway" in world.replies[0].message


def test_evidence_that_raises_is_a_fault(world: World) -> None:
    world.engine.raise_in["evidence"] = "boom"
    world.send(protocol.Admission(4))
    assert world.replies == [protocol.Fault(4, "RuntimeError: boom")]


def test_a_waiting_reset_is_not_noted_until_it_fires(world: World) -> None:
    name = world.engine.add("running", 3)
    request_id = new_id()
    world.reset(request_id=request_id, wait_for_idle=True)
    world.tick()
    assert world.log.events == []
    assert not world.dispatcher.wants_turn
    world.engine.end(name)
    world.tick()
    assert world.log.events[0] == ("started", request_id)
    assert world.replies[0].state == "done"


def test_a_waiting_reset_has_a_timer_and_is_withdrawn_by_it(world: World) -> None:
    world.engine.add("running", 3)
    world.reset(wait_for_idle=True, seconds=5)
    assert world.dispatcher.next_timer_ns() == world.now + 5 * SECOND
    world.tick(4.9)
    assert world.replies == []
    world.tick(0.1)
    assert world.replies[0].state == "withdrawn"
    assert world.replies[0].reason == "NEVER_IDLE"
    assert world.dispatcher.quiet


def test_a_waiting_reset_says_that_a_pause_keeps_it_from_firing(world: World) -> None:
    world.engine.add("running", 3)
    world.engine.pause_owner = "vllm"
    world.reset(wait_for_idle=True, seconds=1)
    world.tick(1)
    assert "paused" in world.replies[0].message


def test_a_stopping_engine_takes_nothing_up_and_answers_who_waits(world: World) -> None:
    world.engine.add("running", 3)
    world.reset(wait_for_idle=True)
    world.stopping = True
    assert world.reset("keep").state == "stopping"
    world.tick()
    assert world.replies[-1].state == "stopping"


def test_stopping_brings_begun_work_to_its_end(world: World) -> None:
    slow_reorder(world, 2 * SLICE_NS, 5)
    world.send(protocol.Reorder(1, new_id(), world.now + 60 * SECOND, "all_free"))
    world.dispatcher.stop()
    assert world.replies[0].state == "done"


# --- steps in flight ----------------------------------------------------------------------------------------------


def test_a_preempt_waits_for_steps_in_flight_and_lets_go_of_scheduling(world: World) -> None:
    world.engine.add("running", 3)
    world.engine.needs_settling, world.engine.steps_in_flight = True, 2
    world.reset("preempt")
    assert world.engine.held
    assert world.dispatcher.waits_for_step
    world.engine.step()
    world.tick()
    assert world.replies == []
    world.engine.step()
    world.tick()
    assert world.replies[0].result.requests_preempted == 1
    assert not world.engine.held


def test_a_preempt_that_waits_for_steps_can_be_withdrawn_and_has_changed_nothing(world: World) -> None:
    world.engine.add("running", 3)
    world.engine.cached = {100}
    world.engine.needs_settling, world.engine.steps_in_flight = True, 2
    request_id = new_id()
    world.reset("preempt", request_id=request_id)
    world.send(protocol.Cancel(2, request_id))
    assert {type(reply) for reply in world.replies} == {protocol.Outcome, protocol.Cancelled}
    assert world.replies[0].state == "withdrawn"
    assert not world.engine.held
    assert world.engine.running_requests() == 1
    assert world.engine.cached == {100}


def test_an_engine_that_makes_no_step_is_woken_at_the_deadline_and_not_before(world: World) -> None:
    """An engine in its caller's process blocks with steps in flight until its caller comes again."""
    world.engine.needs_settling, world.engine.steps_in_flight = True, 2
    world.reset("preempt", seconds=3)
    assert not world.dispatcher.wants_turn
    assert world.dispatcher.next_timer_ns() == world.now + 3 * SECOND
    world.tick(3)
    assert world.replies[0].state == "withdrawn"
    assert world.dispatcher.quiet


def test_a_preempt_gives_up_at_its_deadline_while_steps_are_in_flight(world: World) -> None:
    world.engine.add("running", 3)
    world.engine.needs_settling, world.engine.steps_in_flight = True, 2
    world.reset("preempt", seconds=1)
    world.tick(2)
    assert world.replies[0].state == "withdrawn"
    assert world.replies[0].reason == "NOT_EXECUTED"
    assert not world.engine.held


# --- preconditions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "reason"), [("loading", "REMOTE_LOADS_IN_FLIGHT"), ("loaded", "BLOCKS_HELD_BY_REQUESTS")]
)
def test_preempt_is_refused_before_anything_is_preempted(world: World, state: Any, reason: str) -> None:
    world.engine.add("running", 3)
    world.engine.add(state, 2)
    outcome = world.reset("preempt")
    assert outcome.state == "refused"
    assert outcome.reason == reason
    assert world.engine.running_requests() == 1
    assert world.engine.preemptions == 0


@pytest.mark.parametrize(
    ("states", "transfer", "who"),
    [
        (["running"], 0, "2 blocks are held by 1 running request; "),
        (["running", "loading"], 0, "4 blocks are held by 1 running and 1 waiting requests (1 of them loading KV"),
        (["running"], 3, "5 blocks are held by 1 running request and transfers (3 blocks); "),
        ([], 3, "3 blocks are held by transfers (3 blocks); "),
    ],
)
def test_a_refusal_names_who_holds_blocks_and_nobody_who_does_not(
    world: World, states: list[Any], transfer: int, who: str
) -> None:
    for state in states:
        world.engine.add(state, 2)
    if transfer:
        world.engine.hold_transfer(transfer)
    assert world.reset("fail").message.startswith(who)


def test_blocks_held_by_no_request_are_blamed_on_transfers(world: World) -> None:
    world.engine.hold_transfer(2)
    for mode in ("fail", "preempt"):
        outcome = world.reset(mode)
        assert outcome.reason == "BLOCKS_HELD_BY_TRANSFERS"
        assert "wait for them (wait_for_idle)" not in outcome.message


def test_without_prefix_caching_a_reset_has_nothing_to_do_and_says_so(world: World) -> None:
    world.engine.identity.prefix_caching = False
    world.engine.add("running", 2)
    outcome = world.reset("fail")
    assert outcome.state == "done"
    assert outcome.result.prefix.reason == "PREFIX_CACHING_DISABLED"


@pytest.mark.parametrize(
    ("answer", "state", "tier", "reason"),
    [
        ("absent", "done", "not_configured", ""),
        ("true", "done", "done", ""),
        ("false", "pending", "pending", "CONNECTOR_BUSY"),
        ("none", "partial", "unsupported", "TIER_UNSUPPORTED"),
        ("raise", "partial", "failed", "OPERATION_RAISED"),
    ],
)
def test_a_connectors_answer_is_read_for_what_it_says(
    world: World, answer: Any, state: str, tier: str, reason: str
) -> None:
    world.engine.connector = answer
    outcome = world.reset("keep", connector=True)
    assert outcome.state == state
    assert outcome.reason == reason
    assert outcome.result.connector.state == tier
    assert outcome.result.prefix.state == "done"


def test_a_switched_off_capability_is_unsupported_and_changes_nothing(world: World) -> None:
    world.engine.cached = {5}
    world.engine.lacking["reset.quarantine"] = "HiSparse"
    outcome = world.reset("keep", quarantine=True)
    assert outcome.state == "unsupported"
    assert "HiSparse" in outcome.message
    assert world.engine.cached == {5}


def test_the_answer_says_that_the_event_went_out_and_for_which_tiers(world: World) -> None:
    world.engine.events_configured = True
    result = world.reset().result
    assert result.event_published
    assert result.event_tiers == ["GPU"]


def test_texts_are_capped(world: World) -> None:
    world.engine.raise_in["holders"] = "x" * 100_000
    assert len(world.reset().message) <= module.MAX_TEXT


def test_events_are_published_after_every_tier_so_that_none_of_theirs_stays_behind(monkeypatch: Any) -> None:
    world = World()
    world.engine.connector, world.engine.events_configured = "true", True
    order: list[str] = []
    for name in ("drop_prefix_cache", "reset_connector", "reset_encoder", "publish_cleared"):
        original = getattr(world.engine, name)
        monkeypatch.setattr(world.engine, name, lambda o=original, n=name: (order.append(n), o())[1])
    world.reset("keep", connector=True, encoder=True)
    assert order == ["drop_prefix_cache", "reset_connector", "reset_encoder", "publish_cleared"]
