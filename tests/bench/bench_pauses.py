"""How long the engine's thread is held: forgetting the cache and reordering free blocks, on vLLM's real BlockPool.

Resets: vLLM's own body and ours take turns on the same pool, filled the same way each time. Ours leaves the old lookup
map for later steps to take down, as it does in an engine. Reorder, the walk that measures contiguity and that taking
down run in slices between two engine steps; measured is the longest that the engine waits at a time (slices are strung
together up to the dispatcher's limit, as it does it) and the sum. All of this is computing, so the processor time of
the thread is what is compared: what other processes took meanwhile is theirs. The garbage collector is off meanwhile:
it pauses an engine whatever it does.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from engine_bridge.dispatcher import SLICE_NS
from engine_bridge.engine import pools
from tests.bench.figures import Report, Table, main, progress
from tests.bench.pairs import take_turns

SIZES = (10_000, 100_000, 1_000_000)
FILLS = (0.01, 0.1, 0.5, 1.0)
HOLD_LIMITS_MS = {100_000: 5.0, 1_000_000: 10.0}
MEASURED_AFRESH = 3


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of processor time."""
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e6


class Filling:
    """Gives the same share of a pool's blocks a hash, in random order as a long session would."""

    def __init__(self, pool: BlockPool, share: float) -> None:
        self._pool = pool
        count = int((pool.num_gpu_blocks - 1) * share)
        self._chosen = random.Random(1).sample(range(1, pool.num_gpu_blocks), count)

    def fill(self) -> None:
        insert, blocks = self._pool._insert_block_hash, self._pool.blocks
        for block_id in self._chosen:
            # New each time, and held by nobody else: a reset is what gives back the hashes of requests that ended.
            insert(block_id.to_bytes(36, "big"), blocks[block_id], 16)


def scramble(pool: BlockPool) -> None:
    """Free all blocks in random order."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    random.Random(1).shuffle(blocks)
    pool.free_blocks(blocks)


def resets(pool: BlockPool, rounds: int, table: Table, report: Report) -> None:
    size = pool.num_gpu_blocks
    for share in FILLS:
        filling = Filling(pool, share)

        def stock(filling: Filling = filling) -> float:
            filling.fill()
            return timed(pool.reset_prefix_cache)

        def ours(filling: Filling = filling) -> float:
            filling.fill()
            attic: pools.Attic = []
            return timed(lambda: pools.drop_hashes(pool, attic))

        turns = take_turns(stock, {"ours": ours}, rounds)
        ratio, noise = turns.ratio("ours"), turns.noise()
        row = [f"{size:,}", f"{share:.0%}", turns.median_baseline, turns.median("ours")]
        table.rows.append([*row, ratio.text, noise.text])
        if share == FILLS[0]:
            why = (
                f"what does not shrink with the fill took {turns.median('ours'):.2f} ms: a sample of blocks, and "
                "memory that other processes evicted from the caches"
            )
            report.aim(f"reset of {size:,} blocks, {share:.0%} cached, 10 times as fast", 1 / ratio.median, 10, "times",
                       why, least=True)  # fmt: skip
        else:
            why = f"the baseline against itself differs by {noise.text}"
            report.aim(
                f"reset of {size:,} blocks, {share:.0%} cached, not slower than stock", ratio.median, 1.0, "of it", why
            )


@dataclass
class Holds:
    """Times at a stretch, milliseconds: on the clock, and of the thread's own processor time."""

    clock: list[float]
    processor: list[float]


def holds(work: Generator[Any, None, Any]) -> Holds:
    found = Holds([], [])
    done = False
    while not done:
        began, spent = time.perf_counter_ns(), time.thread_time_ns()
        while True:
            if next(work, _END) is _END:
                done = True
                break
            if time.perf_counter_ns() - began >= SLICE_NS:
                break
        found.processor.append((time.thread_time_ns() - spent) / 1e6)
        found.clock.append((time.perf_counter_ns() - began) / 1e6)
    return found


_END = object()


def attic_of(pool: BlockPool) -> pools.Attic:
    """What a reset leaves behind."""
    attic: pools.Attic = []
    pools.drop_hashes(pool, attic)
    return attic


def sliced(pool: BlockPool, table: Table, report: Report) -> None:
    """Reorder in both scopes, the contiguity walk and what a reset leaves, on a queue in random order, half cached."""
    size = pool.num_gpu_blocks
    filling = Filling(pool, 0.5)
    works: tuple[tuple[str, Callable[[], Generator[Any, None, Any]]], ...] = (
        ("reorder uncached", lambda: pools.reorder([pool], "uncached")),
        ("reorder all_free", lambda: pools.reorder([pool], "all_free")),
        ("contiguity", lambda: pools.contiguity([pool])),
        ("taking down an old map", lambda: pools.give_back(attic_of(pool))),
    )
    for name, work in works:
        longest, whole = [], []
        for _ in range(MEASURED_AFRESH):
            pool.reset_prefix_cache()
            scramble(pool)
            filling.fill()
            found = holds(work())
            longest.append(max(found.processor))
            whole.append(sum(found.processor))
            clock, stretches = max(found.clock), len(found.clock)
        held, limit = statistics.median(longest), HOLD_LIMITS_MS.get(size)
        table.rows.append([f"{size:,}", name, held, clock, stretches, statistics.median(whole)])
        if limit is not None:
            why = "other processes evicted the caches in between" if held < 2 * limit else "one slice takes too long"
            text = f"{name} of {size:,} blocks holds the engine under {limit:.0f} ms at a time"
            report.aim(text, held, limit, f"ms of processor time ({clock:.1f} ms with what others took)", why)


def measure(quick: bool) -> Report:
    logging.getLogger("vllm.v1.core.block_pool").disabled = True
    report = Report("pauses")
    reset_columns = ("blocks", "cached", "vLLM, ms of CPU", "ours, ms of CPU", "ours / vLLM", "vLLM / vLLM")
    slice_columns = ("blocks", "work", "longest, ms of CPU", "longest on the clock", "stretches", "sum, ms of CPU")
    report.tables += [
        Table("Forgetting every hash, our KEEP and vLLM's own reset on the same pool", reset_columns),
        Table("In slices between steps: a scrambled free queue, half of the blocks cached", slice_columns),
    ]
    for size in SIZES[:-1] if quick else SIZES:
        progress(f"{size:,} blocks")
        pool = BlockPool(size, True, 16)
        gc.collect()
        gc.disable()
        try:
            resets(pool, 3 if quick else 9, report.tables[0], report)
            sliced(pool, report.tables[1], report)
        finally:
            gc.enable()
    return report


if __name__ == "__main__":
    sys.exit(main(measure))
