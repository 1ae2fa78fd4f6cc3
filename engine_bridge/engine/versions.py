"""What differs between vLLM versions and between engines, found by probing; a version number decides nothing.

Each capability is looked for where the operation will need it. One that is missing switches off that operation alone,
with a reason that a person can act on.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

from engine_bridge import protocol
from engine_bridge.engine import pools

if TYPE_CHECKING:
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

_PREEMPT_NEEDS: Final = ("_preempt_request", "prev_step_scheduled_req_ids", "reset_preempted_req_ids")
_PAUSE_NEEDS: Final = ("_finish_pause", "resume_scheduler", "set_weight_version")


def is_lockstep(engine: EngineCore) -> bool:
    """Whether this rank steps together with others (mixture-of-experts data parallel): a rank that stopped scheduling
    on its own would leave the others waiting in a collective.
    """
    return hasattr(engine, "dp_group")


def capabilities(engine: EngineCore) -> dict[str, str]:
    """Every name in protocol.CAPABILITIES -> "" or why it is off here."""
    scheduler = engine.scheduler
    found = dict.fromkeys(protocol.CAPABILITIES, "")
    for name in ("reset.fail", "reset.keep", "reset.preempt"):
        found[name] = _pools_missing(scheduler)
    found["reset.preempt"] = found["reset.preempt"] or _preempt_missing(engine, scheduler)
    for scope in ("idle", "uncached", "all_free"):
        found[f"reorder.{scope}"] = _queue_missing(scheduler)
    found["reset.mm"] = multimodal_unsupported(engine)
    found["reset.encoder"] = encoder_unsupported(engine) if has_encoder_cache(scheduler) else ""
    found["events.publish"] = _events_missing(scheduler)
    found["pause"] = _pause_missing(engine, scheduler)
    return found


def _pools_missing(scheduler: Scheduler) -> str:
    try:
        found = pools.distinct_pools(scheduler)
    except AttributeError as error:
        return f"this vLLM keeps its block pools elsewhere: {error}"
    for pool in found:
        for name in ("blocks", "cached_block_hash_to_block", "cached_block_hashes_by_block", "free_block_queue"):
            if not hasattr(pool, name):
                return f"this vLLM's block pool has no {name}"
    return ""


def _queue_missing(scheduler: Scheduler) -> str:
    missing = _pools_missing(scheduler)
    if missing:
        return missing
    for pool in pools.distinct_pools(scheduler):
        for name in ("remove", "prepend_n", "fake_free_list_head", "fake_free_list_tail", "num_free_blocks"):
            if not hasattr(pool.free_block_queue, name):
                return f"this vLLM's free queue has no {name}"
    return ""


def _preempt_missing(engine: EngineCore, scheduler: Scheduler) -> str:
    for name in _PREEMPT_NEEDS:
        if not hasattr(scheduler, name):
            return f"this vLLM's scheduler has no {name}"
    if "drop_stale_output" not in inspect.signature(scheduler._preempt_request).parameters:
        return "this vLLM cannot drop output that is in flight when its request is preempted"
    if getattr(scheduler, "defer_block_free", False) and not hasattr(scheduler, "processed_step_seq"):
        return "this vLLM defers frees in a way that this bridge does not know"
    if is_lockstep(engine) and getattr(scheduler, "defer_block_free", False):
        return "lockstep data parallel with a KV consumer: frees are deferred and steps cannot be waited for"
    return ""


def _events_missing(scheduler: Scheduler) -> str:
    if not getattr(scheduler, "enable_kv_cache_events", False):
        return "KV cache events are not configured on this engine (--kv-events-config)"
    if not hasattr(scheduler, "kv_event_publisher"):
        return "this vLLM's scheduler has no kv_event_publisher"
    return ""


def _pause_missing(engine: EngineCore, scheduler: Scheduler) -> str:
    if is_lockstep(engine):
        return "ranks of a lockstep data parallel group pause together; use vLLM's own /pause and /resume"
    if not hasattr(scheduler, "set_pause_state"):
        return "this vLLM's scheduler cannot be paused"
    for name in _PAUSE_NEEDS:
        if not hasattr(engine, name):
            return f"this vLLM's engine core has no {name}"
    return ""


def multimodal_cache(engine: EngineCore) -> str:
    """Where processed multimodal inputs are cached: "" nowhere, else vLLM's name of the cache type."""
    model_config = engine.vllm_config.model_config
    if not getattr(model_config, "supports_multimodal_inputs", False):
        return ""
    settings = model_config.get_multimodal_config()
    if settings.mm_processor_cache_gb <= 0:
        return ""
    return str(getattr(settings, "mm_processor_cache_type", "lru"))


def multimodal_unsupported(engine: EngineCore) -> str:
    """Why the multimodal cache cannot be cleared from inside the engine; empty when there is none to clear.

    Its other side lives with the input processor, in the API server's process or the caller's own. A cache that was
    cleared on one side only makes the next request refer to an input that the other side no longer has.
    """
    cache = multimodal_cache(engine)
    if not cache:
        return ""
    return (
        f"the multimodal cache ({cache}) has its other half in the API server, which the engine cannot clear; "
        "use vLLM's own reset_mm_cache"
    )


def has_encoder_cache(scheduler: Scheduler) -> bool:
    """Whether this model's encoder outputs are kept."""
    return bool(getattr(getattr(scheduler, "encoder_cache_manager", None), "cache_size", 0))


def encoder_unsupported(engine: EngineCore) -> str:
    """Why an encoder cache cannot be cleared whole; empty when it can.

    An encoder cache connector keeps outputs of its own, and vLLM has no way to clear them: what was cleared here would
    come back from there.
    """
    if not hasattr(engine, "reset_encoder_cache"):
        return "this vLLM cannot reset its encoder cache"
    connector = getattr(engine.scheduler, "ec_connector", None)
    if connector is not None:
        return (
            f"{type(connector).__name__} keeps encoder outputs of its own, which the engine cannot clear; clear its "
            "store where it runs, then use vLLM's own reset_encoder_cache"
        )
    return ""


def waiting_queues(scheduler: Scheduler) -> list[RequestQueue]:
    """Every queue of waiting requests: what holds blocks is kept apart since 0.31, what was skipped before that."""
    names = ("waiting", "kv_holding_waiting", "skipped_waiting")
    return [getattr(scheduler, name) for name in names if hasattr(scheduler, name)]


def deferred_queue(scheduler: Scheduler) -> str:
    """Name of the queue of waiting requests in a blocked state; empty where this vLLM has none."""
    return next((name for name in ("deferred_waiting", "skipped_waiting") if hasattr(scheduler, name)), "")
