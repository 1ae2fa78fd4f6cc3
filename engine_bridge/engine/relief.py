"""Relief for admissions that waiting requests have deadlocked on blocks they hold.

Loads are admitted by a capped estimate, so requests whose loads have finished can hold so many blocks that the first
of them cannot get its next chunk. Nothing runs, so nothing is preempted, and nothing ends: `schedule()` hands out zero
tokens for ever. Relief is what vLLM does under pressure anyway, preempting, applied to one waiting holder: its blocks
go back through the scheduler's own path and the request is computed again later.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from engine_bridge.engine import need, pools, versions
from engine_bridge.engine import waiting as queue

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def missing(scheduler: Scheduler) -> str:
    """Why relief cannot be had on this vLLM; empty when it can."""
    for name in ("_preempt_request", "finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "requests"):
        if not hasattr(scheduler, name):
            return f"this vLLM's scheduler has no {name}"
    return ""


def deadlock(scheduler: Scheduler) -> str:
    """Empty when waiting requests have deadlocked admissions on the blocks they hold, else what was found."""
    return found_instead(scheduler, queue.look(scheduler, time.monotonic_ns()))


def found_instead(scheduler: Scheduler, waiting: queue.Waiting) -> str:
    """Why this is no such deadlock; empty when it is one.

    Certain at one look, without a history: nothing runs, no load or transfer is under way that could give blocks back,
    and the request that `schedule()` stops at needs more than is free.
    """
    if scheduler.pause_state != PauseState.UNPAUSED:
        return "the scheduler is paused"
    if scheduler.running:
        return f"{len(scheduler.running)} requests are running"
    if not waiting.total:
        return "no request is waiting"
    if waiting.loading:
        return f"{len(waiting.loading)} loads from a remote tier are still in flight"
    if waiting.head is None:
        return f"none of {waiting.total} waiting requests is ready to be scheduled"
    if getattr(scheduler, "deferred_frees", None):
        return "blocks of ended requests are given back when the steps in flight have ended"
    return _blocks_suffice(scheduler, waiting.head) or _nobody_to_relieve(scheduler, waiting)


def _blocks_suffice(scheduler: Scheduler, head: Request) -> str:
    pool_list = pools.distinct_pools(scheduler)
    needed = need.blocks_needed(scheduler, head, need.next_chunk_tokens(scheduler, head))
    free, total = pools.free_blocks(pool_list), pools.usable_blocks(pool_list)
    who = f"request {head.request_id} is next and needs {needed} blocks"
    if needed == need.UNKNOWN:
        return f"what request {head.request_id} needs cannot be told for this model"
    if needed <= free:
        return f"{who}, {free} are free"
    if needed > total:
        return f"{who}, more than the {total} there are"
    transfers = max(0, queue.orphaned_blocks(scheduler))
    if needed <= free + transfers:
        return f"{who}, {free} are free and {transfers} are held by transfers that may still end"
    return ""


def _nobody_to_relieve(scheduler: Scheduler, waiting: queue.Waiting) -> str:
    if not waiting.holders:
        return "no waiting request holds blocks"
    if not _relievable(scheduler, waiting):
        return f"{len(waiting.holders)} waiting requests hold blocks, and all of them wait for their clients"
    if any(_gives_back_by_itself(scheduler, request) for request in waiting.holders):
        return "a failed load gives its blocks back in the next step"
    return ""


def _relievable(scheduler: Scheduler, waiting: queue.Waiting) -> list[Request]:
    return [request for request in waiting.holders if queue.load_has_finished(scheduler, request)]


def _gives_back_by_itself(scheduler: Scheduler, request: Request) -> bool:
    return request.request_id in scheduler.failed_recving_kv_req_ids and request.num_computed_tokens == 0


def relieve_one(scheduler: Scheduler) -> tuple[str, int]:
    """Give back the blocks of the youngest waiting holder whose load has finished. Returns its id and the blocks that
    became free. LookupError when there is none.

    The head of the queue is spared while anybody else holds blocks, so that each relief lets it come closer.
    """
    waiting = queue.look(scheduler, time.monotonic_ns())
    candidates = _relievable(scheduler, waiting)
    if not candidates:
        raise LookupError("no waiting request holds blocks that could be given back")
    others = [request for request in candidates if request is not waiting.head] or candidates
    # As vLLM chooses whom to preempt: the least urgent, and of those the one that came last.
    victim = max(others, key=lambda request: (request.priority, request.arrival_time))
    return victim.request_id, _give_back(scheduler, victim)


def _give_back(scheduler: Scheduler, request: Request) -> int:
    pool_list = pools.distinct_pools(scheduler)
    before = pools.free_blocks(pool_list)
    for requests in versions.waiting_queues(scheduler):
        requests.remove_requests([request])
    for name in ("deferred_waiting", "failed_recving_kv_req_ids", "finished_recving_kv_req_ids"):
        members: set[object] = getattr(scheduler, name, set())
        members.discard(request if name == "deferred_waiting" else request.request_id)
    if hasattr(scheduler, "_set_kv_fetch_stage"):
        scheduler._set_kv_fetch_stage(request, None)
    preemptions = request.num_preemptions
    request.status = RequestStatus.RUNNING  # what `_preempt_request` asks for
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    if preemptions == 0:
        # It never ran: the workers do not know it, and would look for it if it were resumed as one they do.
        request.status = RequestStatus.WAITING
        request.num_preemptions = 0
    return pools.free_blocks(pool_list) - before
