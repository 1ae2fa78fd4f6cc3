"""From what one call gave to what a person is told about that target: pure functions.

The hard part is being honest about calls that failed. An error that carries our ErrorInfo was written by a sidecar,
which knows what happened. Any other error was made by the transport: whether the call had an effect then depends on
whether it was ever sent, and when that cannot be told, the outcome is UNKNOWN, never FAILED.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import EnumDescriptor
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.rpc import errors

DUPLICATE_TARGET: Final = "DUPLICATE_TARGET"
TARGET_NOT_READY: Final = "TARGET_NOT_READY"
ROLLOUT_STOPPED: Final = "ROLLOUT_STOPPED"
NOT_A_SIDECAR: Final = "NOT_A_SIDECAR"
REPLICA_UNREACHABLE: Final = "REPLICA_UNREACHABLE"
OUTCOME_UNKNOWN: Final = "OUTCOME_UNKNOWN"
_METHOD_NOT_SERVED: Final = "METHOD_NOT_SERVED"

NOT_CALLED: Final = frozenset({fleet_pb2.TARGET_OUTCOME_SKIPPED, fleet_pb2.TARGET_OUTCOME_CANCELLED})
"""Outcomes of targets whose turn never came, or that were none at their turn."""

_GROUPS_TOLD: Final = 3
"""Reasons that `why_not` names; the rest are counted."""

MutationResult = (
    replica_pb2.ResetPrefixCacheResponse
    | replica_pb2.ReorderFreeQueueResponse
    | replica_pb2.RelieveAdmissionResponse
    | replica_pb2.PauseSchedulingResponse
    | replica_pb2.ResumeSchedulingResponse
)

RESULT_FIELDS: Final = {
    replica_pb2.ResetPrefixCacheResponse: "reset",
    replica_pb2.ReorderFreeQueueResponse: "reorder",
    replica_pb2.RelieveAdmissionResponse: "relieve",
    replica_pb2.PauseSchedulingResponse: "pause",
    replica_pb2.ResumeSchedulingResponse: "resume",
}
"""Type of a result -> its field in TargetResult."""

_DENIED: Final = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
_NEVER_SENT: Final = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_SPEAKS_HTTP1: Final = ("http1.x server", "Expected SETTINGS frame as the first frame")
_WEB_PROXY: Final = re.compile(r"Received http2 header with status: (\d+)")
_SPECIFIC: Final = re.compile(r"(?:Failed to connect to remote host|error|recvmsg): ?([A-Z][a-z][^:()]+)")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed call, read."""

    code: str
    """Canonical gRPC code name."""
    reason: str
    """UPPER_SNAKE reason; empty when the transport made the error."""
    message: str
    retry_after_s: float = 0.0
    result: MutationResult | None = None
    """The typed result that came with the error."""

    @property
    def from_sidecar(self) -> bool:
        """Whether a sidecar wrote it."""
        return bool(self.reason)


def read_failure(error: grpc.aio.AioRpcError) -> Failure:
    """Read an error from a call. Only an error with our details gets a reason here: see `Failure.from_sidecar`."""
    if errors.DETAILS_KEY not in error.trailing_metadata():
        return Failure(error.code().name, "", errors.clean_text(error.details() or ""))
    told = errors.parse(error)
    result = cast("MutationResult", told.result) if type(told.result) in RESULT_FIELDS else None
    return Failure(told.code.name, told.reason, told.message, told.retry_after or 0.0, result)


def unreachable(failure: Failure, address: str, within_s: float) -> Failure:
    """A failure to learn who is at an address, told in words: nothing listens, no sidecar, no answer."""
    if failure.reason == _METHOD_NOT_SERVED:
        what = f"{address} is a server of kvctl and no sidecar; a coordinator is given with --coordinator."
        return Failure("UNAVAILABLE", NOT_A_SIDECAR, what)
    if failure.from_sidecar:
        return failure
    text = failure.message
    if any(mark in text for mark in _SPEAKS_HTTP1):
        what = f"{address} answers HTTP/1, not gRPC: that is vLLM's own port or a web server. Give the sidecar's port."
        return Failure("UNAVAILABLE", NOT_A_SIDECAR, what)
    if proxied := _WEB_PROXY.search(text):
        what = f"{address} answered HTTP status {proxied[1]}: a proxy or load balancer. Give each sidecar's address."
        return Failure("UNAVAILABLE", NOT_A_SIDECAR, what)
    if failure.code == "UNIMPLEMENTED":
        what = f"{address} speaks gRPC and does not serve kvctl.v1.CacheAdmin. Give the sidecar's port."
        return Failure("UNAVAILABLE", NOT_A_SIDECAR, what)
    if failure.code == "DEADLINE_EXCEEDED":
        return Failure(
            "UNAVAILABLE", REPLICA_UNREACHABLE, f"no answer from {address} within {max(round(within_s, 1), 0.1):g} s"
        )
    if failure.code == "UNAVAILABLE":
        return Failure("UNAVAILABLE", REPLICA_UNREACHABLE, f"{address}: {brief(text)}")
    return Failure(failure.code, failure.reason, f"{address}: {brief(text)}")


def brief(text: str) -> str:
    """The telling part of one of gRPC's nested error texts."""
    if "CERTIFICATE_VERIFY_FAILED" in text or "Ssl handshake failed" in text or "SSL_ERROR" in text:
        return "the TLS handshake failed; check --ca, --cert and --key, and whether the sidecar uses TLS at all"
    if "Domain name not found" in text or "errors resolving" in text or "DNS resolution failed" in text:
        return "the host name cannot be resolved"
    if "SETTINGS frame" in text or "connect timeout" in text.lower() or "timed out" in text.lower():
        return "no answer"
    if found := _SPECIFIC.search(text):
        return found[1].strip().lower()
    if "recvmsg:" in text:
        return "the connection was reset"
    return text[:200] or "no reason given"


def of_answer(result: MutationResult) -> fleet_pb2.TargetResult:
    """A target whose every engine did all that was asked."""
    row = fleet_pb2.TargetResult(outcome=fleet_pb2.TARGET_OUTCOME_SUCCEEDED, code="OK")
    _attach(row, result)
    return row


def of_failure(failure: Failure, *, sent: bool) -> fleet_pb2.TargetResult:
    """A target whose call failed. `sent`: the call may have reached the sidecar."""
    row = fleet_pb2.TargetResult(code=failure.code, reason=failure.reason, message=failure.message)
    if failure.result is not None:
        _attach(row, failure.result)
    if failure.from_sidecar:
        row.outcome, row.execution = _told_by_sidecar(failure)
        return row
    if not sent or failure.message.startswith(_NEVER_SENT):
        row.outcome = fleet_pb2.TARGET_OUTCOME_UNREACHABLE
        row.execution = types_pb2.EXECUTION_NOT_EXECUTED
        row.reason = REPLICA_UNREACHABLE if failure.code == "UNAVAILABLE" else ""
        row.message = brief(failure.message)
        return row
    if failure.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL"):
        row.outcome = fleet_pb2.TARGET_OUTCOME_UNKNOWN
        row.execution = types_pb2.EXECUTION_UNKNOWN
        row.reason = OUTCOME_UNKNOWN
        row.message = f"the answer was lost ({brief(failure.message)}); ask again with the same request id"
        return row
    row.outcome = fleet_pb2.TARGET_OUTCOME_UNREACHABLE if failure.code in _DENIED else fleet_pb2.TARGET_OUTCOME_FAILED
    return row


def _told_by_sidecar(failure: Failure) -> tuple[fleet_pb2.TargetOutcome.ValueType, types_pb2.Execution.ValueType]:
    if failure.code in _DENIED or failure.reason in (NOT_A_SIDECAR, REPLICA_UNREACHABLE):
        return fleet_pb2.TARGET_OUTCOME_UNREACHABLE, types_pb2.EXECUTION_NOT_EXECUTED
    if failure.code == "UNKNOWN":  # UNCONFIRMED: accepted, and nothing shows what came of it
        return fleet_pb2.TARGET_OUTCOME_UNKNOWN, types_pb2.EXECUTION_UNKNOWN
    if failure.code != "DEADLINE_EXCEEDED":
        return fleet_pb2.TARGET_OUTCOME_FAILED, types_pb2.EXECUTION_UNSPECIFIED
    if failure.reason == OUTCOME_UNKNOWN:
        return fleet_pb2.TARGET_OUTCOME_UNKNOWN, types_pb2.EXECUTION_UNKNOWN
    done = failure.result is not None and any(engine.status.code == 0 for engine in failure.result.engines)
    return fleet_pb2.TARGET_OUTCOME_FAILED, (
        types_pb2.EXECUTION_UNSPECIFIED if done else types_pb2.EXECUTION_NOT_EXECUTED
    )


def of_record(record: replica_pb2.GetOperationResponse) -> fleet_pb2.TargetResult | None:
    """A target whose lost answer was asked for again; None while the sidecar has no final word."""
    if not record.finished:
        return None
    which = record.WhichOneof("result")
    result: MutationResult | None = getattr(record, which) if which else None
    if record.code == grpc.StatusCode.OK.value[0] and result is not None:
        return of_answer(result)
    return of_failure(Failure(code_name(record.code), record.reason, record.message, result=result), sent=True)


def code_name(number: int) -> str:
    """Canonical name of a gRPC code number."""
    return _CODE_NAMES.get(number, "UNKNOWN")


def enum_word(kind: EnumDescriptor, number: int, prefix: str) -> str:
    """A value of an enum as a word: "succeeded". One that a newer peer sent and this code does not know: its number."""
    known = kind.values_by_number.get(number)
    return known.name.removeprefix(prefix).lower() if known else f"value_{number}"


_CODE_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


def _attach(row: fleet_pb2.TargetResult, result: MutationResult) -> None:
    getattr(row, RESULT_FIELDS[type(result)]).CopyFrom(result)


_COUNTED: Final = {
    fleet_pb2.TARGET_OUTCOME_SUCCEEDED: "succeeded",
    fleet_pb2.TARGET_OUTCOME_FAILED: "failed",
    fleet_pb2.TARGET_OUTCOME_UNREACHABLE: "unreachable",
    fleet_pb2.TARGET_OUTCOME_UNKNOWN: "unknown",
    fleet_pb2.TARGET_OUTCOME_SKIPPED: "skipped",
    fleet_pb2.TARGET_OUTCOME_CANCELLED: "cancelled",
}


def count(results: Iterable[fleet_pb2.TargetResult]) -> fleet_pb2.OutcomeCounts:
    """Targets by outcome."""
    counts = fleet_pb2.OutcomeCounts()
    for row in results:
        counts.total += 1
        if name := _COUNTED.get(row.outcome):
            setattr(counts, name, getattr(counts, name) + 1)
    return counts


def recount(
    counts: fleet_pb2.OutcomeCounts, before: fleet_pb2.TargetOutcome.ValueType, after: fleet_pb2.TargetOutcome.ValueType
) -> None:
    """Carry one target's change of outcome over to the counts."""
    if name := _COUNTED.get(before):
        setattr(counts, name, getattr(counts, name) - 1)
    if name := _COUNTED.get(after):
        setattr(counts, name, getattr(counts, name) + 1)


def conclude(operation: fleet_pb2.FleetOperation) -> None:
    """Say of an operation whose every target has ended how it stands, and why not every one succeeded."""
    operation.state = final_state(operation)
    operation.why = why_not(operation)


def why_not(operation: fleet_pb2.FleetOperation) -> str:
    """As in: 2 of 8 failed: ENGINE_SLEEPING; 1 unreachable: REPLICA_UNREACHABLE. Empty when every target succeeded.

    The reasons of most targets first; one that was skipped or cancelled for another's failure after those.
    """
    rows = [row for row in operation.results if row.reason != DUPLICATE_TARGET]
    groups = Counter(
        (row.outcome in NOT_CALLED, _COUNTED.get(row.outcome, "not finished"), row.reason or row.code)
        for row in rows
        if row.outcome != fleet_pb2.TARGET_OUTCOME_SUCCEEDED
    )
    found = sorted(groups.items(), key=lambda group: (group[0][0], -group[1], group[0]))
    told = [
        f"{number}{'' if position else f' of {len(rows)}'} {word}{f': {reason}' if reason else ''}"
        for position, ((_, word, reason), number) in enumerate(found[:_GROUPS_TOLD])
    ]
    if rest := sum(number for _, number in found[_GROUPS_TOLD:]):
        told.append(f"{rest} for other reasons")
    if operation.targets_incomplete:
        told.append("replicas may have been missed")
    return "; ".join(told)


def final_state(operation: fleet_pb2.FleetOperation) -> fleet_pb2.OperationState.ValueType:
    """Where an operation whose every target has ended stands.

    A duplicate address counts neither way: its replica has a row of its own. An incomplete set of targets is at best
    PARTIAL, and so is one with a skipped target.
    """
    rows = [row for row in operation.results if row.reason != DUPLICATE_TARGET]
    succeeded = sum(row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED for row in rows)
    if any(row.outcome == fleet_pb2.TARGET_OUTCOME_CANCELLED for row in rows):
        return fleet_pb2.OPERATION_STATE_CANCELLED
    if not succeeded:
        return fleet_pb2.OPERATION_STATE_FAILED
    if succeeded < len(rows) or operation.targets_incomplete:
        return fleet_pb2.OPERATION_STATE_PARTIAL
    return fleet_pb2.OPERATION_STATE_SUCCEEDED
