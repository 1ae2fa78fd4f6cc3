"""What became of an operation whose answer was lost, or that this process never saw. Pure but for the asking.

An engine answers a Lookup from its own record and reads its socket in order, so an id that it does not know after its
deadline was never executed. An engine that is gone takes its record along: the result is then ENGINE_RESTARTED, and
the one sure thing is that its successor's cache is cold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import msgspec
from google.protobuf.message import Message

from engine_bridge import protocol
from sidecar.backends.engine import Answered, EngineBackend, Lost, Submitted, Unreachable
from sidecar.replica.aggregate import EngineAnswer, Folded
from sidecar.replica.requests import Kind
from sidecar.rpc.errors import Failure, failure

Recollection = protocol.Found | Lost | Unreachable
"""What an engine says when it is asked for a request id."""


def same(one: protocol.Mutation, other: protocol.Mutation) -> bool:
    """Whether two requests ask for the same: everything but call and deadline."""
    return fingerprint(one) == fingerprint(other)


def fingerprint(mutation: protocol.Mutation) -> bytes:
    """What makes two requests the same."""
    return protocol.encoder.encode(msgspec.structs.replace(mutation, call=0, deadline_ns=0))


def restarted(answer: EngineAnswer) -> Unreachable:
    """The engine that may have run it is gone."""
    return Unreachable(
        "ENGINE_RESTARTED",
        f"engine {answer.rank} ({answer.incarnation[:8]}), which was asked, is gone and what it did is not known; "
        "a successor starts with a cold cache",
        sent=True,
    )


def said(rank: int, asked: asyncio.Task[Submitted]) -> Submitted:
    """What an engine said that was asked, or is no longer waited for; see `EngineBackend.submit`."""
    if asked.cancelled():
        return Lost("not_executed", f"engine {rank} was not reached in time, and will not run it")
    return asked.result()


def learn(found: Recollection) -> Submitted | None:
    """What a lookup teaches about a lost answer; None when it is still not known."""
    if not isinstance(found, protocol.Found):
        return None
    if found.outcome is not None:
        return Answered(found.outcome)
    if found.known:
        return None
    return Lost("not_executed", "the engine has no record of this request id: it never took it up and never will")


def recalled(engine: EngineBackend, found: Recollection) -> EngineAnswer:
    """One engine's part of an operation that this process has no record of."""
    submitted: Submitted
    if isinstance(found, protocol.Found):
        submitted = learn(found) or Lost("unknown", f"engine {engine.rank} is still running it")
    elif isinstance(found, Lost):
        submitted = Lost("unknown", f"whether engine {engine.rank} ran it cannot be asked now: {found.message}")
    else:
        submitted = Unreachable(found.reason, found.message, sent=True)
    return EngineAnswer(engine.rank, engine.incarnation, submitted, replayed=True)


def blank(kind: Kind, request_id: str) -> protocol.Mutation:
    """Stands for a mutation whose arguments are not known any more."""
    match kind:
        case "reset":
            return protocol.Reset(0, request_id, 0, "fail")
        case "reorder":
            return protocol.Reorder(0, request_id, 0, "idle")
        case "relieve":
            return protocol.Relieve(0, request_id, 0)
        case "pause":
            return protocol.Pause(0, request_id, 0, 0)
        case "resume":
            return protocol.Resume(0, request_id, 0)


def replayed(folded: Folded) -> Folded:
    """The recorded result, marked as such in every engine's status."""
    response: Message = type(folded.response)()
    response.CopyFrom(folded.response)
    for engine in response.engines:  # type: ignore[attr-defined]
        engine.status.replayed = True
    return replace(folded, response=response)


def cannot_tell(request_id: str, unasked: Sequence[Lost | Unreachable]) -> Failure:
    """No record here, and an engine that could know cannot be asked: neither found nor not found."""
    gone = next((answer for answer in unasked if isinstance(answer, Unreachable)), None)
    text = (
        f"operation {request_id} is not on record in this sidecar, and an engine cannot be asked: {unasked[0].message}"
    )
    if gone is not None:
        return failure(grpc.StatusCode.UNAVAILABLE, gone.reason, text, metadata={"request_id": request_id})
    return failure(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "OUTCOME_UNKNOWN",
        text,
        metadata={"request_id": request_id, "execution": "UNKNOWN"},
    )
