"""validate_only: everything a mutation would be checked for, as far as that can be seen without changing anything.

The engine is asked for evidence only. A moment later the real operation may find another state, so a clean check is a
forecast: what it does find (a missing capability, blocks held now, an engine out of reach) is certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine_bridge import protocol
from sidecar.backends.engine import Answered, EngineBackend, Lost, Submitted, Unreachable
from sidecar.replica.aggregate import EngineAnswer, Folded, fold
from sidecar.replica.requests import Wanted, capabilities_needed
from sidecar.rpc.deadlines import Deadline

_NOT_RUN = protocol.Tier("not_run", message="only checked: nothing was changed")
_NOT_REQUESTED = protocol.Tier("not_requested")
_ORDERED = protocol.Contiguity(0, 0, 0)


async def forecast(wanted: Wanted, engines: Sequence[EngineBackend], deadline: Deadline) -> Folded:
    """What the operation would be told now, as a result in which no tier was run."""
    submitted = await asyncio.gather(*(_look(wanted, engine, deadline) for engine in engines))
    answers = [
        EngineAnswer(engine.rank, engine.incarnation, answer) for engine, answer in zip(engines, submitted, strict=True)
    ]
    folded = fold(wanted.kind, wanted.request_id, answers, wanted.mutation, did="would do it")
    folded.response.validate_only = True  # type: ignore[attr-defined]
    return folded


async def _look(wanted: Wanted, engine: EngineBackend, deadline: Deadline) -> Submitted:
    facts = engine.facts
    trouble = engine.trouble
    if facts is None or trouble is not None:
        return trouble or Unreachable("ENGINE_NOT_ANSWERING", f"engine {engine.rank} has not introduced itself yet")
    capabilities = facts.capabilities
    lacking = [
        f"{name}: {capabilities.get(name, 'unknown to this engine')}"
        for name in capabilities_needed(wanted.mutation)
        if capabilities.get(name, "unknown")
    ]
    if lacking:
        reason = "NEEDS_ENGINE_BRIDGE" if facts.backend == "http" else "ENGINE_LACKS_CAPABILITY"
        return _outcome(wanted, "unsupported", reason, "; ".join(lacking))
    evidence = await engine.evidence(max(0.05, deadline.for_next_hop().remaining()), contiguity_blocks=0)
    if isinstance(evidence, Lost):
        return Lost("not_executed", evidence.message)
    if isinstance(evidence, Unreachable):
        return evidence
    return _judge(wanted, evidence)


def _judge(wanted: Wanted, evidence: protocol.Evidence) -> Answered:
    mutation = wanted.mutation
    held = evidence.blocks_total - evidence.blocks_free if evidence.blocks_total >= 0 <= evidence.blocks_free else 0
    if isinstance(mutation, protocol.Relieve) and evidence.verdict != "HELD_BLOCKS_DEADLOCK":
        return _outcome(wanted, "refused", "NOT_DEADLOCKED", "admissions are not deadlocked now", evidence)
    needs_idle = (
        isinstance(mutation, protocol.Reset) and mutation.running == "fail" and not mutation.wait_for_idle
    ) or (isinstance(mutation, protocol.Reorder) and mutation.scope == "idle")
    if needs_idle and held > 0:
        requests = evidence.running + evidence.waiting_holding_blocks
        who = f"{evidence.running} running and {evidence.waiting_holding_blocks} waiting requests hold blocks"
        reason = "BLOCKS_HELD_BY_REQUESTS" if requests else "BLOCKS_HELD_BY_TRANSFERS"
        return _outcome(wanted, "refused", reason, f"{held} blocks are held now: {who}", evidence)
    if isinstance(mutation, protocol.Reset) and mutation.running == "preempt" and evidence.waiting_remote_kv:
        message = (
            f"{evidence.waiting_remote_kv} remote loads are in flight now, and a preempt would not free their blocks"
        )
        return _outcome(wanted, "refused", "REMOTE_LOADS_IN_FLIGHT", message, evidence)
    return _outcome(wanted, "done", "", "", evidence)


def _outcome(
    wanted: Wanted,
    state: protocol.OutcomeState,
    reason: str,
    message: str,
    evidence: protocol.Evidence | None = None,
) -> Answered:
    result = _result(wanted.mutation, evidence) if evidence is not None else None
    return Answered(protocol.Outcome(0, wanted.request_id, wanted.kind, state, reason, message, result))


def _result(mutation: protocol.Mutation, evidence: protocol.Evidence) -> protocol.Result | None:
    """What is known of the engine now, in the shape of a result that ran nothing."""
    holders = protocol.Holders(
        held_blocks=max(0, evidence.blocks_total - evidence.blocks_free),
        running_requests=max(0, evidence.running),
        waiting_requests=max(0, evidence.waiting_holding_blocks),
        remote_loads=max(0, evidence.waiting_remote_kv),
        transfer_blocks=max(0, evidence.blocks_orphaned),
        paused=bool(evidence.paused),
    )
    if isinstance(mutation, protocol.Reset):
        prefix = protocol.Tier(
            "not_run", message=f"only checked: {max(0, evidence.blocks_cached)} blocks are cached now"
        )
        return protocol.ResetResult(
            prefix,
            connector=_unrun(mutation.connector),
            multimodal=_unrun(mutation.mm),
            encoder=_unrun(mutation.encoder),
            cached_blocks_dropped=0,
            requests_running=max(0, evidence.running),
            requests_kept=0,
            requests_preempted=0,
            requests_quarantined=0,
            holders=holders,
            prefix_caching=True,
            event_published=False,
            event_tiers=[],
            cost=protocol.PauseCost(),
        )
    if isinstance(mutation, protocol.Reorder):
        now = evidence.contiguity or _ORDERED
        return protocol.ReorderResult(mutation.scope, 0, now, now, holders, protocol.PauseCost())
    return None


def _unrun(requested: bool) -> protocol.Tier:
    return _NOT_RUN if requested else _NOT_REQUESTED
