"""Many engines' answers, one status. Pure: values in, values out.

The RPC is OK only when every engine did all that was asked. Otherwise it fails with the code of the engine that most
needs someone to act, and carries every engine's result, so that neither a success nor a failure of a rank is lost.

The order of codes, most actionable first, and why: INTERNAL and INVALID_ARGUMENT are defects that no retry mends;
UNIMPLEMENTED needs another request or another engine; UNKNOWN and DEADLINE_EXCEEDED leave something to be asked
again; UNAVAILABLE needs the engine back; ABORTED and FAILED_PRECONDITION pass by themselves; CANCELLED was wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
from google.protobuf.message import Message
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from sidecar.backends.engine import Answered, Lost, Submitted, Unreachable
from sidecar.replica import results
from sidecar.rpc.errors import REASONS, Failure, Precondition, clean_text, failure

Code = grpc.StatusCode

ORDER: Final = (
    Code.INTERNAL,
    Code.INVALID_ARGUMENT,
    Code.UNIMPLEMENTED,
    Code.UNKNOWN,
    Code.DEADLINE_EXCEEDED,
    Code.UNAVAILABLE,
    Code.ABORTED,
    Code.FAILED_PRECONDITION,
    Code.CANCELLED,
    Code.OK,
)

_BY_STATE: Final[dict[str, tuple[grpc.StatusCode, str]]] = {
    "done": (Code.OK, ""),
    "refused": (Code.FAILED_PRECONDITION, "BLOCKS_HELD_BY_REQUESTS"),
    "pending": (Code.FAILED_PRECONDITION, "CONNECTOR_BUSY"),
    "partial": (Code.UNIMPLEMENTED, "TIER_UNSUPPORTED"),
    "busy": (Code.ABORTED, "OPERATION_IN_PROGRESS"),
    "mismatch": (Code.ABORTED, "REQUEST_ID_REUSED"),
    "expired": (Code.DEADLINE_EXCEEDED, "NOT_EXECUTED"),
    "withdrawn": (Code.CANCELLED, "CANCELLED"),
    "unsupported": (Code.UNIMPLEMENTED, "ENGINE_LACKS_CAPABILITY"),
    "invalid": (Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    "raised": (Code.INTERNAL, "OPERATION_RAISED"),
    "stopping": (Code.UNAVAILABLE, "ENGINE_STOPPING"),
}
"""State of an outcome -> code, and the reason when the engine gave none."""

_BY_REASON: Final[dict[tuple[str, str], grpc.StatusCode]] = {
    ("withdrawn", "NEVER_IDLE"): Code.DEADLINE_EXCEEDED,
    ("withdrawn", "NOT_EXECUTED"): Code.DEADLINE_EXCEEDED,
    ("partial", "OPERATION_RAISED"): Code.INTERNAL,
    ("partial", "BLOCKS_HELD_BY_REQUESTS"): Code.FAILED_PRECONDITION,
    ("partial", "CONNECTOR_BUSY"): Code.FAILED_PRECONDITION,
    ("partial", "UNCONFIRMED"): Code.UNKNOWN,
    ("pending", "UNCONFIRMED"): Code.UNKNOWN,
}

_RETRY_HINT_S: Final[dict[str, float]] = {
    "BLOCKS_HELD_BY_REQUESTS": 1.0,
    "BLOCKS_HELD_BY_TRANSFERS": 1.0,
    "REMOTE_LOADS_IN_FLIGHT": 1.0,
    "CONNECTOR_BUSY": 1.0,
    "OPERATION_IN_PROGRESS": 0.2,
    "ENGINE_STARTING": 2.0,
    "ENGINE_STOPPING": 5.0,
    "NO_ENGINE": 5.0,
}
"""Seconds to wait before a retry can help, where the engine gave no hint."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One engine's part of an operation."""

    rank: int
    incarnation: str
    submitted: Submitted
    alive_after: bool = True
    """False when the process was gone when it was looked at again after its answer."""
    replayed: bool = False
    """True when this is what was recorded for the request id, and nothing ran now."""

    @property
    def settled(self) -> bool:
        """Whether the engine itself said what happened, so that asking again can teach nothing new."""
        return isinstance(self.submitted, Answered) and self.submitted.outcome.state not in ("busy", "mismatch")

    @property
    def reached(self) -> bool:
        """Whether the engine may have seen the request: only then does the request id count as used."""
        if isinstance(self.submitted, Unreachable):
            return self.submitted.sent
        return not (isinstance(self.submitted, Answered) and self.submitted.outcome.state in ("busy", "mismatch"))


@dataclass(frozen=True, slots=True)
class Folded:
    """The whole of an operation."""

    response: Message
    code: grpc.StatusCode
    reason: str = ""
    message: str = ""
    retry_after: float | None = None
    preconditions: Sequence[Precondition] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every engine did all that was asked."""
        return self.code is Code.OK

    def failure(self) -> Failure:
        """As an error, carrying the response."""
        return failure(
            self.code,
            self.reason,
            self.message,
            metadata=self.metadata,
            retry_after=self.retry_after,
            preconditions=self.preconditions,
            result=self.response,
        )


@dataclass(frozen=True, slots=True)
class _Judged:
    answer: EngineAnswer
    code: grpc.StatusCode
    reason: str
    message: str
    execution: types.Execution.ValueType
    retry_after: float | None


def fold(
    kind: str,
    request_id: str,
    answers: Sequence[EngineAnswer],
    mutation: protocol.Mutation | None = None,
    *,
    did: str = "did it",
) -> Folded:
    """One status and one response from every engine's answer, by rank. `kind` is a name of protocol.Outcome.operation;
    `mutation` tells which tiers were asked for, None when that is not known any more; `did` is what the other engines
    did, for the headline.
    """
    judged = [_judge(answer) for answer in sorted(answers, key=lambda a: (a.rank, a.incarnation))]
    response = _response(kind, request_id, judged, mutation)
    if not judged:
        raise ValueError("an operation without any engine has no result")
    worst = min(judged, key=lambda j: ORDER.index(j.code))
    if worst.code is Code.OK:
        return Folded(response, Code.OK)
    if worst.code is Code.DEADLINE_EXCEEDED:
        # Of two ranks that were late, the one that may have begun speaks for the whole.
        late = (j for j in judged if j.code is worst.code and j.execution == types.EXECUTION_UNKNOWN)
        worst = next(late, worst)
    failed = [j for j in judged if j.code is not Code.OK]
    hints = [j.retry_after for j in failed if j.retry_after is not None]
    return Folded(
        response,
        worst.code,
        worst.reason,
        _headline(worst, failed, len(judged), did),
        max(hints) if hints and worst.retry_after is not None else None,
        tuple(
            Precondition(j.reason, f"engine {j.answer.rank}", j.message)
            for j in failed
            if j.code is Code.FAILED_PRECONDITION
        ),
        _metadata(request_id, worst, failed, judged),
    )


def _judge(answer: EngineAnswer) -> _Judged:
    submitted = answer.submitted
    if isinstance(submitted, Lost):
        unknown = submitted.execution == "unknown"
        return _Judged(
            answer,
            Code.DEADLINE_EXCEEDED,
            _known_reason(submitted.reason, "OUTCOME_UNKNOWN" if unknown else "NOT_EXECUTED"),
            clean_text(submitted.message, 600),
            types.EXECUTION_UNKNOWN if unknown else types.EXECUTION_NOT_EXECUTED,
            None,
        )
    if isinstance(submitted, Unreachable):
        reason = _known_reason(submitted.reason, "REPLICA_UNREACHABLE")
        code = Code.INTERNAL if reason == "PROTOCOL_ERROR" else Code.UNAVAILABLE
        if reason in ("NEEDS_ENGINE_BRIDGE", "NEEDS_DEV_MODE", "ENGINE_LACKS_CAPABILITY"):
            code = Code.UNIMPLEMENTED
        return _Judged(
            answer,
            code,
            reason,
            clean_text(submitted.message, 600),
            types.EXECUTION_UNKNOWN if submitted.sent else types.EXECUTION_NOT_EXECUTED,
            _RETRY_HINT_S.get(reason),
        )
    return _judge_outcome(answer, submitted.outcome)


def _judge_outcome(answer: EngineAnswer, outcome: protocol.Outcome) -> _Judged:
    code, reason = _BY_STATE.get(outcome.state, (Code.INTERNAL, "PROTOCOL_ERROR"))
    reason = _known_reason(outcome.reason, reason) if code is not Code.OK else ""
    code = _BY_REASON.get((outcome.state, reason), code)
    message = clean_text(outcome.message, 600) if code is not Code.OK else ""
    if code is Code.OK and not answer.alive_after:
        return _Judged(
            answer,
            Code.UNAVAILABLE,
            "ENGINE_DIED_DURING_OPERATION",
            f"engine {answer.rank} answered that it was done, and its process has died since; a successor starts with "
            "a cold cache",
            types.EXECUTION_UNKNOWN,
            None,
        )
    if code is not Code.OK and not message:
        message = f"engine {answer.rank} answered {outcome.state!r} without saying why"
    hint = outcome.retry_after_ms / 1e3 if outcome.retry_after_ms > 0 else _RETRY_HINT_S.get(reason)
    execution = types.EXECUTION_NOT_EXECUTED if code is Code.DEADLINE_EXCEEDED else types.EXECUTION_UNSPECIFIED
    return _Judged(answer, code, reason, message, execution, hint if code is not Code.OK else None)


def _known_reason(reason: str, otherwise: str) -> str:
    return reason if reason in REASONS else otherwise


def _headline(worst: _Judged, failed: Sequence[_Judged], total: int, did: str) -> str:
    """The sentence a person reads first."""
    text = worst.message
    engine = f"engine {worst.answer.rank}"
    if total == 1:
        return text
    if not text.startswith(engine):
        text = f"{engine}: {text}"
    others = f"; all other engines {did}" if len(failed) == 1 else f"; {total - len(failed)} of {total} engines {did}"
    return text + others


def _metadata(request_id: str, worst: _Judged, failed: Sequence[_Judged], judged: Sequence[_Judged]) -> dict[str, str]:
    found = {"request_id": request_id, "engines_failed": ",".join(str(j.answer.rank) for j in failed)[:200]}
    submitted = worst.answer.submitted
    if isinstance(submitted, Answered) and submitted.outcome.other_request_id:
        found["other_request_id"] = submitted.outcome.other_request_id
    executions = {j.execution for j in judged}
    if types.EXECUTION_UNKNOWN in executions:
        found["execution"] = "UNKNOWN"
    elif executions == {types.EXECUTION_NOT_EXECUTED}:
        found["execution"] = "NOT_EXECUTED"  # of the whole only where it is true of every rank
    return found


def status_of(judged: _Judged) -> types.EngineStatus:
    """One engine's status."""
    submitted = judged.answer.submitted
    engine_replayed = isinstance(submitted, Answered) and submitted.outcome.replayed
    return types.EngineStatus(
        engine=types.EngineRef(data_parallel_rank=judged.answer.rank, incarnation=judged.answer.incarnation),
        code=judged.code.value[0],
        reason=judged.reason,
        message=judged.message,
        replayed=judged.answer.replayed or engine_replayed,
        execution=judged.execution,
    )


def _response(kind: str, request_id: str, judged: Sequence[_Judged], mutation: protocol.Mutation | None) -> Message:
    match kind:
        case "reset":
            return api.ResetPrefixCacheResponse(request_id=request_id, engines=[_reset(j, mutation) for j in judged])
        case "reorder":
            return api.ReorderFreeQueueResponse(request_id=request_id, engines=[_reorder(j, mutation) for j in judged])
        case "relieve":
            return api.RelieveAdmissionResponse(request_id=request_id, engines=[_relief(j) for j in judged])
        case "pause":
            return api.PauseSchedulingResponse(request_id=request_id, engines=[_scheduling(j) for j in judged])
        case "resume":
            return api.ResumeSchedulingResponse(request_id=request_id, engines=[_scheduling(j) for j in judged])
        case "renew":
            return api.RenewPauseResponse(engines=[_scheduling(j) for j in judged])
    raise ValueError(f"no such operation: {kind}")


def _result(judged: _Judged) -> protocol.Result | None:
    submitted = judged.answer.submitted
    return submitted.outcome.result if isinstance(submitted, Answered) else None


def _reset(judged: _Judged, mutation: protocol.Mutation | None) -> types.EngineReset:
    result = _result(judged)
    status = status_of(judged)
    if isinstance(result, protocol.ResetResult):
        return results.reset(result, status)
    return results.untouched_reset(mutation, status)


def _reorder(judged: _Judged, mutation: protocol.Mutation | None) -> types.EngineReorder:
    result = _result(judged)
    status = status_of(judged)
    if isinstance(result, protocol.ReorderResult):
        return results.reorder(result, status)
    scope = mutation.scope if isinstance(mutation, protocol.Reorder) else ""
    return types.EngineReorder(status=status, scope=results.SCOPES.get(scope, types.REORDER_SCOPE_UNSPECIFIED))


def _relief(judged: _Judged) -> types.EngineRelief:
    result = _result(judged)
    status = status_of(judged)
    return (
        results.relief(result, status)
        if isinstance(result, protocol.RelieveResult)
        else types.EngineRelief(status=status)
    )


def _scheduling(judged: _Judged) -> types.EngineScheduling:
    result = _result(judged)
    status = status_of(judged)
    if isinstance(result, protocol.SchedulingResult):
        return results.scheduling(result, status)
    return types.EngineScheduling(status=status)
