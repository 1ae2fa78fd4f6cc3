"""Forgetting hashes: all that vLLM's own reset does, while blocks are held."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

from engine_bridge.engine import pools
from tests.engine.scheduler_world import World, assert_queue_sound, queue_ids

pytestmark = pytest.mark.engine


def pool_with(cached: int, blocks: int = 400, *, seed: int = 0, **options: Any) -> BlockPool:
    """A pool in which `cached` blocks carry a hash, some of them under the same hash, some with several."""
    pool = BlockPool(blocks, True, 16, **options)
    chosen = random.Random(seed).sample(range(1, blocks), cached)
    for position, block_id in enumerate(chosen):
        key = (position // 2 if position % 5 == 0 else position).to_bytes(36, "big")
        if hasattr(pool, "_insert_block_hash"):
            pool._insert_block_hash(key, pool.blocks[block_id], 16)
            if position % 7 == 0:
                pool._insert_block_hash((10_000 + position).to_bytes(36, "big"), pool.blocks[block_id], None)
        else:
            pool.blocks[block_id].set_block_hash(key, 16)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[block_id])
    return pool


@pytest.mark.parametrize("cached", [0, 1, 3, 20, 65, 66, 67, 200, 399])
def test_no_block_keeps_a_hash_and_each_is_counted_once(cached: int) -> None:
    pool = pool_with(cached)
    carried = sum(block.block_hash is not None for block in pool.blocks)
    assert pools.drop_hashes(pool) == carried == cached
    assert all(block.block_hash is None and block.block_hash_num_tokens is None for block in pool.blocks)
    assert len(pool.cached_block_hash_to_block) == 0
    assert not pool.cached_block_hashes_by_block
    assert pools.drop_hashes(pool) == 0


@pytest.mark.parametrize("cached", [3, 300])
def test_held_blocks_stay_held_and_the_queue_keeps_its_order(cached: int) -> None:
    pool = pool_with(cached)
    held = pool.get_new_blocks(50)
    pool.touch([pool.blocks[100], pool.blocks[200]])
    before = queue_ids(pool), [block.ref_cnt for block in pool.blocks]
    assert not pool.reset_prefix_cache()
    pools.drop_hashes(pool)
    assert (queue_ids(pool), [block.ref_cnt for block in pool.blocks]) == before
    assert_queue_sound(pool)
    pool.free_blocks([*held, pool.blocks[100], pool.blocks[200]])
    assert pool.reset_prefix_cache()


def test_watchers_of_reuse_are_told_and_metrics_start_over() -> None:
    told: list[int] = []
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = pool_with(10, metrics_collector=collector)
    blocks = pool.get_new_blocks(2)
    assert collector.block_metrics
    if hasattr(pool, "unpin_blocks"):
        pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    pools.drop_hashes(pool)
    assert not collector.block_metrics
    if hasattr(pool, "unpin_blocks"):
        assert sorted(told) == sorted(block.block_id for block in blocks)
        assert not pool._reuse_watchers


def test_the_event_comes_after_what_was_queued_before() -> None:
    pool = pool_with(5, enable_kv_cache_events=True)
    pool.get_new_blocks(300)
    before = len(pool.kv_event_queue)
    pools.drop_hashes(pool)
    names = [type(event).__name__ for event in pool.take_events()]
    assert names[before:] == ["AllBlocksCleared"]


def test_a_hash_that_is_in_no_map_is_found_all_the_same() -> None:
    """Not a state vLLM makes. If some later version did, the sample would notice and the full walk follow."""
    pool = pool_with(3)
    for block in pool.blocks[1:]:
        if block.block_hash is None:
            block.set_block_hash(b"stray", 16)
    pools.drop_hashes(pool)
    assert all(block.block_hash is None for block in pool.blocks)


@pytest.mark.parametrize("cached", [3, 300])
def test_an_old_map_is_taken_down_in_slices_and_nothing_keeps_its_keys(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "SLICE_BLOCKS", 2)
    pool = pool_with(cached)
    key = next(iter(pool.cached_block_hash_to_block._cache))
    attic: pools.Attic = []
    pools.drop_hashes(pool, attic)
    entries = len(attic[0])
    before = sys.getrefcount(key)
    assert len(list(pools.give_back(attic))) == -(-entries // 2)
    assert not attic
    assert sys.getrefcount(key) == before - 1


def test_maps_that_come_to_the_attic_while_it_is_cleared_are_taken_down_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SLICE_BLOCKS", 8)
    attic: pools.Attic = []
    pools.drop_hashes(pool_with(20), attic)
    work = pools.give_back(attic)
    next(work)
    pools.drop_hashes(pool_with(10), attic)
    assert len(attic) == 2
    for _ in work:
        pass
    assert not attic


def test_stats_are_told_of_the_reset() -> None:
    world = World(blocks=64)
    world.add("a", 100)
    world.step()
    stats = world.scheduler.kv_cache_manager.prefix_cache_stats
    stats.reset = False
    assert pools.drop_prefix_cache(world.scheduler) == 6
    assert stats.reset
    world.run()
    world.assert_empty()


def test_the_written_out_reset_is_what_this_vllm_does() -> None:
    assert pools._reset_each is pools._reset_in_place


def test_a_reset_that_does_more_is_called_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    block_class = pools.KVCacheBlock
    original = block_class.reset_hash

    def reset_more(block: Any) -> None:
        original(block)
        block.is_null = False

    monkeypatch.setattr(block_class, "reset_hash", reset_more)
    assert not pools._resets_only_what_is_written_out()
    monkeypatch.setattr(pools, "_reset_each", pools._reset_by_call)
    for cached in (3, 300):
        pool = pool_with(cached)
        assert pools.drop_hashes(pool) == cached
        assert not any(block.block_hash for block in pool.blocks)
