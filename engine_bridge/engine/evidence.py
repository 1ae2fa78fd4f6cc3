"""Evidence on admissions: who waits, who holds blocks, and what the next request in line needs.

Read at a step boundary, with no side effect on vLLM's structures, in O(waiting) with a bound. Three answers cost more,
as they look at blocks: the order of the free queue, held blocks that no request holds, and what waiting requests hold.
They are remembered, so that a monitor may ask a hundred times a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from vllm.v1.core.sched.interface import PauseState

from engine_bridge.engine import need, pools, relief, waiting
from engine_bridge.protocol import Contiguity, Evidence, HeadOfQueue, Holder, Holders

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from engine_bridge.engine.guards import Guards

MAX_HOLDERS: Final = 16

PAUSED: Final[dict[PauseState, Literal["", "new", "all"]]] = {
    PauseState.UNPAUSED: "",
    PauseState.PAUSED_NEW: "new",
    PauseState.PAUSED_ALL: "all",
}


KEPT_TIMES: Final = 1000
"""An answer is remembered for so many times what it cost: asking costs the engine's thread a thousandth at most."""

LONGEST_KEPT_NS: Final = 2_000_000_000

SMALL_BLOCKS: Final = 1024
"""What looks at no more blocks than that costs about a tenth of a millisecond, and is always asked afresh."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    question: object
    value: T
    expires_ns: int


class _Memo(Generic[T]):
    """The last answer to one kind of question."""

    def __init__(self) -> None:
        self._answer: _Answer[T] | None = None

    def ask(self, question: object, size: int, compute: Callable[[], T]) -> T:
        """`size` is how many blocks have to be looked at."""
        if size <= SMALL_BLOCKS:
            return compute()
        answer = self._answer
        if answer is None or answer.question != question or time.monotonic_ns() >= answer.expires_ns:
            began = time.thread_time_ns()
            value = compute()
            keep = min(KEPT_TIMES * (time.thread_time_ns() - began), LONGEST_KEPT_NS)
            answer = self._answer = _Answer(question, value, time.monotonic_ns() + keep)
        return answer.value


class Remembered:
    """What one engine was asked last."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.forget()

    def forget(self) -> None:
        """We have just changed what the answers depend on."""
        self.orphaned: _Memo[int] = _Memo()
        self.contiguity: _Memo[Contiguity] = _Memo()
        self.holders: _Memo[list[Holder]] = _Memo()


def holders(scheduler: Scheduler) -> Holders:
    """Who holds blocks now."""
    found = waiting.look(scheduler, time.monotonic_ns())
    known = waiting.orphaned_blocks(scheduler)
    return Holders(
        held_blocks=pools.held_blocks(pools.distinct_pools(scheduler)),
        running_requests=len(scheduler.running),
        waiting_requests=len(found.holders),
        remote_loads=len(found.loading),
        transfer_blocks=known if known >= 0 else waiting.orphaned_at_least(scheduler),
        paused=scheduler.pause_state != PauseState.UNPAUSED,
    )


def read_evidence(
    engine: EngineCore, guards: Guards, call: int, contiguity_blocks: int, remembered: Remembered | None = None
) -> Evidence:
    """Everything a verdict needs. Weight version and lease state are the caller's to fill in."""
    scheduler = engine.scheduler
    remembered = remembered or Remembered()
    now = time.monotonic_ns()
    found = waiting.look(scheduler, now)
    pool_list = pools.distinct_pools(scheduler)
    return Evidence(
        call=call,
        monotonic_ns=now,
        running=len(scheduler.running),
        waiting=found.total,
        waiting_remote_kv=len(found.loading),
        load_finished=len(found.load_finished),
        waiting_other=found.other,
        waiting_holding_blocks=len(found.holders),
        blocks_total=pools.usable_blocks(pool_list),
        blocks_free=pools.free_blocks(pool_list),
        blocks_cached=pools.cached_blocks(pool_list),
        blocks_orphaned=_orphaned(scheduler, pool_list, remembered),
        head=_head(scheduler, found),
        holders=_largest(scheduler, found, remembered),
        oldest_waiting_ns=found.oldest_ns,
        paused=PAUSED[scheduler.pause_state],
        sleeping=bool(engine.model_executor.is_sleeping),
        woke_without_reset=False,
        scheduling="running",
        weight_version="",
        contiguity=_contiguity(pool_list, contiguity_blocks, remembered) if contiguity_blocks else None,
        quarantined_requests=guards.quarantined(),
        truncated=found.truncated,
        verdict="" if relief.found_instead(scheduler, found) else "HELD_BLOCKS_DEADLOCK",
    )


def _orphaned(scheduler: Scheduler, pool_list: list[BlockPool], remembered: Remembered) -> int:
    held = pools.held_blocks(pool_list)
    # One from a while ago must not exceed what is held now.
    return min(held, remembered.orphaned.ask(None, held, lambda: waiting.orphaned_blocks(scheduler)))


def _contiguity(pool_list: list[BlockPool], blocks: int, remembered: Remembered) -> Contiguity:
    size = sum(min(blocks, pool.get_num_free_blocks()) for pool in pool_list)
    return remembered.contiguity.ask(blocks, size, lambda: pools.head_contiguity(pool_list, blocks))


def _head(scheduler: Scheduler, found: waiting.Waiting) -> HeadOfQueue | None:
    request = found.head
    if request is None:
        return None
    chunk = need.next_chunk_tokens(scheduler, request)
    return HeadOfQueue(
        request_id=request.request_id,
        status=str(request.status),
        blocks_needed=need.blocks_needed(scheduler, request, chunk),
        next_chunk_tokens=chunk,
        blocks_held=waiting.blocks_of(scheduler, request),
        waiting_ns=found.head_ns,
    )


def _largest(scheduler: Scheduler, found: waiting.Waiting, remembered: Remembered) -> list[Holder]:
    seen = [
        (request, waiting.load_has_finished(scheduler, request), waiting.table_entries(scheduler, request))
        for request in found.holders[: 4 * MAX_HOLDERS]
    ]

    def count() -> list[Holder]:
        rows = [
            Holder(request.request_id, str(request.status), waiting.blocks_of(scheduler, request), finished)
            for request, finished, _ in seen
        ]
        return sorted(rows, key=lambda row: -row.blocks_held)[:MAX_HOLDERS]

    question = [(request.request_id, request.status, finished, entries) for request, finished, entries in seen]
    return remembered.holders.ask(question, sum(entries for _, _, entries in seen), count)
