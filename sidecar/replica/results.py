"""From the engine's results to the API's: one engine at a time, nothing added, nothing lost.

Texts come from another process and are cut to what a status can carry. A state or scope that this server does not know
(a newer bridge) becomes UNSPECIFIED instead of an error: the text beside it still says what happened.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from sidecar.rpc.errors import clean_text

TIER_TEXT_BYTES: Final = 400
"""Longest text of a tier."""

_TIERS: Final[dict[str, types.TierState.ValueType]] = {
    "done": types.TIER_STATE_DONE,
    "refused": types.TIER_STATE_REFUSED,
    "pending": types.TIER_STATE_PENDING,
    "not_configured": types.TIER_STATE_NOT_CONFIGURED,
    "unsupported": types.TIER_STATE_UNSUPPORTED,
    "not_requested": types.TIER_STATE_NOT_REQUESTED,
    "not_run": types.TIER_STATE_NOT_RUN,
    "failed": types.TIER_STATE_FAILED,
    "unconfirmed": types.TIER_STATE_UNCONFIRMED,
}
SCOPES: Final[dict[str, types.ReorderScope.ValueType]] = {
    "idle": types.REORDER_SCOPE_IDLE,
    "uncached": types.REORDER_SCOPE_UNCACHED,
    "all_free": types.REORDER_SCOPE_ALL_FREE,
}
_SCHEDULING: Final[dict[str, types.SchedulingState.ValueType]] = {
    "running": types.SCHEDULING_STATE_RUNNING,
    "paused": types.SCHEDULING_STATE_PAUSED,
    "abandoned_update": types.SCHEDULING_STATE_ABANDONED_UPDATE,
}


def tier(found: protocol.Tier) -> types.TierResult:
    """One tier."""
    return types.TierResult(
        state=_TIERS.get(found.state, types.TIER_STATE_UNSPECIFIED),
        reason=clean_text(found.reason, 64),
        message=clean_text(found.message, TIER_TEXT_BYTES),
    )


def holders(found: protocol.Holders) -> types.BlockHolders:
    """Who holds blocks."""
    return types.BlockHolders(
        held_blocks=found.held_blocks,
        running_requests=found.running_requests,
        waiting_requests=found.waiting_requests,
        remote_loads=found.remote_loads,
        transfer_blocks=found.transfer_blocks,
    )


def contiguity(found: protocol.Contiguity) -> types.Contiguity:
    """Order of a free queue; a queue of fewer than two blocks is in order."""
    pairs = found.free_blocks - 1
    return types.Contiguity(
        free_blocks=found.free_blocks,
        adjacent_pairs=found.adjacent_pairs,
        runs=found.runs,
        mean_run_length=found.free_blocks / found.runs if found.runs > 0 else 0.0,
        ratio=found.adjacent_pairs / pairs if pairs > 0 else 1.0,
        sampled=found.sampled,
    )


def cost(found: protocol.PauseCost) -> types.EnginePause:
    """What the engine thread paid."""
    return types.EnginePause(longest_us=found.longest_us, total_us=found.total_us, slices=found.slices)


def reorder(found: protocol.ReorderResult, status: types.EngineStatus | None) -> types.EngineReorder:
    """What a reorder did; without a status when it was part of a reset."""
    return types.EngineReorder(
        status=status,
        scope=SCOPES.get(found.scope, types.REORDER_SCOPE_UNSPECIFIED),
        blocks_moved=found.blocks_moved,
        before=contiguity(found.before),
        after=contiguity(found.after),
        pause=cost(found.cost),
        holders=holders(found.holders),
    )


def reset(found: protocol.ResetResult, status: types.EngineStatus) -> types.EngineReset:
    """What a reset did. "Done" without effect says so."""
    prefix = tier(found.prefix)
    if prefix.state == types.TIER_STATE_DONE and not prefix.message and found.cached_blocks_dropped == 0:
        prefix.message = "0 blocks were cached"
    return types.EngineReset(
        status=status,
        prefix_cache=prefix,
        connector=tier(found.connector),
        multimodal=tier(found.multimodal),
        encoder=tier(found.encoder),
        cached_blocks_dropped=found.cached_blocks_dropped,
        requests_running=found.requests_running,
        requests_kept=found.requests_kept,
        requests_preempted=found.requests_preempted,
        requests_quarantined=found.requests_quarantined,
        holders=holders(found.holders),
        prefix_caching_enabled=found.prefix_caching,
        event_published=found.event_published,
        event_tiers=[clean_text(name, 32) for name in found.event_tiers[:8]],
        reorder=reorder(found.reorder, None) if found.reorder is not None else None,
        pause=cost(found.cost),
    )


def relief(found: protocol.RelieveResult, status: types.EngineStatus) -> types.EngineRelief:
    """What a relief did."""
    verdict = f"VERDICT_{found.verdict_before}"
    known = types.Verdict.DESCRIPTOR.values_by_name
    return types.EngineRelief(
        status=status,
        verdict_before=types.Verdict.Value(verdict) if verdict in known else types.VERDICT_UNSPECIFIED,
        request_ids=[clean_text(request_id, 128) for request_id in found.request_ids[:16]],
        blocks_freed=found.blocks_freed,
        attempts=found.attempts,
        max_attempts=found.max_attempts,
        pause=cost(found.cost),
    )


def scheduling(found: protocol.SchedulingResult, status: types.EngineStatus) -> types.EngineScheduling:
    """Whether the engine schedules."""
    remaining = Duration()
    remaining.FromNanoseconds(max(0, found.lease_remaining_ns))
    return types.EngineScheduling(
        status=status,
        state=_SCHEDULING.get(found.state, types.SCHEDULING_STATE_UNSPECIFIED),
        weight_version=clean_text(found.weight_version, 256),
        lease_remaining=remaining,
        ended_by_lease=found.ended_by_lease,
    )


def untouched_reset(mutation: protocol.Mutation | None, status: types.EngineStatus) -> types.EngineReset:
    """A reset of which the engine gave no result: each tier that was asked for was not run, as far as is known."""
    asked = mutation if isinstance(mutation, protocol.Reset) else None

    def state(requested: bool) -> types.TierResult:
        wanted = types.TIER_STATE_NOT_RUN if requested else types.TIER_STATE_NOT_REQUESTED
        return types.TierResult(state=wanted if asked is not None else types.TIER_STATE_NOT_RUN)

    return types.EngineReset(
        status=status,
        prefix_cache=types.TierResult(state=types.TIER_STATE_NOT_RUN),
        connector=state(asked is not None and asked.connector),
        multimodal=state(asked is not None and asked.mm),
        encoder=state(asked is not None and asked.encoder),
        prefix_caching_enabled=True,
    )
