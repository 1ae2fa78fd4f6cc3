"""Reset: forget cached prefixes, tier by tier, and say truthfully what became of each.

Three ways to treat requests that hold blocks. `fail` refuses while anything is held. `preempt` gives every running
request's blocks back first, and refuses before touching anything when that would not be enough: vLLM's own reset finds
out afterwards, with every request already preempted. `keep` leaves them where they are: a held block without a hash is
a state vLLM knows, and the memory is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from engine_bridge import protocol
from engine_bridge.operations import NO_COST, Context, Verdict
from engine_bridge.port import EnginePort, Work

HELD_RETRY_MS: Final = 500
CONNECTOR_RETRY_MS: Final = 1000

logger = logging.getLogger("vllm.kvctl")

_NOT_REQUESTED: Final = protocol.Tier("not_requested")
_NOT_RUN: Final = protocol.Tier("not_run", message="an earlier tier was refused")


def reset(port: EnginePort, request: protocol.Reset, context: Context) -> Work[Verdict]:
    """Run one reset. Refused means that nothing at all was changed."""
    verdict = _cannot(port, request)
    if verdict is not None:
        return verdict
    running = port.running_requests()
    holders = port.holders()
    caching = port.identity.prefix_caching
    preempted = quarantined = 0
    context.untouched = True
    needs_quiet = request.running == "preempt" or (request.running == "fail" and port.held_blocks() == 0)
    holding = needs_quiet and port.must_settle(request.encoder)
    if holding:
        port.hold()
    try:
        while holding and port.in_flight():
            yield "step"
            if context.clock() >= context.deadline_ns:
                message = "the deadline passed while model steps in flight were running out; nothing was changed"
                return Verdict("withdrawn", reason="NOT_EXECUTED", message=message)
        refusal = _refusal(port, request, caching=caching)
        if refusal is not None:
            return _refused(refusal, request, running, holders, caching=caching)
        context.untouched = False
        if request.running == "preempt":
            preempted = port.preempt_running()
        if request.quarantine:
            quarantined = port.quarantine_running()
        dropped = port.drop_prefix_cache()
        context.note_reset(request.running)
        if request.running != "keep":
            port.bump_aux_generation()
    finally:
        if holding:
            port.release()
    connector = _tier(request.connector, port.reset_connector, "connector")
    multimodal = _tier(request.mm, port.reset_multimodal, "multimodal")
    encoder = _tier(request.encoder, port.reset_encoder, "encoder")
    # After the connector: what its own tier has to say must not stay behind until the next step.
    published, event_tiers = port.publish_cleared()
    reordered = (yield from _reorder(port, holders, context)) if request.reorder else None
    prefix = protocol.Tier("done", message="" if dropped else "0 blocks were cached")
    if not caching:
        prefix = protocol.Tier(
            "done",
            "PREFIX_CACHING_DISABLED",
            "prefix caching is switched off on this engine: there was nothing to reset",
        )
    result = protocol.ResetResult(
        prefix=prefix,
        connector=connector,
        multimodal=multimodal,
        encoder=encoder,
        cached_blocks_dropped=dropped,
        requests_running=running,
        requests_kept=running if request.running == "keep" else 0,
        requests_preempted=preempted,
        requests_quarantined=quarantined,
        holders=holders,
        prefix_caching=caching,
        event_published=published,
        event_tiers=event_tiers,
        cost=NO_COST,
        reorder=reordered,
    )
    return _judge(result)


def reset_for_lease(port: EnginePort) -> list[str]:
    """What an expired lease does to the caches of an engine that is paused with nothing in flight: all tiers, requests
    kept, and what they go on to fill barred from the cache where that can be had. Returns what could not be cleared.
    """
    trouble = []
    if not port.capabilities().get("reset.quarantine", ""):
        port.quarantine_running()
    elif port.running_requests():
        trouble.append("blocks that kept requests fill can enter the cache: " + port.capabilities()["reset.quarantine"])
    port.drop_prefix_cache()
    for name, clear in (
        ("connector", port.reset_connector),
        ("multimodal", port.reset_multimodal),
        ("encoder", port.reset_encoder),
    ):
        tier = _tier(True, clear, name)
        if tier.state not in ("done", "not_configured"):
            trouble.append(f"{name} tier {tier.state}: {tier.message}")
    port.publish_cleared()
    return trouble


def _cannot(port: EnginePort, request: protocol.Reset) -> Verdict | None:
    """What is wrong with the request itself, or missing on this engine."""
    if request.quarantine and request.running != "keep":
        return Verdict("invalid", reason="INVALID_COMBINATION", message="quarantine goes with keep only")
    if request.wait_for_idle and request.running != "fail":
        return Verdict("invalid", reason="INVALID_COMBINATION", message="wait_for_idle goes with fail only")
    wanted = [f"reset.{request.running}"]
    wanted += ["reset.quarantine"] if request.quarantine else []
    wanted += ["reset.wait_for_idle"] if request.wait_for_idle else []
    wanted += ["reorder.all_free"] if request.reorder else []
    capabilities = port.capabilities()
    lacking = [f"{name}: {capabilities.get(name, 'unknown')}" for name in wanted if capabilities.get(name, "unknown")]
    if not lacking:
        return None
    return Verdict("unsupported", reason="ENGINE_LACKS_CAPABILITY", message="; ".join(lacking))


def _refusal(port: EnginePort, request: protocol.Reset, *, caching: bool) -> Verdict | None:
    """Why the prefix cache cannot be dropped now, looked at before anything is changed."""
    if request.running == "keep" or (request.running == "fail" and not caching):
        return None
    left = port.held_blocks() if request.running == "fail" else port.blocks_after_preempt()
    if left == 0:
        return None
    holders = port.holders()
    requests = holders.running_requests + holders.waiting_requests
    who = _who_holds(holders)
    if request.running == "preempt":
        reason = "REMOTE_LOADS_IN_FLIGHT" if holders.remote_loads else "BLOCKS_HELD_BY_TRANSFERS"
        if not holders.remote_loads and holders.waiting_requests:
            reason = "BLOCKS_HELD_BY_REQUESTS"
        advice = f"a preempt would leave {left} of them held, so nothing was preempted; try again, or use keep"
    elif holders.paused and requests:
        reason = "HELD_WHILE_PAUSED"
        advice = "the scheduler is paused, so they will not finish; resume, or use preempt or keep"
    elif requests:
        reason, advice = "BLOCKS_HELD_BY_REQUESTS", "wait for them (wait_for_idle), or use preempt or keep"
    else:
        reason, advice = "BLOCKS_HELD_BY_TRANSFERS", "no request holds them; try again when the transfers have ended"
    return Verdict("refused", reason=reason, message=f"{who}; {advice}", retry_after_ms=HELD_RETRY_MS)


def _who_holds(holders: protocol.Holders) -> str:
    """Whoever holds blocks, and nobody who does not: this is read in a narrow table."""
    loading = f" ({holders.remote_loads} of them loading KV from a remote tier)" if holders.remote_loads else ""
    found = [
        f"{holders.running_requests} running" if holders.running_requests else "",
        f"{holders.waiting_requests} waiting" if holders.waiting_requests else "",
    ]
    noun = "request" if holders.running_requests + holders.waiting_requests == 1 else "requests"
    requests = " and ".join(filter(None, found))
    transfers = f"transfers ({holders.transfer_blocks} blocks)" if holders.transfer_blocks else ""
    who = " and ".join(filter(None, [f"{requests} {noun}{loading}" if requests else "", transfers]))
    return f"{holders.held_blocks} blocks are held by {who or 'nobody the scheduler knows'}"


def _refused(
    refusal: Verdict, request: protocol.Reset, running: int, holders: protocol.Holders, *, caching: bool
) -> Verdict:
    def other(requested: bool) -> protocol.Tier:
        return _NOT_RUN if requested else _NOT_REQUESTED

    result = protocol.ResetResult(
        prefix=protocol.Tier("refused", refusal.reason, refusal.message),
        connector=other(request.connector),
        multimodal=other(request.mm),
        encoder=other(request.encoder),
        cached_blocks_dropped=0,
        requests_running=running,
        requests_kept=0,
        requests_preempted=0,
        requests_quarantined=0,
        holders=holders,
        prefix_caching=caching,
        event_published=False,
        event_tiers=[],
        cost=NO_COST,
    )
    return Verdict("refused", result, refusal.reason, refusal.message, refusal.retry_after_ms)


def _tier(requested: bool, clear: Callable[[], protocol.Tier], name: str) -> protocol.Tier:
    """Clear one tier. One that raises must not hide what became of the others."""
    if not requested:
        return _NOT_REQUESTED
    try:
        return clear()
    except Exception as error:  # a connector may raise anything
        logger.exception("kvctl: clearing the %s tier raised", name)
        return protocol.Tier("failed", "OPERATION_RAISED", f"{type(error).__name__}: {error}"[:500])


def _reorder(port: EnginePort, holders: protocol.Holders, context: Context) -> Work[protocol.ReorderResult]:
    context.meter.lap()
    before = yield from port.contiguity()
    moved = yield from port.reorder("all_free")
    after = yield from port.contiguity()
    return protocol.ReorderResult("all_free", moved, before, after, holders, context.meter.lap())


def _judge(result: protocol.ResetResult) -> Verdict:
    """One state out of four tiers: what needs a person's attention most."""
    tiers = (("connector", result.connector), ("multimodal", result.multimodal), ("encoder", result.encoder))
    for state in ("failed", "unsupported", "refused"):
        for name, tier in tiers:
            if tier.state == state:
                message = f"{name} tier {state}: {tier.message}; the prefix cache was reset"
                return Verdict("partial", result, tier.reason, message)
    for name, tier in tiers:
        if tier.state == "pending":
            message = f"{name} tier pending: {tier.message}; the prefix cache was reset"
            return Verdict("pending", result, tier.reason, message, CONNECTOR_RETRY_MS)
    return Verdict("done", result, message=result.prefix.message)
