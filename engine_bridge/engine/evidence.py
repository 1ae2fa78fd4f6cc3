"""Evidence on admissions: who waits, who holds blocks, and what the next request in line needs.

Read at a step boundary, with no side effect on vLLM's structures, in O(waiting) with a bound.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Literal

from vllm.v1.core.sched.interface import PauseState

from engine_bridge.engine import need, pools, relief, waiting
from engine_bridge.protocol import Evidence, HeadOfQueue, Holder, Holders

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from engine_bridge.engine.guards import Guards

MAX_HOLDERS: Final = 16

PAUSED: Final[dict[PauseState, Literal["", "new", "all"]]] = {
    PauseState.UNPAUSED: "",
    PauseState.PAUSED_NEW: "new",
    PauseState.PAUSED_ALL: "all",
}


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


def read_evidence(engine: EngineCore, guards: Guards, call: int, contiguity_blocks: int) -> Evidence:
    """Everything a verdict needs. Weight version and lease state are the caller's to fill in."""
    scheduler = engine.scheduler
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
        blocks_orphaned=waiting.orphaned_blocks(scheduler),
        head=_head(scheduler, found),
        holders=_largest(scheduler, found),
        oldest_waiting_ns=found.oldest_ns,
        paused=PAUSED[scheduler.pause_state],
        sleeping=bool(engine.model_executor.is_sleeping),
        woke_without_reset=False,
        scheduling="running",
        weight_version="",
        contiguity=pools.head_contiguity(pool_list, contiguity_blocks) if contiguity_blocks else None,
        quarantined_requests=guards.quarantined(),
        truncated=found.truncated,
        verdict="" if relief.found_instead(scheduler, found) else "HELD_BLOCKS_DEADLOCK",
    )


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


def _largest(scheduler: Scheduler, found: waiting.Waiting) -> list[Holder]:
    rows = [
        Holder(
            request_id=request.request_id,
            status=str(request.status),
            blocks_held=waiting.blocks_of(scheduler, request),
            load_finished=waiting.load_has_finished(scheduler, request),
        )
        for request in found.holders[: 4 * MAX_HOLDERS]
    ]
    return sorted(rows, key=lambda row: -row.blocks_held)[:MAX_HOLDERS]
