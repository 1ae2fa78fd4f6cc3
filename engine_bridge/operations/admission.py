"""Admission: the engine's evidence, completed with what only the bridge knows. Judging it is the sidecar's part."""

from __future__ import annotations

from typing import Final

import msgspec

from engine_bridge import protocol
from engine_bridge.operations import Memory
from engine_bridge.operations.pause import scheduling_state
from engine_bridge.port import EnginePort

MAX_CONTIGUITY_BLOCKS: Final = 16_384
"""Free blocks walked for one answer at most: about a millisecond of the engine's thread."""


def read_admission(port: EnginePort, request: protocol.Admission, memory: Memory) -> protocol.Evidence:
    """Evidence at this step boundary; changes nothing."""
    blocks = max(0, min(request.contiguity_blocks, MAX_CONTIGUITY_BLOCKS))
    evidence = port.evidence(request.call, blocks)
    return msgspec.structs.replace(
        evidence, scheduling=scheduling_state(port, memory), weight_version=port.weight_version()
    )
