"""Caches of multimodal inputs and encoder outputs: each is cleared only where all of its sides can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine_bridge.engine import versions
from engine_bridge.protocol import Tier

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

_UNSUPPORTED: Final = "TIER_UNSUPPORTED"


def reset_multimodal(engine: EngineCore) -> Tier:
    """Say why the multimodal cache is out of reach, if there is one."""
    why = versions.multimodal_unsupported(engine)
    if why:
        return Tier("unsupported", _UNSUPPORTED, why)
    return Tier("not_configured", message="this engine caches no multimodal inputs")


def reset_encoder(engine: EngineCore) -> Tier:
    """Clear the scheduler's and the workers' halves together, while no request counts on an output that is in them. A
    preempted request does not once no step of it is in flight: it has given its outputs up.
    """
    scheduler = engine.scheduler
    if not versions.has_encoder_cache(scheduler):
        return Tier("not_configured", message="this model has no encoder cache")
    why = versions.encoder_unsupported(engine)
    if why:
        return Tier("unsupported", _UNSUPPORTED, why)
    using = sum(
        request.has_encoder_inputs and (request.num_computed_tokens > 0 or request.num_in_flight_tokens > 0)
        for request in scheduler.requests.values()
    )
    if using:
        message = f"{using} multimodal requests in progress still need their encoder outputs; ask again later"
        return Tier("refused", "BLOCKS_HELD_BY_REQUESTS", message)
    engine.reset_encoder_cache()
    return Tier("done")


def encoder_outputs_in_flight(scheduler: Scheduler) -> bool:
    """Whether a step in flight may read encoder outputs."""
    return any(request.has_encoder_inputs and request.num_in_flight_tokens for request in scheduler.requests.values())
