"""What a request must look like, stated once, as a table.

Every rule is a field, a test and a sentence; all broken rules are reported together, as field violations, before
anything is asked of an engine. Two kinds are generic over every message: an enum value that this server does not know
(proto3 delivers it silently), and a request id that is not a UUID.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.rpc.errors import Violation, failure

LEAST_LEASE_S: Final = 1.0
LONGEST_LEASE_S: Final = 600.0
LEAST_INTERVAL_S: Final = 0.1
LONGEST_INTERVAL_S: Final = 3600.0
LONGEST_WEIGHT_VERSION: Final = 256
"""Characters."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Rule(Generic[M]):
    """One thing that must not be."""

    field: str
    broken: Callable[[M], bool]
    says: str
    combination: bool = False
    """True when no single field is wrong, only the set of them."""


def seconds(duration: Duration) -> float:
    """A protobuf duration in seconds."""
    return float(duration.seconds) + duration.nanos / 1e9


_KEEP: Final = types.RUNNING_REQUESTS_KEEP
_FAIL: Final = (types.RUNNING_REQUESTS_UNSPECIFIED, types.RUNNING_REQUESTS_FAIL)

_RESET: Final[tuple[Rule[api.ResetPrefixCacheRequest], ...]] = (
    Rule(
        "wait_for_idle",
        lambda r: r.wait_for_idle and r.running_requests not in _FAIL,
        "goes with running_requests FAIL only: PREEMPT and KEEP need no idle moment",
        combination=True,
    ),
    Rule(
        "quarantine_running",
        lambda r: r.quarantine_running and r.running_requests != _KEEP,
        "goes with running_requests KEEP only: under FAIL and PREEMPT no request keeps its blocks",
        combination=True,
    ),
    Rule(
        "quarantine_running",
        lambda r: r.purpose == types.PURPOSE_WEIGHT_UPDATE and r.running_requests == _KEEP and not r.quarantine_running,
        "must be set for running_requests KEEP with purpose WEIGHT_UPDATE: blocks that kept requests fill hold KV of "
        "the old weights and would be served to new requests; or use PREEMPT",
        combination=True,
    ),
)

_PAUSE: Final[tuple[Rule[api.PauseSchedulingRequest], ...]] = (
    Rule("lease", lambda r: not _is_lease(r.lease), "must be from 1 s to 10 min"),
)

_RENEW: Final[tuple[Rule[api.RenewPauseRequest], ...]] = (
    Rule("pause_request_id", lambda r: not r.pause_request_id, "is required: the request id of the pause"),
    Rule("lease", lambda r: not _is_lease(r.lease), "must be from 1 s to 10 min"),
)

_RESUME: Final[tuple[Rule[api.ResumeSchedulingRequest], ...]] = (
    Rule(
        "weight_version",
        lambda r: len(r.weight_version) > LONGEST_WEIGHT_VERSION,
        f"must be at most {LONGEST_WEIGHT_VERSION} characters",
    ),
    Rule(
        "force",
        lambda r: r.force and bool(r.pause_request_id),
        "ends whatever pause there is; name the pause with pause_request_id, or set force, not both",
        combination=True,
    ),
)

_WATCH: Final[tuple[Rule[api.WatchAdmissionRequest], ...]] = (
    Rule("interval", lambda r: not _is_interval(r.interval), "must be 0 (changes only), or from 100 ms to 1 h"),
)

_GET: Final[tuple[Rule[api.GetOperationRequest], ...]] = (
    Rule("request_id", lambda r: not r.request_id, "is required: the request id of the operation"),
)

_CANCEL: Final[tuple[Rule[api.CancelOperationRequest], ...]] = (
    Rule("request_id", lambda r: not r.request_id, "is required: the request id of the operation"),
)

_RULES: Final[dict[type[Message], tuple[Rule[Message], ...]]] = {
    api.ResetPrefixCacheRequest: _RESET,  # type: ignore[dict-item]
    api.PauseSchedulingRequest: _PAUSE,  # type: ignore[dict-item]
    api.RenewPauseRequest: _RENEW,  # type: ignore[dict-item]
    api.ResumeSchedulingRequest: _RESUME,  # type: ignore[dict-item]
    api.WatchAdmissionRequest: _WATCH,  # type: ignore[dict-item]
    api.GetOperationRequest: _GET,  # type: ignore[dict-item]
    api.CancelOperationRequest: _CANCEL,  # type: ignore[dict-item]
}


def check(request: Message) -> None:
    """Failure INVALID_ARGUMENT with every violation, or nothing."""
    fields = [*_generic(request)]
    combinations: list[Violation] = []
    for rule in _RULES.get(type(request), ()):
        if rule.broken(request):
            (combinations if rule.combination else fields).append(Violation(rule.field, rule.says))
    violations = [*fields, *combinations]
    if not violations:
        return
    raise failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD" if fields else "INVALID_COMBINATION",
        "; ".join(f"{violation.field} {violation.description}" for violation in violations),
        metadata={"field": violations[0].field},
        violations=violations,
    )


def _generic(request: Message) -> Iterator[Violation]:
    for field in request.DESCRIPTOR.fields:
        value = getattr(request, field.name)
        if field.type == FieldDescriptor.TYPE_ENUM and field.enum_type is not None:
            known = field.enum_type.values_by_number
            if value not in known:
                names = ", ".join(known[number].name for number in sorted(known) if number)
                yield Violation(field.name, f"has the unknown value {value}; expected one of {names}")
        if field.name.endswith("request_id") and value and not _is_uuid(value):
            yield Violation(field.name, f"must be a UUID, found {value[:80]!r}")


_UUID_DIGITS: Final = re.compile(r"[0-9a-fA-F]{32}")


def _is_uuid(text: str) -> bool:
    """In any of its spellings. `uuid.UUID` alone takes whatever `int` takes: full-width digits, underscores, signs."""
    bare = text.replace("urn:", "").replace("uuid:", "").strip("{}").replace("-", "")
    return _UUID_DIGITS.fullmatch(bare) is not None


def _is_lease(duration: Duration) -> bool:
    return LEAST_LEASE_S <= seconds(duration) <= LONGEST_LEASE_S


def _is_interval(duration: Duration) -> bool:
    length = seconds(duration)
    return length == 0 or LEAST_INTERVAL_S <= length <= LONGEST_INTERVAL_S
