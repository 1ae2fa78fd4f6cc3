"""Relief: give back the blocks of one waiting holder when waiting holders deadlock admissions.

One holder a call, so that whoever asks sees what each one brought. A stall lasts until tokens move again; within one
stall no more than MAX_ATTEMPTS holders are relieved, because a relief that moves nothing means that something else is
wrong, and each costs a request its computed blocks.
"""

from __future__ import annotations

from typing import Final

from engine_bridge import protocol
from engine_bridge.operations import NO_COST, Context, Verdict
from engine_bridge.port import EnginePort, Work

MAX_ATTEMPTS: Final = 3


def relieve(port: EnginePort, request: protocol.Relieve, context: Context) -> Work[Verdict]:
    """Relieve one holder, or say why not."""
    yield from ()
    lacking = port.capabilities().get("relieve", "unknown")
    if lacking:
        return Verdict("unsupported", reason="ENGINE_LACKS_CAPABILITY", message=f"relieve: {lacking}")
    memory, tokens = context.memory, port.tokens_scheduled()
    if tokens != memory.relief_tokens:
        memory.relief_attempts = 0
    found = port.deadlock()
    if found:
        return Verdict("refused", reason="NOT_DEADLOCKED", message=f"admissions are not deadlocked: {found}")
    if memory.relief_attempts >= MAX_ATTEMPTS:
        message = (
            f"relief was tried {MAX_ATTEMPTS} times since tokens last moved and brought nothing; "
            "abort a waiting request that holds blocks, or restart the engine"
        )
        return Verdict("refused", reason="RELIEF_EXHAUSTED", message=message)
    request_id, freed = port.relieve_one()
    memory.relief_attempts += 1
    memory.relief_tokens = tokens
    result = protocol.RelieveResult(
        "HELD_BLOCKS_DEADLOCK", [request_id], freed, memory.relief_attempts, MAX_ATTEMPTS, NO_COST
    )
    return Verdict("done", result)
