"""Lazy offload saves what is next to be evicted, a piece of the free queue a step: also after a reorder."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.engine import core, evidence, pools
from tests.engine.scheduler_world import BLOCK, LAZY_OFFLOAD, World, queue_ids

pytestmark = pytest.mark.engine

BLOCKS = 12
SAVED = (12, 11, 10)


def half_walked(connector: str | list[str]) -> World:
    """Every block is free and cached, the highest id in front. The walk has passed the first three, which the CPU has
    already, and has all others before it.
    """
    world = World(blocks=BLOCKS + 1, connector=connector)
    pool, manager = world.pool, manager_of(world)
    blocks = pool.get_new_blocks(BLOCKS)
    for block in blocks:
        pool._insert_block_hash(hash_of(block.block_id), block, BLOCK)
    pool.free_blocks(reversed(blocks))
    saved = manager.cpu_block_pool.get_new_blocks(len(SAVED))
    for block_id, block in zip(SAVED, saved, strict=True):
        manager.cpu_block_pool._insert_block_hash(hash_of(block_id), block, BLOCK)
    manager.cpu_block_pool.free_blocks(saved)
    manager._target_free = len(SAVED)
    assert walk(world) == []
    assert queue_ids(pool) == list(range(BLOCKS, 0, -1))
    return world


def hash_of(block_id: int) -> Any:
    return block_id.to_bytes(36, "big")


def manager_of(world: World) -> Any:
    connector = world.scheduler.connector
    return getattr(connector, "_connectors", [connector])[0].scheduler_manager


def walk(world: World) -> list[int]:
    """One step of the walk: the blocks that it now has saved."""
    gpu_ids: list[int] = manager_of(world)._prepare_lazy_store_specs()[0]
    return gpu_ids


def port_of(world: World) -> core.VllmEngine:
    """As much of it as a reorder needs."""
    port = core.VllmEngine.__new__(core.VllmEngine)
    port._scheduler, port._pools = world.scheduler, pools.distinct_pools(world.scheduler)
    port._remembered = evidence.Remembered()
    return port


def test_a_walk_that_goes_on_where_it_was_before_the_queue_was_sorted_saves_nothing_more() -> None:
    """Why it is started over. If this fails, vLLM's walk has learned to look back."""
    world = half_walked(LAZY_OFFLOAD)
    for _ in pools.reorder([world.pool], "all_free"):
        pass
    assert [walk(world) for _ in range(4)] == [[]] * 4


@pytest.mark.parametrize("connector", [LAZY_OFFLOAD, [LAZY_OFFLOAD, "Remote"]], ids=["alone", "among others"])
def test_blocks_that_a_reorder_puts_behind_the_walk_are_saved_before_they_are_evicted(
    connector: str | list[str],
) -> None:
    world = half_walked(connector)
    for _ in port_of(world).reorder("all_free"):
        pass
    assert queue_ids(world.pool) == list(range(1, BLOCKS + 1))
    assert walk(world) == [1, 2, 3]


def test_a_reorder_that_is_left_half_done_leaves_nothing_behind_the_walk_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "SLICE_BLOCKS", 4)
    world = half_walked(LAZY_OFFLOAD)
    work = port_of(world).reorder("all_free")
    next(work)
    work.close()
    assert queue_ids(world.pool)[:5] == [9, 10, 11, 12, 8]
    assert walk(world) == [9]


def test_the_walk_goes_on_as_ever_where_nothing_was_reordered() -> None:
    assert walk(half_walked(LAZY_OFFLOAD)) == [9, 8, 7]
