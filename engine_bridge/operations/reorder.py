"""Reorder: put free blocks back into block-id order, and show what that changed."""

from __future__ import annotations

from engine_bridge import protocol
from engine_bridge.operations import NO_COST, Context, Verdict
from engine_bridge.port import EnginePort, Work


def reorder(port: EnginePort, request: protocol.Reorder, context: Context) -> Work[Verdict]:
    """Relink free blocks in slices; "idle" refuses while any block is held."""
    lacking = port.capabilities().get(f"reorder.{request.scope}", "unknown")
    if lacking:
        return Verdict("unsupported", reason="ENGINE_LACKS_CAPABILITY", message=f"reorder.{request.scope}: {lacking}")
    holders = port.holders()
    if request.scope == "idle" and holders.held_blocks:
        requests = holders.running_requests + holders.waiting_requests
        reason = "BLOCKS_HELD_BY_REQUESTS" if requests else "BLOCKS_HELD_BY_TRANSFERS"
        message = f"{holders.held_blocks} blocks are held ({requests} requests); use scope uncached or all_free"
        return Verdict("refused", reason=reason, message=message, retry_after_ms=500)
    before = yield from port.contiguity()
    moved = yield from port.reorder("uncached" if request.scope == "uncached" else "all_free")
    after = yield from port.contiguity()
    result = protocol.ReorderResult(request.scope, moved, before, after, holders, NO_COST)
    return Verdict("done", result)
