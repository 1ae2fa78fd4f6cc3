"""Relief: give back the blocks of one waiting holder when waiting holders deadlock admissions."""

from __future__ import annotations

from typing import Final

from engine_bridge import protocol
from engine_bridge.operations import NO_COST, Context, Verdict
from engine_bridge.port import EnginePort, Work

MAX_ATTEMPTS: Final = 8


def relieve(port: EnginePort, request: protocol.Relieve, context: Context) -> Work[Verdict]:
    """Relieve one holder, or say why not."""
    yield from ()
    lacking = port.capabilities().get("relieve", "unknown")
    if lacking:
        return Verdict("unsupported", reason="ENGINE_LACKS_CAPABILITY", message=f"relieve: {lacking}")
    found = port.deadlock()
    if found:
        context.memory.relief_attempts = 0
        return Verdict("refused", reason="NOT_DEADLOCKED", message=f"admissions are not deadlocked: {found}")
    if context.memory.relief_attempts >= MAX_ATTEMPTS:
        message = f"relief was tried {MAX_ATTEMPTS} times for this stall; abort a request or restart the engine"
        return Verdict("refused", reason="RELIEF_EXHAUSTED", message=message)
    context.memory.relief_attempts += 1
    request_id, freed = port.relieve_one()
    result = protocol.RelieveResult(
        "HELD_BLOCKS_DEADLOCK", [request_id], freed, context.memory.relief_attempts, MAX_ATTEMPTS, NO_COST
    )
    return Verdict("done", result)
