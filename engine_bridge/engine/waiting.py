"""The waiting queues, looked at once, and the blocks that requests hold.

Looked at in the order in which `schedule()` would, so the bound cuts off what has no bearing on the next admission.
A trap: a request whose load has finished keeps the status of one that waits for a remote until it is scheduled.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import RequestStatus

from engine_bridge.engine import pools, versions

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

MAX_WAITING: Final = 2048
"""Waiting requests looked at for one answer."""

MAX_HELD: Final = 16_384
"""Block table entries looked at to count distinct held blocks: one to two milliseconds."""

COUNT_NS: Final = 2_000_000
"""Processor time after which that count is given up, on a core where it takes longer; nanoseconds."""

# Looked up once, not for every request: finding a member of an enum takes longer than comparing with it.
_LOADING: Final = RequestStatus.WAITING_FOR_REMOTE_KVS
_READY: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_QUEUED: Final = (EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED)


@dataclass(slots=True)
class Waiting:
    """The waiting queues, looked at once."""

    total: int
    loading: list[Request] = field(default_factory=list)
    """Loads truly in flight."""
    load_finished: list[Request] = field(default_factory=list)
    """Status still says waiting for the remote, and the load has finished."""
    other: int = 0
    """Waiting for a grammar or for streamed input."""
    holders: list[Request] = field(default_factory=list)
    """Holding blocks, in the order in which they would be scheduled."""
    head: Request | None = None
    """The first that could be scheduled if there were blocks for it."""
    head_ns: int = 0
    """How long the head has waited."""
    oldest_ns: int = 0
    """Longest wait."""
    truncated: bool = False


def look(scheduler: Scheduler, now_ns: int) -> Waiting:
    """Classify the waiting requests."""
    found = Waiting(total=sum(len(queue) for queue in versions.waiting_queues(scheduler)))
    found.truncated = found.total > MAX_WAITING
    finished = scheduler.finished_recving_kv_req_ids
    seen_before = _first_seen.get(scheduler, {})
    seen: dict[str, int] = {}
    for request in islice(_in_order(scheduler), MAX_WAITING):
        if request.status == _LOADING:
            ready = request.request_id in finished
            (found.load_finished if ready else found.loading).append(request)
        elif request.status in _READY:
            # Output in flight that is still to be delivered keeps a preempted request back for a step or two.
            ready = not request.num_stale_output_tokens or request.drop_stale_output
        else:
            ready = False
            found.other += 1
        if holds_blocks(scheduler, request):
            found.holders.append(request)
        if ready and found.head is None:
            found.head = request
        since = _queued_ns(request) or seen_before.get(request.request_id, now_ns)
        seen[request.request_id] = since
        found.oldest_ns = max(found.oldest_ns, now_ns - since)
    _first_seen[scheduler] = seen
    if found.head is not None:
        found.head_ns = now_ns - seen[found.head.request_id]
    return found


def _in_order(scheduler: Scheduler) -> Iterator[Request]:
    """Waiting requests as `schedule()` takes them. Since 0.31 those that hold blocks come first; before, those that
    were skipped do, except that under a priority policy the two queues are merged by priority.
    """
    waiting = _front(scheduler.waiting)
    if hasattr(scheduler, "kv_holding_waiting"):
        return chain(_front(scheduler.kv_holding_waiting), waiting)
    skipped = _front(getattr(scheduler, "skipped_waiting", ()))
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        return heapq.merge(skipped, waiting, key=_urgency)
    return chain(skipped, waiting)


def _front(queue: Iterable[Request]) -> Iterable[Request]:
    """At least the first MAX_WAITING requests of a queue in its own order. vLLM iterates over a priority queue by
    taking a copy apart, comparing in Python at every turn. Where it is cut, the first is exact, the rest nearly so.
    """
    heap: list[Request] | None = getattr(queue, "_heap", None)
    return queue if heap is None else sorted(heap[:MAX_WAITING], key=_urgency)


def _urgency(request: Request) -> tuple[int, float, str]:
    """As requests compare among themselves."""
    return request.priority, request.arrival_time, request.request_id


def holds_blocks(scheduler: Scheduler, request: Request) -> bool:
    """Whether a request has a block table."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    return any(group.req_to_blocks.get(request.request_id) for group in groups)


def table_entries(scheduler: Scheduler, request: Request) -> int:
    """Length of a request's block tables, null blocks among them: O(groups), where `blocks_of` is O(blocks)."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(group.req_to_blocks.get(request.request_id, ())) for group in groups)


def blocks_of(scheduler: Scheduler, request: Request) -> int:
    """Blocks a request holds, over all groups, without null blocks."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(not block.is_null for group in groups for block in group.req_to_blocks.get(request.request_id, ()))


def load_has_finished(scheduler: Scheduler, request: Request) -> bool:
    """Whether what a waiting holder waits for is blocks, and no longer a remote, a grammar or a client."""
    if request.status == _LOADING:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return request.status in _READY


def orphaned_blocks(scheduler: Scheduler) -> int:
    """Held blocks that no live request holds: transfers, delayed frees, or a leak. -1 when there are more than
    MAX_HELD block table entries to look at, or COUNT_NS did not suffice for them.
    """
    tables = list(_live_tables(scheduler))
    if sum(map(len, tables)) > MAX_HELD:
        return -1
    until = time.thread_time_ns() + COUNT_NS
    live: set[int] = set()
    for table in tables:
        live.update(map(id, table))
        if len(live) > pools.UNTIMED_BLOCKS and time.thread_time_ns() > until:
            return -1
    found = pools.distinct_pools(scheduler)
    live.difference_update([id(pool.null_block) for pool in found])
    return pools.held_blocks(found) - len(live)


def orphaned_at_least(scheduler: Scheduler) -> int:
    """What is certainly held by no live request, even if no two requests shared a block."""
    held = pools.held_blocks(pools.distinct_pools(scheduler))
    return max(0, held - sum(map(len, _live_tables(scheduler))))


def _live_tables(scheduler: Scheduler) -> Iterator[list[KVCacheBlock]]:
    for group in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for request_id, table in group.req_to_blocks.items():
            request = scheduler.requests.get(request_id)
            if request is not None and not RequestStatus.is_finished(request.status):
                yield table


_first_seen: WeakKeyDictionary[Scheduler, dict[str, int]] = WeakKeyDictionary()
"""When each request now waiting was first seen to wait, CLOCK_MONOTONIC ns. Only for engines that record no events
(`--disable-log-stats`): a request's own arrival time is wall-clock time, which may jump.
"""


def _queued_ns(request: Request) -> int:
    """When the request was queued, or last preempted; 0 when this engine does not record it."""
    for event in reversed(request.events):
        if event.type in _QUEUED:
            return int(event.timestamp * 1e9)
    return 0
