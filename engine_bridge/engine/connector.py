"""The KV connector's tier: clearing it, and reading the answer for what it is.

A connector answers True, False (transfers in flight), or None (no such thing), or raises. vLLM's own reset takes None
for success, and a MultiConnector does the same for each of its children; so the children are asked one by one here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from engine_bridge.engine.guards import connectors
from engine_bridge.protocol import Tier, TierStateName

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = logging.getLogger("vllm.kvctl")

_WORST_FIRST: Final[tuple[TierStateName, ...]] = ("failed", "unsupported", "pending", "done")


def connector_tier(scheduler: Scheduler) -> Tier:
    """Clear the connector's tier. Never raises: what one connector raises must not hide what became of the others."""
    tiers = [_reset(connector) for connector in connectors(scheduler.connector)]
    if not tiers:
        return Tier("not_configured", message="no KV connector is configured")
    if all(tier.state == "done" for tier in tiers):
        stats = getattr(scheduler, "connector_prefix_cache_stats", None)
        if stats is not None:
            stats.reset = True
        return tiers[0]
    worst = min(tiers, key=lambda tier: _WORST_FIRST.index(tier.state))
    return Tier(worst.state, worst.reason, "; ".join(tier.message for tier in tiers if tier.message))


def _reset(connector: object) -> Tier:
    name = type(connector).__name__
    try:
        answer = connector.reset_cache()  # type: ignore[attr-defined]
    except Exception as error:  # a connector may raise anything
        logger.exception("kvctl: %s raised when it was reset", name)
        return Tier("failed", "OPERATION_RAISED", f"{name} raised {type(error).__name__}: {error}"[:500])
    if answer is None:
        return Tier("unsupported", "TIER_UNSUPPORTED", f"{name} cannot be reset; clear its store where it runs")
    if not answer:
        return Tier("pending", "CONNECTOR_BUSY", f"{name} still has transfers in flight; ask again later")
    return Tier("done")


def start_lazy_walks_over(scheduler: Scheduler) -> None:
    """Lazy offload walks the free queue towards its end, a piece a step, and remembers the last block that it saw.
    Sorting puts blocks that it has not seen before that one, where it would never look: they would be evicted unsaved.
    At the front again, as after a reset of its own, it passes over what it has saved already.
    """
    for connector in connectors(scheduler.connector):
        manager = getattr(connector, "scheduler_manager", None)
        if manager is not None and isinstance(getattr(manager, "_cursor", None), KVCacheBlock):
            manager._cursor = None
