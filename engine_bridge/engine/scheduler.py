"""Requests and steps: counting them, preempting them, waiting for those in flight, publishing what was forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

from engine_bridge.attach import RESET_MODES
from engine_bridge.engine import pools, versions
from engine_bridge.page import FLAG_WOKE_WITHOUT_RESET, Counters

if TYPE_CHECKING:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore


class Steps:
    """Counts what vLLM does not add up: tokens scheduled, preemptions, outputs; fills the page's counters.

    `__call__` runs after every step, so it touches lengths and attributes only.
    """

    def __init__(self, engine: EngineCore, pause_state: Callable[[], PauseState] | None = None) -> None:
        """Read from `engine` from now on. `pause_state` tells what others than us know of it."""
        self._engine = engine
        self._scheduler = engine.scheduler
        self._pools = pools.distinct_pools(engine.scheduler)
        self._deferred = versions.deferred_queue(engine.scheduler)
        self._holding = "kv_holding_waiting" if hasattr(engine.scheduler, "kv_holding_waiting") else ""
        self._pause_state = pause_state or (lambda: engine.scheduler.pause_state)
        self._maps = self._current_maps()
        self._reset_by_others = False
        self._asleep = False
        self._maps_awake = self._maps
        self.woke_without_reset = False
        """The executor slept and woke, and hashes from before still name memory that was thrown away."""
        self.tokens = 0
        self.preemptions = 0
        self.outputs = 0
        self._tokens_before = 0
        self._scheduled: list[SchedulerOutput] = []
        self._handed_out: list[dict[int, EngineCoreOutputs]] = []

    def count_schedule(self, schedule: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """The scheduler's own `schedule`; what it says is counted later, where nothing can hurt the engine."""
        output = schedule(*args, **kwargs)
        self._scheduled.append(output)
        return output

    def hand_out(self, outputs: dict[int, EngineCoreOutputs] | None) -> None:
        """Outputs of one step, by client; counted later."""
        if outputs:
            self._handed_out.append(outputs)

    def _count(self) -> None:
        for output in self._scheduled:
            self.tokens += output.total_num_scheduled_tokens
            if output.preempted_req_ids:
                self.preemptions += len(output.preempted_req_ids)
        self._scheduled.clear()
        for outputs in self._handed_out:
            for by_client in outputs.values():
                self.outputs += len(by_client.outputs)
        self._handed_out.clear()

    def __call__(self, counters: Counters, now_ns: int) -> None:
        """Fill in what this engine counts, at `now_ns`."""
        if self._scheduled or self._handed_out:
            self._count()
        scheduler = self._scheduler
        counters.running, counters.waiting = scheduler.get_request_counts()
        if self._deferred:
            counters.deferred = len(getattr(scheduler, self._deferred))
        if self._holding:
            counters.holding = len(getattr(scheduler, self._holding))
        counters.paused = int(self._pause_state())
        counters.outputs = self.outputs
        counters.preemptions = self.preemptions
        if self.tokens != self._tokens_before:
            self._tokens_before = self.tokens
            counters.tokens_scheduled = self.tokens
            counters.last_progress_ns = now_ns
        free = cached = 0
        for pool in self._pools:
            free += pool.free_block_queue.num_free_blocks
            cached += len(pool.cached_block_hash_to_block)
        counters.blocks_free = free
        counters.blocks_cached = cached
        self.look()
        if self._reset_by_others:
            self._reset_by_others = False
            counters.last_reset_ns = now_ns
            counters.last_reset_mode = RESET_MODES["foreign"]
        counters.sleeping = int(self._asleep)
        if self.woke_without_reset:
            counters.flags |= FLAG_WOKE_WITHOUT_RESET
        else:
            counters.flags &= ~FLAG_WOKE_WITHOUT_RESET

    def look(self) -> None:
        """Notice what others did: a reset replaces the lookup maps, a sleep throws away the memory behind them."""
        maps = self._current_maps()
        if maps != self._maps:
            self._maps = maps
            self._reset_by_others = True
            self.woke_without_reset = False
        asleep = bool(self._engine.model_executor.is_sleeping)
        if self._asleep and not asleep and maps == self._maps_awake:
            self.woke_without_reset = any(len(pool.cached_block_hash_to_block) for pool in self._pools)
        if not asleep:
            self._maps_awake = maps
        self._asleep = asleep

    def own_reset(self) -> None:
        """The lookup maps were just replaced by us."""
        self._maps = self._current_maps()
        self.woke_without_reset = False

    def _current_maps(self) -> list[int]:
        # The identity of an object that is alive, and compared while it is: cheaper than comparing dictionaries.
        return [id(pool.cached_block_hash_to_block) for pool in self._pools]


def preempt_running(scheduler: Scheduler) -> int:
    """What vLLM's own reset does with running requests. Output in flight is dropped and its positions are sampled
    again: it would otherwise arrive after the tokens of the resumed request.
    """
    timestamp = time.monotonic()
    preempted = 0
    # In reverse, each to the head of the queue: they are admitted again in the order in which they ran.
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), timestamp, drop_stale_output=True)
        preempted += 1
    # They may be scheduled again at once, and the model runner must then take them for new.
    scheduler.prev_step_scheduled_req_ids.clear()
    return preempted


def blocks_after_preempt(scheduler: Scheduler) -> int:
    """Blocks that would stay held if every running request were preempted now. O(blocks held by running requests)."""
    references: dict[int, int] = {}
    deferred = getattr(scheduler, "defer_block_free", False)
    freed = 0
    for request in scheduler.running:
        if deferred and request.last_sched_seq > scheduler.processed_step_seq:
            continue
        for single in scheduler.kv_cache_manager.coordinator.single_type_managers:
            table = single.req_to_blocks.get(request.request_id, ())
            # Nearly every block has one holder: what is left for the loop below is little.
            shared = [block for block in table if block.ref_cnt != 1 or block.is_null]
            freed += len(table) - len(shared)
            for block in shared:
                if block.is_null:
                    continue
                key = id(block)
                seen = references.get(key, 0) + 1
                references[key] = seen
                freed += seen == block.ref_cnt
    return pools.held_blocks(pools.distinct_pools(scheduler)) - freed


def publish_cleared(scheduler: Scheduler) -> tuple[bool, list[str]]:
    """Hand what is queued, AllBlocksCleared among it, to the publisher now.

    vLLM does this at the end of a step, so an idle engine's subscribers would go on believing in a cache that is gone
    until the next request. Everything queued goes, in vLLM's own order: nothing is lost, nothing overtakes.
    """
    if not getattr(scheduler, "enable_kv_cache_events", False):
        return False, []
    waiting = getattr(scheduler.kv_event_publisher, "_event_queue", None)
    if waiting is not None and waiting.full():
        # `publish` would block the engine's thread; the events stay where they are and go out with the next step.
        return False, []
    events = list(scheduler.kv_cache_manager.take_events() or ())
    cleared = any(isinstance(event, AllBlocksCleared) for event in events)
    if scheduler.connector is not None:
        events.extend(scheduler.connector.take_events() or ())
    if not events:
        return False, []
    scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
    return cleared, ["GPU"] if cleared else []
