"""Evidence on admissions, read off vLLM's real scheduler in the states that verdicts are made of."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from engine_bridge import protocol
from engine_bridge.engine import evidence, guards, need, pools, waiting
from tests.engine.scheduler_world import BLOCK, World, full_attention, sliding_window

pytestmark = pytest.mark.engine


def read(world: World, **engine: Any) -> protocol.Evidence:
    whole = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=False, **engine))
    return evidence.read_evidence(whole, guards.install(world.scheduler), call=7, contiguity_blocks=64)


def test_an_idle_engine_has_nothing_to_show() -> None:
    seen = read(World(blocks=64))
    assert (seen.call, seen.running, seen.waiting, seen.waiting_holding_blocks) == (7, 0, 0, 0)
    assert (seen.blocks_total, seen.blocks_free, seen.blocks_cached, seen.blocks_orphaned) == (63, 63, 0, 0)
    assert seen.head is None
    assert seen.oldest_waiting_ns == 0
    assert seen.contiguity == protocol.Contiguity(free_blocks=63, adjacent_pairs=62, runs=1)
    assert seen.verdict == ""


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_head_is_the_request_that_is_admitted_when_blocks_come_free(policy: str) -> None:
    world = World(blocks=40, scheduling_policy=policy)
    world.add("big", 30 * BLOCK, max_tokens=4, priority=1)
    for name, priority in (("b", 2), ("a", 1)):
        world.add(name, 20 * BLOCK, max_tokens=4, priority=priority, arrival_time=time.time() + 1)
    world.step()
    world.step()
    seen = read(world)
    assert (seen.running, seen.waiting) == (1, 2)
    assert seen.head.blocks_needed == 20
    assert seen.head.blocks_needed > seen.blocks_free
    assert seen.head.waiting_ns > 0
    while "big" in world.scheduler.requests:
        world.step()
    admitted = world.step().scheduled_new_reqs[0].req_id
    assert seen.head.request_id == admitted == {"fcfs": "b", "priority": "a"}[policy]


def test_what_the_head_needs_is_exactly_what_vllm_asks_for() -> None:
    """Tried against vLLM's own allocation: with that many blocks free it is admitted, with one less it is not."""
    for specs in ([full_attention()], [full_attention(), sliding_window(3 * BLOCK)]):
        for prompt in (1, 5 * BLOCK, 5 * BLOCK + 1, 17 * BLOCK + 3):
            probe = World(blocks=256, specs=specs)
            probe.add("a", prompt)
            needed = read(probe).head.blocks_needed
            for spare, admitted in ((0, True), (-1, False)):
                world = World(blocks=256, specs=specs)
                world.pool.get_new_blocks(255 - needed - spare)
                world.add("a", prompt)
                assert bool(world.step().num_scheduled_tokens) is admitted, (prompt, needed, spare)


def test_a_hit_on_a_block_that_others_hold_needs_no_free_block() -> None:
    world = World(blocks=64)
    world.add("holds", prompt := [8 + i % 400 for i in range(10 * BLOCK)], max_tokens=50)
    world.step()
    world.add("shares", [*prompt, 9, 9, 9])
    assert read(world).head.blocks_needed == 1


def test_a_head_that_can_never_fit_needs_more_than_there_is() -> None:
    world = World(blocks=16)
    world.add("huge", 2000)
    seen = read(world)
    assert seen.head.blocks_needed == 125 > seen.blocks_total


def test_requests_that_wait_for_something_else_are_counted_apart_and_are_no_head() -> None:
    world = World(blocks=64, max_num_seqs=1)
    world.add("runs", 20, max_tokens=50)
    world.step()
    blocked = world.add("blocked", 20)
    blocked.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    world.add("ready", 20)
    seen = read(world)
    assert (seen.waiting, seen.waiting_other) == (2, 1)
    assert seen.head.request_id == "ready"


def test_pause_and_sleep_are_shown() -> None:
    world = World(blocks=64)
    assert read(world).paused == ""
    world.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert read(world).paused == "new"
    world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert read(world).paused == "all"
    asleep = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=True))
    assert evidence.read_evidence(asleep, guards.install(world.scheduler), 1, 0).sleeping


def test_blocks_that_nobody_holds_are_orphans() -> None:
    world = World(blocks=64)
    world.add("a", 5 * BLOCK, max_tokens=50)
    world.step()
    world.pool.get_new_blocks(7)
    assert read(world).blocks_orphaned == 7
    assert evidence.holders(world.scheduler) == protocol.Holders(
        held_blocks=5 + 7, running_requests=1, waiting_requests=0, remote_loads=0, transfer_blocks=7, paused=False
    )


def test_blocks_two_requests_share_are_not_taken_for_fewer_orphans() -> None:
    world = World(blocks=64)
    prompt = [8 + i % 400 for i in range(5 * BLOCK)]
    world.add("a", prompt, max_tokens=50)
    world.step()
    world.add("b", [*prompt, 9], max_tokens=50)
    world.step()
    world.pool.get_new_blocks(3)
    assert read(world).blocks_orphaned == 3


def test_too_many_held_blocks_to_count_are_said_to_be_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(blocks=64)
    world.add("a", 20 * BLOCK)
    world.step()
    assert read(world).blocks_orphaned == 0
    with monkeypatch.context() as patch:
        patch.setattr(waiting, "MAX_HELD", 10)
        assert read(world).blocks_orphaned == -1
    monkeypatch.setattr(waiting, "COUNT_NS", -1)
    assert read(world).blocks_orphaned == 0
    monkeypatch.setattr(pools, "UNTIMED_BLOCKS", 10)
    assert read(world).blocks_orphaned == -1
    assert evidence.holders(world.scheduler).transfer_blocks == 0
    world.pool.get_new_blocks(5)
    assert evidence.holders(world.scheduler).transfer_blocks == 5


def test_a_long_queue_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(blocks=64, max_num_seqs=1)
    for index in range(20):
        world.add(f"r{index}", 20)
    monkeypatch.setattr(waiting, "MAX_WAITING", 8)
    seen = read(world)
    assert seen.truncated
    assert seen.waiting == 20
    assert seen.head.request_id == "r0"


def test_ages_come_from_the_monotonic_clock_even_where_the_engine_records_no_events() -> None:
    world = World(blocks=64)
    world.scheduler.log_stats = False
    world.add("a", 20, arrival_time=time.time() - 86_400)
    first = read(world)
    second = read(world)
    assert first.oldest_waiting_ns == 0
    assert 0 < second.oldest_waiting_ns < 60e9
    assert second.oldest_waiting_ns == second.head.waiting_ns


def test_reading_leaves_no_trace_where_vllm_would_write_one_down() -> None:
    world = World(blocks=64, specs=[full_attention(), sliding_window(2 * BLOCK)])
    request = world.add("a", 30 * BLOCK)
    need.blocks_needed(world.scheduler, request, need.next_chunk_tokens(world.scheduler, request))
    assert not any("a" in group.req_to_blocks or "a" in group.num_cached_block for group in world.groups)
    assert pools.held_blocks([world.pool]) == 0


def test_a_preempted_request_whose_output_is_still_in_flight_is_no_head_yet() -> None:
    world = World(blocks=64, asynchronous=True)
    request = world.add("a", 20, max_tokens=50)
    world.step()
    world.schedule()
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)
    assert read(world).head is None
    world.process()
    assert read(world).head.request_id == "a"
    assert read(world).head.status == "PREEMPTED"


def test_a_request_waits_since_it_was_preempted_last() -> None:
    world = World(blocks=64, max_num_batched_tokens=2 * BLOCK)
    request = world.add("a", 10 * BLOCK)
    world.step()
    world.scheduler.running.remove(request)
    preempted = time.monotonic()
    world.scheduler._preempt_request(request, preempted)
    queued = next(event for event in request.events if event.type.name == "QUEUED")
    seen = read(world)
    assert seen.head.waiting_ns == seen.oldest_waiting_ns == seen.monotonic_ns - int(preempted * 1e9)
    assert queued.timestamp < preempted


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_chunk_of_the_head_is_the_one_that_vllm_schedules(adaptive: bool) -> None:
    """Also where a long prompt's share of a step grows with the budget."""
    world = World(blocks=256, long_prefill_token_threshold=2 * BLOCK)
    if adaptive:
        if not hasattr(world.scheduler, "adaptive_long_prefill_threshold"):
            return  # before 0.31 there is no such share
        world.scheduler.adaptive_long_prefill_threshold = True
    world.add("long", 60 * BLOCK)
    world.add("short", BLOCK)
    chunk = read(world).head.next_chunk_tokens
    assert chunk == (8 * BLOCK if adaptive else 2 * BLOCK)
    assert world.step().num_scheduled_tokens["long"] == chunk


def test_a_priority_queue_is_looked_at_in_its_own_order_and_from_its_head_where_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(blocks=64, max_num_seqs=1, scheduling_policy="priority")
    for index in range(60):
        world.add(f"r{index}", 20, priority=index * 7 % 5, arrival_time=float(index * 11 % 13))
    in_order = [request.request_id for request in world.scheduler.waiting]
    assert [request.request_id for request in waiting._in_order(world.scheduler)] == in_order
    assert read(world).head.request_id == in_order[0]
    monkeypatch.setattr(waiting, "MAX_WAITING", 8)
    assert read(world).head.request_id == in_order[0]
    assert read(world).truncated
