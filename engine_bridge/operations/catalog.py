"""Which message starts which operation."""

from __future__ import annotations

from typing import Final, Literal

from engine_bridge import protocol
from engine_bridge.operations import Context, Verdict
from engine_bridge.operations.pause import pause, resume
from engine_bridge.operations.relieve import relieve
from engine_bridge.operations.reorder import reorder
from engine_bridge.operations.reset import reset
from engine_bridge.port import EnginePort, Work

OPERATION_NAMES: Final[
    dict[type[protocol.Mutation], Literal["reset", "reorder", "relieve", "pause", "renew", "resume"]]
] = {
    protocol.Reset: "reset",
    protocol.Reorder: "reorder",
    protocol.Relieve: "relieve",
    protocol.Pause: "pause",
    protocol.Resume: "resume",
}


def begin(port: EnginePort, request: protocol.Mutation, context: Context) -> Work[Verdict]:
    """The operation for a request, not started yet."""
    match request:
        case protocol.Reset():
            return reset(port, request, context)
        case protocol.Reorder():
            return reorder(port, request, context)
        case protocol.Relieve():
            return relieve(port, request, context)
        case protocol.Pause():
            return pause(port, request, context)
        case protocol.Resume():
            return resume(port, request, context)
