"""Admissions deadlocked by finished loads: seen, told apart from what is none, and relieved."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from engine_bridge.engine import evidence, guards, pools, relief
from tests.engine.scheduler_world import World, full_attention, sliding_window

pytestmark = pytest.mark.engine


def deadlocked_world(blocks: int = 160, in_transfer: int = 0) -> World:
    """Two requests of 1280 tokens, each with 1024 of them loaded; both were admitted, and no chunk fits any more."""
    world = World(blocks=blocks + in_transfer, specs=[full_attention(), sliding_window(32)], connector="Remote")
    world.transfer = world.pool.get_new_blocks(in_transfer)
    for name in ("first", "second"):
        world.remote.hits[name] = 1024
        world.add(name, 1280, arrival_time=time.time() + (name == "second"))
    world.step()
    world.step(world.loading())
    return world


def read(world: World) -> object:
    engine = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=False))
    return evidence.read_evidence(engine, guards.install(world.scheduler), call=1, contiguity_blocks=0)


def test_two_finished_loads_stall_a_sliding_window_model_for_ever_without_relief() -> None:
    world = deadlocked_world()
    assert sum(world.step().total_num_scheduled_tokens for _ in range(300)) == 0
    assert not world.scheduler.running


def test_evidence_names_the_deadlock_and_what_the_head_needs_uncapped() -> None:
    world = deadlocked_world()
    seen = read(world)
    assert seen.verdict == "HELD_BLOCKS_DEADLOCK"
    assert relief.deadlock(world.scheduler) == ""
    assert seen.running == 0
    assert seen.waiting == seen.waiting_holding_blocks == 2
    assert seen.waiting_remote_kv == 0
    assert seen.head.request_id == "first"
    assert seen.head.blocks_needed == 32 > seen.blocks_free == 27
    assert seen.head.next_chunk_tokens == 256
    assert [holder.load_finished for holder in seen.holders] == [True, True]
    assert seen.blocks_orphaned == 0


def test_a_load_that_finished_a_moment_ago_is_no_longer_counted_as_a_load() -> None:
    world = World(blocks=160, specs=[full_attention(), sliding_window(32)], connector="Remote")
    world.remote.hits["first"] = 1024
    world.add("first", 1280)
    world.step()
    before = read(world)
    assert (before.waiting_remote_kv, before.load_finished) == (1, 0)
    world.step(world.loading())
    after = read(world)
    assert world.scheduler.requests["first"].status.name == "WAITING_FOR_REMOTE_KVS"
    assert (after.waiting_remote_kv, after.load_finished) == (0, 1)


def test_reading_evidence_changes_nothing() -> None:
    world = deadlocked_world()
    before = snapshot(world)
    for _ in range(3):
        read(world)
    assert snapshot(world) == before


def snapshot(world: World) -> object:
    groups = [
        {name: [block.block_id for block in table] for name, table in group.req_to_blocks.items()}
        for group in world.groups
    ]
    cached = [dict(group.num_cached_block) for group in world.groups]
    requests = [(r.request_id, r.status, r.num_computed_tokens) for r in world.scheduler.requests.values()]
    free = [block.block_id for block in world.pool.free_block_queue.get_all_free_blocks()]
    return groups, cached, requests, free, [block.ref_cnt for block in world.pool.blocks]


def test_relief_gives_back_the_youngest_holder_and_every_request_finishes() -> None:
    world = deadlocked_world()
    held = pools.held_blocks([world.pool])
    request_id, freed = relief.relieve_one(world.scheduler)
    assert request_id == "second"
    assert 0 < freed <= held
    assert relief.deadlock(world.scheduler) != ""
    world.assert_sound()
    world.run()
    assert {name: len(tokens) for name, tokens in world.outputs.items()} == {"first": 4, "second": 4}
    world.assert_empty()


def test_a_relieved_request_that_never_ran_is_sent_to_the_workers_as_a_new_one() -> None:
    world = deadlocked_world()
    relief.relieve_one(world.scheduler)
    new, resumed = [], []
    for _ in range(100):
        output = world.step(world.loading())
        new += [data.req_id for data in output.scheduled_new_reqs]
        resumed += output.scheduled_cached_reqs.resumed_req_ids
        if not world.scheduler.requests:
            break
    assert sorted(new) == ["first", "second"]
    assert resumed == []


def test_a_connector_that_hits_again_on_reload_is_loaded_again_and_everything_finishes() -> None:
    world = deadlocked_world()
    relief.relieve_one(world.scheduler)
    world.run()
    assert world.remote.loads.count("second") == 2
    world.assert_empty()


def test_deadlocks_that_come_back_after_a_reload_are_relieved_one_by_one() -> None:
    world = World(blocks=160, specs=[full_attention(), sliding_window(32)], connector="Remote")
    for index in range(6):
        world.remote.hits[f"r{index}"] = 1024
        world.add(f"r{index}", 1280, arrival_time=time.time() + index)
    reliefs = 0
    for _ in range(400):
        if not world.scheduler.requests:
            break
        world.step(world.loading())
        if relief.deadlock(world.scheduler) == "":
            relief.relieve_one(world.scheduler)
            reliefs += 1
    assert not world.scheduler.requests
    assert 0 < reliefs <= 12
    world.assert_empty()


def test_no_deadlock_where_blocks_suffice() -> None:
    world = deadlocked_world(blocks=170)
    assert read(world).verdict == ""
    world.run()
    world.assert_empty()


def test_what_is_no_deadlock_is_named() -> None:
    idle = World(blocks=64)
    assert "no request is waiting" in relief.deadlock(idle.scheduler)

    busy = World(blocks=64)
    busy.add("runs", 100)
    busy.step()
    assert "1 requests are running" in relief.deadlock(busy.scheduler)

    loading = World(blocks=64, connector="Remote")
    loading.remote.hits["loads"] = 64
    loading.add("loads", 100)
    loading.step()
    assert "1 loads from a remote tier are still in flight" in relief.deadlock(loading.scheduler)

    huge = World(blocks=16, max_model_len=4096)
    huge.add("huge", 2000)
    huge.step()
    assert "more than the 15 there are" in relief.deadlock(huge.scheduler)

    with pytest.raises(LookupError):
        relief.relieve_one(huge.scheduler)


def test_blocks_that_a_transfer_still_holds_are_no_deadlock() -> None:
    world = deadlocked_world(in_transfer=10)
    assert read(world).blocks_orphaned == 10
    assert "27 are free and 10 are held by transfers that may still end" in relief.deadlock(world.scheduler)
    world.pool.free_blocks(world.transfer)
    assert "37 are free" in relief.deadlock(world.scheduler)


def test_relief_works_with_a_priority_queue() -> None:
    world = World(
        blocks=160, specs=[full_attention(), sliding_window(32)], connector="Remote", scheduling_policy="priority"
    )
    for name, priority in (("urgent", 0), ("patient", 5)):
        world.remote.hits[name] = 1024
        world.add(name, 1280, priority=priority)
    world.step()
    world.step(world.loading())
    assert relief.deadlock(world.scheduler) == ""
    assert relief.relieve_one(world.scheduler)[0] == "patient"
    world.run()
    world.assert_empty()
