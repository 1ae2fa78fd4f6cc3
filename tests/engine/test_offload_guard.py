"""Offload stores in flight across a keep reset, on vLLM's own scheduler and offload connector."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.engine import guards, pools
from engine_bridge.engine.connector import connector_tier
from tests.engine.scheduler_world import BLOCK, OFFLOAD, World

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(6 * BLOCK)]


def storing_world() -> tuple[World, int]:
    """A request runs, and its prompt's blocks are being copied to the CPU tier. Returns the store's event too."""
    world = World(blocks=64, connector=OFFLOAD)
    world.add("a", PROMPT, max_tokens=30)
    for _ in range(4):
        output = world.schedule()
        world.process()
        if output.kv_connector_metadata.store_event >= 0:
            return world, output.kv_connector_metadata.store_event
    raise AssertionError("no store was started")


def offload(world: World) -> Any:
    return world.scheduler.connector.scheduler_manager


def used_on_cpu(world: World) -> int:
    pool = offload(world).cpu_block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def test_without_the_guard_a_store_that_completes_after_a_keep_reset_kills_the_engine_step() -> None:
    world, event = storing_world()
    pools.drop_prefix_cache(world.scheduler)
    world.schedule()
    if store_reads_the_hash_at_its_end(world):
        with pytest.raises(AssertionError):
            world.process(stored=[event])
    else:
        world.process(stored=[event])


def store_reads_the_hash_at_its_end(world: World) -> bool:
    """0.29 notes hashes on the CPU blocks when a store starts; there, nothing crashes."""
    return not any(block.block_hash for block in offload(world).cpu_block_pool.blocks)


def test_with_the_guard_it_gives_back_both_references_and_caches_nothing() -> None:
    world, event = storing_world()
    crashes = store_reads_the_hash_at_its_end(world)
    installed = guards.install(world.scheduler)
    assert installed.problems == {}
    assert used_on_cpu(world) > 0
    pools.drop_prefix_cache(world.scheduler)
    world.schedule()
    world.process(stored=[event])
    assert used_on_cpu(world) == 0
    if crashes:
        assert len(offload(world).cpu_block_pool.cached_block_hash_to_block) == 0
    finish(world)
    world.assert_empty()


def test_a_store_of_which_some_blocks_kept_their_hash_caches_these() -> None:
    world, event = storing_world()
    guards.install(world.scheduler)
    transfer = offload(world)._store_event_to_blocks[event]
    lost = transfer.gpu_block_ids[:2]
    world.pool.evict_blocks(set(lost))
    world.schedule()
    world.process(stored=[event])
    expected = len(transfer.gpu_block_ids) - (2 if store_reads_the_hash_at_its_end_after(world) else 0)
    assert len(offload(world).cpu_block_pool.cached_block_hash_to_block) == expected
    assert used_on_cpu(world) == 0
    finish(world)
    world.assert_empty()


def store_reads_the_hash_at_its_end_after(world: World) -> bool:
    return hasattr(offload(world), "_pending_finished_stores")


def test_stores_without_a_reset_are_cached_as_ever() -> None:
    world, event = storing_world()
    guards.install(world.scheduler)
    world.schedule()
    world.process(stored=[event])
    assert len(offload(world).cpu_block_pool.cached_block_hash_to_block) > 0
    finish(world)


def test_nothing_that_a_quarantined_request_computes_reaches_the_cpu_tier() -> None:
    world, event = storing_world()
    installed = guards.install(world.scheduler)
    assert installed.quarantine_running() == 1
    pools.drop_prefix_cache(world.scheduler)
    assert connector_tier(world.scheduler).state == "pending"
    world.schedule()
    world.process(stored=[event])
    assert connector_tier(world.scheduler).state == "done"
    stores = finish(world)
    assert stores == 0
    assert len(offload(world).cpu_block_pool.cached_block_hash_to_block) == 0
    world.assert_empty()


def finish(world: World) -> int:
    """Run to the end, completing stores as they come; how many there were."""
    stores = 0
    for _ in range(100):
        output = world.schedule()
        event = output.kv_connector_metadata.store_event
        stores += event >= 0
        world.process(world.loading(), [event] if event >= 0 else [])
        if not world.scheduler.requests and event < 0:
            return stores
    raise AssertionError("never finished")
