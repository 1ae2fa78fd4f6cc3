"""Block pools: forgetting hashes, and measuring and restoring the order of free blocks.

vLLM's own reset refuses while any block is held, and nothing in vLLM restores the order of the free queue, which a
long session scrambles until neighbouring tokens lie far apart in memory. Everything here works on the scheduler's
bookkeeping alone: no KV memory is touched, and held blocks stay held.

Work over all blocks is cut into slices. Between two slices the engine may allocate, free, touch or reset, so no slice
relies on what an earlier one saw: a block is free when it is linked into the queue now, and `pool.blocks` is in id
order for as long as the pool lives.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from engine_bridge.port import Work
from engine_bridge.protocol import Contiguity

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

SLICE_BLOCKS = 256
"""Blocks looked at between two yields: about a tenth of a millisecond on a slow core with cold caches. The dispatcher
looks at its clock at each yield, so this is how far a stretch can overshoot."""

MAP_WALK_RATIO = 6
"""The lookup map is followed instead of walking all blocks while it holds fewer than 1/6 as many entries. Map order
is random in memory, so from about a quarter on the plain walk wins (tests/bench/bench_pauses.py)."""

HEAD_NS = 1_000_000
"""Processor time for looking at the head of the queue in one piece, nanoseconds: what a step boundary can afford."""

UNTIMED_BLOCKS = 2048
"""So few are looked at without a look at the clock: a garbage collection in between must not make an answer partial."""

_VERIFY_BLOCKS = 64

Attic = list[dict[object, object]]
"""Lookup maps that are out of use and still take up memory."""


def distinct_pools(scheduler: Scheduler) -> list[BlockPool]:
    """Every block pool once. Groups of one model usually share one; HiSparse models have a second in host memory."""
    manager = scheduler.kv_cache_manager
    pools = dict.fromkeys(single.block_pool for single in manager.coordinator.single_type_managers)
    return list(pools) or [manager.block_pool]


def usable_blocks(pools: Iterable[BlockPool]) -> int:
    """Blocks that requests can hold: all but each pool's null block."""
    return sum(pool.num_gpu_blocks - 1 for pool in pools)


def free_blocks(pools: Iterable[BlockPool]) -> int:
    """Blocks in the free queues."""
    return sum(pool.get_num_free_blocks() for pool in pools)


def held_blocks(pools: Iterable[BlockPool]) -> int:
    """Blocks that someone holds, without null blocks."""
    return sum(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks() for pool in pools)


def cached_blocks(pools: Iterable[BlockPool]) -> int:
    """Entries of the lookup maps, O(1): cached blocks, but for several blocks under one hash or several hashes of one
    block. `drop_hashes` returns the exact number.
    """
    return sum(len(pool.cached_block_hash_to_block) for pool in pools)


# --- forgetting -----------------------------------------------------------------------------------------------------


def drop_prefix_cache(scheduler: Scheduler, attic: Attic | None = None) -> int:
    """Forget every cached prefix, whatever is held: what `KVCacheManager.reset_prefix_cache` does when it does not
    refuse. Returns blocks that carried a hash.
    """
    dropped = sum(drop_hashes(pool, attic) for pool in distinct_pools(scheduler))
    stats = scheduler.kv_cache_manager.prefix_cache_stats
    if stats is not None:
        stats.reset = True
    return dropped


def drop_hashes(pool: BlockPool, attic: Attic | None = None) -> int:
    """The body of `BlockPool.reset_prefix_cache` without its refusal. Returns blocks that carried a hash.

    Reference counts, the free queue and KV memory stay as they are: a held block without a hash is a state vLLM makes
    itself (`BlockPool.evict_blocks`). The old lookup map goes to the `attic`, for `give_back`: taking down a map of a
    million entries costs about as much as all the rest. Without one it is taken down here and now, as vLLM does.
    """
    lookup = pool.cached_block_hash_to_block
    pool.cached_block_hash_to_block = type(lookup)()
    pool.cached_block_hashes_by_block.clear()
    watchers = getattr(pool, "_reuse_watchers", None)
    if watchers:
        pool._notify_reuse([pool.blocks[block_id] for block_id in list(watchers)])
    entries = getattr(lookup, "_cache", None)
    dropped = _reset_hashes(pool, entries)
    if attic is not None and isinstance(entries, dict) and entries:
        attic.append(entries)
    if pool.metrics_collector:
        pool.metrics_collector.reset()
    if pool.enable_kv_cache_events:
        pool.kv_event_queue.append(AllBlocksCleared())
    return dropped


def give_back(attic: Attic) -> Work[None]:
    """Take down the maps that resets left in the attic, in slices."""
    while attic:
        entries = attic[-1]
        while entries:
            for _ in range(min(SLICE_BLOCKS, len(entries))):
                entries.popitem()
            yield None
        attic.remove(entries)


def _reset_hashes(pool: BlockPool, entries: object) -> int:
    """Reset every hash, by way of the old lookup map where that is less work. Returns blocks that had one.

    Complete because vLLM gives a block its hash only together with an entry in the map, and takes both away together
    (`_insert_block_hash`, `_remove_cached_block_hashes`). That is an invariant of code that is not ours, so a sample
    of blocks is looked at afterwards, and one that still carries a hash brings back the full walk.
    """
    if not isinstance(entries, dict) or len(entries) * MAP_WALK_RATIO > pool.num_gpu_blocks:
        return _reset_each(pool.blocks)
    dropped = _reset_mapped(entries)
    stride = max(1, pool.num_gpu_blocks // _VERIFY_BLOCKS)
    for block in pool.blocks[::stride]:
        if block._block_hash is not None:
            return dropped + _reset_each(pool.blocks)
    return dropped


def _reset_mapped(entries: dict[object, KVCacheBlock | dict[int, KVCacheBlock]]) -> int:
    """Reset the blocks of a lookup map; one with several hashes comes several times."""
    if _reset_each is not _reset_in_place:
        several = [found.values() if isinstance(found, dict) else (found,) for found in entries.values()]
        return _reset_each(list(chain.from_iterable(several)))
    dropped = 0
    under_one_hash: list[KVCacheBlock] = []
    for found in entries.values():
        if isinstance(found, dict):
            under_one_hash += found.values()
        elif found._block_hash is not None:
            found._block_hash = None
            found._block_hash_num_tokens = None
            dropped += 1
    return dropped + _reset_in_place(under_one_hash)


def _reset_by_call(blocks: list[KVCacheBlock]) -> int:
    """`reset_hash()` on each block that has a hash. Returns how many had one."""
    without = 0
    for block in blocks:
        if block.block_hash is None:
            without += 1
        else:
            block.reset_hash()
    return len(blocks) - without


def _reset_in_place(blocks: list[KVCacheBlock]) -> int:
    """The same with `reset_hash` written out: its call is what makes vLLM's own walk slow. Counting the blocks
    without a hash costs least where there is most to do.
    """
    without = 0
    for block in blocks:
        if block._block_hash is None:
            without += 1
        else:
            block._block_hash = None
            block._block_hash_num_tokens = None
    return len(blocks) - without


def _resets_only_what_is_written_out() -> bool:
    """Whether `reset_hash` of this vLLM sets exactly the two slots that `_reset_in_place` sets, tried on a block."""
    block = KVCacheBlock(0)
    mark = object()
    slots = [name for name in KVCacheBlock.__slots__ if hasattr(block, name)]
    for name in slots:
        setattr(block, name, mark)
    block.reset_hash()
    return {name for name in slots if getattr(block, name) is not mark} == {"_block_hash", "_block_hash_num_tokens"}


_reset_each = _reset_in_place if _resets_only_what_is_written_out() else _reset_by_call


# --- order of the free queue ----------------------------------------------------------------------------------------


def reorder(pools: Iterable[BlockPool], scope: Literal["uncached", "all_free"]) -> Work[int]:
    """Relink free blocks in place so that they are handed out in id order. Returns blocks moved.

    From the highest id down, each free block moves to the front, so the queue is valid after every move, blocks that
    are still watched (`_reuse_watchers`: free, yet being read) drift to the back in their own order, and so do cached
    blocks under "uncached", which keeps their LRU order.

    Guaranteed at the end: the blocks that were free (and in scope) all the time are in id order relative to each
    other. A block the engine freed meanwhile lies where the engine put it if its id had already been passed.
    """
    moved = 0
    for pool in pools:
        for end in range(len(pool.blocks), 0, -SLICE_BLOCKS):
            moved += _to_front(pool, pool.blocks[max(0, end - SLICE_BLOCKS) : end], scope)
            yield None
    return moved


def _to_front(pool: BlockPool, blocks: list[KVCacheBlock], scope: Literal["uncached", "all_free"]) -> int:
    """Move the free blocks in scope out of `blocks` (in id order) to the front of the queue, keeping their order."""
    watched = getattr(pool, "_reuse_watchers", {})
    queue = pool.free_block_queue
    chosen = [
        block
        for block in blocks
        if block.next_free_block is not None
        and (scope == "all_free" or block.block_hash is None)
        and block.block_id not in watched
    ]
    for block in chosen:
        queue.remove(block)
    queue.prepend_n(chosen)
    return len(chosen)


def contiguity(pools: Iterable[BlockPool]) -> Work[Contiguity]:
    """Walk the free queues whole, in slices; `sampled` when a queue changed between two slices."""
    count = _Count()
    for pool in pools:
        yield from _walk(pool, count)
    return count.result()


def head_contiguity(pools: Iterable[BlockPool], blocks: int) -> Contiguity:
    """Look at no more than the first `blocks` free blocks of each pool, and for no longer than HEAD_NS in all (but at
    UNTIMED_BLOCKS whatever that takes).
    """
    count = _Count()
    until = time.thread_time_ns() + HEAD_NS
    for pool in pools:
        count.restart()
        cursor, left = pool.free_block_queue.fake_free_list_head, min(blocks, pool.get_num_free_blocks())
        count.sampled |= left < pool.get_num_free_blocks()
        while left > 0 and (piece := _following(cursor, min(left, SLICE_BLOCKS))):
            if count.blocks >= UNTIMED_BLOCKS and time.thread_time_ns() > until:
                count.sampled = True
                break
            count.add(piece)
            left -= len(piece)
            cursor = piece[-1]
    return count.result()


@dataclass(slots=True)
class _Count:
    """Blocks and neighbours seen so far. Ids that differ by 1 either way are adjacent: blocks are freed in reverse,
    and a clean descending run is as contiguous as an ascending one.
    """

    blocks: int = 0
    adjacent: int = 0
    sampled: bool = False
    _last_id: int | None = None

    def add(self, blocks: list[KVCacheBlock]) -> None:
        """Count blocks that follow the last ones."""
        last = self._last_id
        for block in blocks:
            if last is not None and abs(block.block_id - last) == 1:
                self.adjacent += 1
            last = block.block_id
        self._last_id = last
        self.blocks += len(blocks)

    def restart(self) -> None:
        """The next block is no neighbour of the last one."""
        self._last_id = None

    def result(self) -> Contiguity:
        """Every pair that is not adjacent starts another run."""
        return Contiguity(
            free_blocks=self.blocks,
            adjacent_pairs=self.adjacent,
            runs=self.blocks - self.adjacent,
            sampled=self.sampled,
        )


def _fingerprint(pool: BlockPool) -> tuple[int, int, int]:
    """Changes with nearly every change of the queue: its length and both ends."""
    queue = pool.free_block_queue
    first, last = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail.prev_free_block
    return queue.num_free_blocks, id(first), id(last)


def _walk(pool: BlockPool, count: _Count) -> Work[None]:
    queue = pool.free_block_queue
    cursor = queue.fake_free_list_head
    left = pool.get_num_free_blocks()
    seen = _fingerprint(pool)
    count.restart()
    while left > 0 and (piece := _following(cursor, min(left, SLICE_BLOCKS))):
        count.add(piece)
        left -= len(piece)
        cursor = piece[-1]
        yield None
        now = _fingerprint(pool)
        count.sampled |= now != seen
        seen = now
        if cursor.next_free_block is None:
            # The block under the cursor was taken. Allocation takes from the front, so what is left starts there.
            cursor = queue.fake_free_list_head
            count.sampled = True
            count.restart()


def _following(cursor: KVCacheBlock, limit: int) -> list[KVCacheBlock]:
    """Up to `limit` blocks after `cursor` in the queue. Only the fake tail has no successor."""
    found: list[KVCacheBlock] = []
    block = cursor.next_free_block
    while block is not None and len(found) < limit:
        following = block.next_free_block
        if following is None:
            break
        found.append(block)
        block = following
    return found
