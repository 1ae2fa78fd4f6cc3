"""Thousands of random lives of vLLM's real BlockPool, with operations cut into slices between them.

Whatever the engine does between two slices, no block is lost, doubled, or handed out while it is held; and at the end
the order is what was promised.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.engine import pools
from tests.engine.scheduler_world import assert_queue_sound, queue_ids

pytestmark = pytest.mark.engine

BLOCKS = 48
SLICE = 7

ACTIONS = (
    "allocate",
    "free",
    "free_part",
    "touch",
    "cache",
    "share",
    "several",
    "evict",
    "unpin",
    "reset",
    "drop",
    "give_back",
)


def lists_of(actions: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, int]]]:
    return st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 1 << 16)), max_size=12)


steps = lists_of(ACTIONS)
"""Each takes blocks from the free queue or gives some back, not both: what is in it all the time can be told."""
pasts = lists_of((*ACTIONS, "serve"))


class Life:
    """One pool, and who holds what."""

    def __init__(self) -> None:
        self.pool: Any = BlockPool(BLOCKS, True, 16, enable_kv_cache_events=True)
        self.held: list[list[Any]] = []
        self.keys = 0
        self.attic: pools.Attic = []
        self.told: list[int] = []

    def do(self, action: str, number: int) -> None:
        getattr(self, action)(number)
        assert_queue_sound(self.pool)

    def allocate(self, number: int) -> None:
        free = self.pool.get_num_free_blocks()
        if free:
            self.held.append(self.pool.get_new_blocks(1 + number % min(free, 12)))

    def serve(self, number: int) -> None:
        """A request's whole life: what it leaves behind is cached and free, its last block first."""
        free = self.pool.get_num_free_blocks()
        if free:
            table = self.pool.get_new_blocks(1 + number % min(free, 4))
            for block in table:
                self.keys += 1
                self._hash(block, self.keys)
            self.pool.free_blocks(reversed(table))

    def free(self, number: int) -> None:
        if self.held:
            self.pool.free_blocks(reversed(self.held.pop(number % len(self.held))))

    def free_part(self, number: int) -> None:
        if self.held:
            table = self.held[number % len(self.held)]
            self.pool.free_blocks([table.pop()])
            if not table:
                self.held.remove(table)

    def touch(self, number: int) -> None:
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if cached:
            block = cached[number % len(cached)]
            self.pool.touch([block])
            self.held.append([block])

    def cache(self, number: int) -> None:
        for table in self.held:
            for block in table:
                if block.block_hash is None:
                    self.keys += 1
                    self._hash(block, self.keys)
                    return

    def share(self, number: int) -> None:
        """Another block under a hash that exists, as two requests that computed the same prefix make it."""
        bare = [block for table in self.held for block in table if block.block_hash is None]
        if bare and self.keys:
            self._hash(bare[number % len(bare)], 1 + number % self.keys)

    def several(self, number: int) -> None:
        """Another hash for a block that has one, as a partly filled block gets it."""
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if cached and hasattr(self.pool, "_insert_block_hash"):
            self.keys += 1
            self._hash(cached[number % len(cached)], self.keys)

    def _hash(self, block: Any, key: int) -> None:
        name = key.to_bytes(36, "big")
        if hasattr(self.pool, "_insert_block_hash"):
            self.pool._insert_block_hash(name, block, 16)
        elif block.block_hash is None:
            block.set_block_hash(name, 16)
            self.pool.cached_block_hash_to_block.insert(name, block)

    def evict(self, number: int) -> None:
        self.pool.evict_blocks({number % BLOCKS})

    def unpin(self, number: int) -> None:
        if self.held and hasattr(self.pool, "unpin_blocks"):
            self.pool.unpin_blocks(
                self.held.pop(number % len(self.held)), lambda block: self.told.append(block.block_id)
            )

    def reset(self, number: int) -> None:
        self.pool.reset_prefix_cache()

    def drop(self, number: int) -> None:
        carried = sum(block.block_hash is not None for block in self.pool.blocks)
        assert pools.drop_hashes(self.pool, self.attic if number % 2 else None) == carried
        assert not any(block.block_hash for block in self.pool.blocks)

    def give_back(self, number: int) -> None:
        """Go a few slices on with taking down old maps."""
        for _ in itertools.islice(pools.give_back(self.attic), number % 4):
            pass

    def free_all(self) -> None:
        """As at the end of all requests."""
        while self.held:
            self.free(0)


def lived(past: list[tuple[str, int]]) -> Life:
    life = Life()
    for action, number in past:
        life.do(action, number)
    return life


lives = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def small_slices() -> Iterator[None]:
    log = logging.getLogger("vllm.v1.core.block_pool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "SLICE_BLOCKS", SLICE)
        patch.setattr(log, "disabled", True)
        yield


@lives
@given(past=pasts, between=st.lists(steps, max_size=8), scope=st.sampled_from(["uncached", "all_free"]))
def test_a_reorder_interrupted_by_anything_loses_and_doubles_nothing(
    past: list[tuple[str, int]], between: list[list[tuple[str, int]]], scope: Any
) -> None:
    life = lived(past)
    pool = life.pool
    # Blocks that are free all the time. Those being watched at the start may lose their watcher half way.
    steady = set(queue_ids(pool)) - set(getattr(pool, "_reuse_watchers", {}))
    bare = {block_id for block_id in steady if pool.blocks[block_id].block_hash is None}
    lru = [block_id for block_id in queue_ids(pool) if block_id in steady - bare]
    pause = iter(between)
    for _ in pools.reorder([pool], scope):
        assert_queue_sound(pool)
        for action, number in next(pause, []):
            life.do(action, number)
            steady &= set(queue_ids(pool))
            bare &= steady
            lru = [block_id for block_id in lru if block_id in steady and pool.blocks[block_id].block_hash is not None]
    assert_queue_sound(pool)
    order = queue_ids(pool)
    moved = steady if scope == "all_free" else bare
    assert [block_id for block_id in order if block_id in moved] == sorted(moved)
    if scope == "uncached":
        assert [block_id for block_id in order if block_id in lru] == lru


@lives
@given(past=pasts, future=steps, through_the_map=st.booleans(), attic=st.booleans())
def test_a_drop_leaves_what_vllms_own_reset_leaves(
    past: list[tuple[str, int]], future: list[tuple[str, int]], through_the_map: bool, attic: bool
) -> None:
    """Both ways to find the hashes, on two pools with the same past: nothing that can be seen differs, ever."""
    stock, ours = lived(past), lived(past)
    for life in (stock, ours):
        life.free_all()
        life.pool.take_events()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "MAP_WALK_RATIO", 0 if through_the_map else BLOCKS + 1)
        patch.setattr(pools, "_VERIFY_BLOCKS", 1)
        assert stock.pool.reset_prefix_cache()
        pools.drop_hashes(ours.pool, ours.attic if attic else None)
    assert observed(ours) == observed(stock)
    # No resets in what follows: only ours can be told to forget while blocks are held.
    for action, number in future:
        if action not in ("drop", "give_back"):
            stock.do(action, number)
            ours.do(action, number)
    assert observed(ours) == observed(stock)


def observed(life: Life) -> Any:
    """All that vLLM or anybody else can see of a pool."""
    pool = life.pool
    entries = {
        key: [block.block_id for block in (found.values() if isinstance(found, dict) else [found])]
        for key, found in pool.cached_block_hash_to_block._cache.items()
    }
    blocks = [(b.ref_cnt, b.block_hash, getattr(b, "block_hash_num_tokens", 0), b.is_null) for b in pool.blocks]
    extra = {block_id: set(hashes) for block_id, hashes in getattr(pool, "cached_block_hashes_by_block", {}).items()}
    events = [type(event).__name__ for event in pool.kv_event_queue]
    watched = sorted(getattr(pool, "_reuse_watchers", ()))
    return queue_ids(pool), blocks, entries, extra, events, watched, life.told


@lives
@given(past=pasts)
def test_an_undisturbed_reorder_puts_all_free_blocks_in_order_with_watched_ones_last(
    past: list[tuple[str, int]],
) -> None:
    pool = lived(past).pool
    before = queue_ids(pool)
    watched = [block_id for block_id in before if block_id in getattr(pool, "_reuse_watchers", {})]
    moved = finish(pools.reorder([pool], "all_free"))
    assert queue_ids(pool) == sorted(set(before) - set(watched)) + watched
    assert moved == len(before) - len(watched)


@lives
@given(past=pasts)
def test_an_undisturbed_reorder_of_uncached_blocks_keeps_the_lru_order_behind_them(past: list[tuple[str, int]]) -> None:
    pool = lived(past).pool
    before = queue_ids(pool)
    watched = set(getattr(pool, "_reuse_watchers", {}))
    moved = {i for i in before if pool.blocks[i].block_hash is None and i not in watched}
    finish(pools.reorder([pool], "uncached"))
    assert queue_ids(pool) == sorted(moved) + [i for i in before if i not in moved]


@lives
@given(past=pasts, between=st.lists(steps, max_size=8))
def test_contiguity_of_a_changing_queue_ends_and_says_that_it_changed(
    past: list[tuple[str, int]], between: list[list[tuple[str, int]]]
) -> None:
    life = lived(past)
    exact = truth(life.pool)
    changed = False
    pause = iter(between)
    work = pools.contiguity([life.pool])
    while True:
        try:
            next(work)
        except StopIteration as stop:
            found = stop.value
            break
        before = queue_ids(life.pool)
        for action, number in next(pause, []):
            life.do(action, number)
        changed |= queue_ids(life.pool) != before
    assert found.runs == found.free_blocks - found.adjacent_pairs
    assert found.free_blocks <= BLOCKS
    if not changed:
        assert (found.free_blocks, found.adjacent_pairs, found.runs) == exact
        assert not found.sampled
    head = pools.head_contiguity([life.pool], BLOCKS)
    assert (head.free_blocks, head.adjacent_pairs, head.runs) == truth(life.pool)
    assert not head.sampled


def truth(pool: Any) -> tuple[int, int, int]:
    ids = queue_ids(pool)
    adjacent = sum(abs(a - b) == 1 for a, b in itertools.pairwise(ids))
    return len(ids), adjacent, len(ids) - adjacent


def finish(work: Any) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def test_a_clean_descending_run_counts_as_contiguous_and_a_bound_is_marked() -> None:
    pool = BlockPool(BLOCKS, True, 16)
    pool.free_blocks(reversed(pool.get_new_blocks(BLOCKS - 1)))
    assert queue_ids(pool) == list(range(BLOCKS - 1, 0, -1))
    whole = finish(pools.contiguity([pool]))
    assert (whole.free_blocks, whole.adjacent_pairs, whole.runs, whole.sampled) == (47, 46, 1, False)
    part = pools.head_contiguity([pool], 10)
    assert (part.free_blocks, part.runs, part.sampled) == (10, 1, True)


def test_two_pools_are_measured_together_and_never_joined() -> None:
    both = [BlockPool(5, True, 16), BlockPool(5, True, 16)]
    found = finish(pools.contiguity(both))
    assert (found.free_blocks, found.adjacent_pairs, found.runs) == (8, 6, 2)
