"""PLACEHOLDER until BRIDGE-OPS puts the real one here."""

from __future__ import annotations

import time
from typing import Any

from engine_bridge import protocol
from engine_bridge.engine import pools, versions


def relief_missing(scheduler: Any) -> str:
    return ""


def holders(scheduler: Any) -> protocol.Holders:
    waiting = [r for q in versions.waiting_queues(scheduler) for r in q]
    holding = sum(scheduler._holds_kv_blocks(r) for r in waiting) if hasattr(scheduler, "_holds_kv_blocks") else 0
    return protocol.Holders(
        pools.held_blocks(pools.distinct_pools(scheduler)),
        len(scheduler.running),
        holding,
        0,
        0,
        bool(scheduler.pause_state),
    )


def read_evidence(engine: Any, guards: Any, call: int, contiguity_blocks: int) -> protocol.Evidence:
    s = engine.scheduler
    ps = pools.distinct_pools(s)
    return protocol.Evidence(
        call=call,
        monotonic_ns=time.monotonic_ns(),
        running=len(s.running),
        waiting=s.get_request_counts()[1],
        waiting_remote_kv=0,
        load_finished=0,
        waiting_other=0,
        waiting_holding_blocks=0,
        blocks_total=pools.usable_blocks(ps),
        blocks_free=pools.free_blocks(ps),
        blocks_cached=pools.cached_blocks(ps),
        blocks_orphaned=-1,
        head=None,
        holders=[],
        oldest_waiting_ns=0,
        paused="",
        sleeping=False,
        woke_without_reset=False,
        scheduling="running",
        weight_version="",
        contiguity=pools.head_contiguity(ps, contiguity_blocks),
        quarantined_requests=0,
        truncated=False,
    )


def deadlock(scheduler: Any) -> str:
    return "not built yet"


def relieve_one(scheduler: Any) -> tuple[str, int]:
    raise LookupError("not built yet")
