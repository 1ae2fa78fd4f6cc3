"""One way to fail over gRPC, for every server and client here.

A bare gRPC status has a code and a sentence. That is too little: a caller must tell "refused, try later" from "refused
for good", and must not lose the results of the engines that did succeed. So every error of this project carries
google.rpc details: ErrorInfo always (domain `kvctl`, a reason of errors.proto), RetryInfo, PreconditionFailure and
BadRequest where the code calls for them, and the typed response itself.

Two limits shape the code. Trailing metadata must stay under 8 KiB, gRPC's soft limit, or a peer drops the whole status;
binary metadata grows by a third on the wire and every non-ASCII byte of the text triples. And the text must be valid
UTF-8, or the reply is lost. What does not fit is cut and marked (`truncated`); GetOperation has it whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol
from urllib.parse import quote

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as PackedAny
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from kvctl.v1 import errors_pb2, replica_pb2  # noqa: F401 - replica_pb2 registers the types a status can carry

DOMAIN: Final = "kvctl"
"""Domain of every ErrorInfo."""

RECORDS_REACH_BACK: Final = "records_reach_back_s"
"""ErrorInfo metadata of OPERATION_NOT_FOUND: for how many seconds an operation would have been on record."""

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata key that holds a google.rpc.Status."""

MAX_TEXT_BYTES: Final = 1024
"""Longest status text, UTF-8 bytes."""

MAX_TRAILER_BYTES: Final = 7600
"""What text and details may take on the wire; 8 KiB is the soft limit and gRPC's own trailers need some of it."""

REASONS: Final = frozenset(name.removeprefix("REASON_") for name in errors_pb2.Reason.keys())  # noqa: SIM118
"""Every reason of errors.proto as it goes over the wire."""

_TYPE_PREFIX: Final = "type.googleapis.com/"
_NOT_METADATA_TEXT: Final = re.compile(r"[\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that cannot be accepted."""

    field: str
    """Path of the field, e.g. "running_requests"."""
    description: str
    """What was found, what was expected."""


@dataclass(frozen=True, slots=True)
class Precondition:
    """One thing that must change before the same request can succeed."""

    type: str
    """UPPER_SNAKE, e.g. "BLOCKS_HELD"."""
    subject: str
    """Whom it concerns, e.g. "engine 1"."""
    description: str
    """What was found, what to do."""


@dataclass(slots=True, eq=False)
class Failure(Exception):  # noqa: N818 - named as callers speak of it
    """An error as it is sent or was received. Raise it in a handler, or get it from `parse`."""

    code: grpc.StatusCode
    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    """ErrorInfo metadata, e.g. the id of the operation in the way."""
    retry_after: float | None = None
    """Seconds after which a retry may succeed; None when retrying is not advised."""
    violations: Sequence[Violation] = ()
    preconditions: Sequence[Precondition] = ()
    result: Message | None = None
    """The typed response: what each engine did, although the call failed as a whole."""

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason}: {self.message}"


def failure(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *,
    metadata: Mapping[str, str] | None = None,
    retry_after: float | None = None,
    violations: Sequence[Violation] = (),
    preconditions: Sequence[Precondition] = (),
    result: Message | None = None,
) -> Failure:
    """Build an error to raise. ValueError when the reason is not listed in errors.proto: that is a defect here."""
    if reason not in REASONS:
        raise ValueError(f"reason {reason!r} is not in errors.proto")
    return Failure(
        code,
        reason,
        clean_text(message),
        dict(metadata or {}),
        retry_after,
        tuple(violations),
        tuple(preconditions),
        result,
    )


def clean_text(text: str, limit: int = MAX_TEXT_BYTES) -> str:
    """Text that can go over the wire: valid UTF-8, no control characters but spaces, at most `limit` bytes."""
    flat = _NOT_METADATA_TEXT.sub(" ", text)
    raw = flat.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode("utf-8")
    return raw[: limit - 3].decode("utf-8", "ignore") + "..."


# --- sending -----------------------------------------------------------------------------------------------------


def to_status(error: Failure) -> status_pb2.Status:
    """The google.rpc.Status of an error, small enough for trailing metadata."""
    text = clean_text(error.message)
    status = status_pb2.Status(code=error.code.value[0], message=text)
    _pack(status, _error_info(error))
    if error.retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(max(0, int(error.retry_after * 1e9)))
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    room = (MAX_TRAILER_BYTES - len(quote(text))) * 3 // 4
    _pack_fitting(status, room, error_details_pb2.BadRequest(), "field_violations", _field_violations(error))
    _pack_fitting(status, room, error_details_pb2.PreconditionFailure(), "violations", _precondition_violations(error))
    if error.result is not None:
        _pack_result(status, room, error.result)
    return status


def trailing_metadata(error: Failure) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the details of an error."""
    return ((DETAILS_KEY, to_status(error).SerializeToString()),)


class AbortableContext(Protocol):
    """The part of a servicer context that ends a call."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
    ) -> NoReturn:
        """Raise through the handler and answer with this status."""


async def abort(context: AbortableContext, error: Failure, more: tuple[tuple[str, str | bytes], ...] = ()) -> NoReturn:
    """End a call with this error; `more` goes along in the trailing metadata."""
    await context.abort(error.code, clean_text(error.message), (*trailing_metadata(error), *more))


def _error_info(error: Failure) -> error_details_pb2.ErrorInfo:
    metadata = {clean_text(key, 64): clean_text(value, 256) for key, value in list(error.metadata.items())[:8]}
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)


def _field_violations(error: Failure) -> list[Message]:
    kind = error_details_pb2.BadRequest.FieldViolation
    return [kind(field=v.field, description=clean_text(v.description, 300)) for v in error.violations]


def _precondition_violations(error: Failure) -> list[Message]:
    kind = error_details_pb2.PreconditionFailure.Violation
    return [
        kind(type=p.type, subject=p.subject, description=clean_text(p.description, 300)) for p in error.preconditions
    ]


def _pack(status: status_pb2.Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _pack_fitting(
    status: status_pb2.Status, room: int, holder: Message, field_name: str, items: Sequence[Message]
) -> None:
    """Pack as many items as fit: what does not is said in the text and the result anyway."""
    used = status.ByteSize() + 96
    kept: list[Message] = []
    for item in items:
        used += item.ByteSize() + 4
        if used > room:
            break
        kept.append(item)
    if kept:
        getattr(holder, field_name).extend(kept)
        _pack(status, holder)


def _pack_result(status: status_pb2.Status, room: int, result: Message) -> None:
    """Pack the typed response, dropping engines (succeeded ones first) until it fits."""
    packed = PackedAny()
    packed.Pack(result)
    spare = room - status.ByteSize() - 8
    if packed.ByteSize() <= spare:
        status.details.append(packed)
        return
    smaller = type(result)()
    smaller.CopyFrom(result)
    names = smaller.DESCRIPTOR.fields_by_name
    if "engines" not in names or "truncated" not in names:
        return
    smaller.truncated = True  # type: ignore[attr-defined]
    engines = list(smaller.engines)  # type: ignore[attr-defined]
    while engines and packed.ByteSize() > spare:
        succeeded = [index for index, engine in enumerate(engines) if engine.status.code == 0]
        engines.pop(succeeded[-1] if succeeded else -1)
        del smaller.engines[:]  # type: ignore[attr-defined]
        smaller.engines.extend(engines)  # type: ignore[attr-defined]
        packed.Pack(smaller)
    status.details.append(packed)


# --- receiving ---------------------------------------------------------------------------------------------------

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

_REASON_WITHOUT_DETAILS: Final = {
    grpc.StatusCode.UNAVAILABLE: "REPLICA_UNREACHABLE",
    grpc.StatusCode.DEADLINE_EXCEEDED: "OUTCOME_UNKNOWN",
    grpc.StatusCode.UNIMPLEMENTED: "NOT_A_SIDECAR",
    grpc.StatusCode.UNAUTHENTICATED: "BAD_CREDENTIALS",
    grpc.StatusCode.PERMISSION_DENIED: "ROLE_TOO_SMALL",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "TOO_MANY_OPERATIONS",
    grpc.StatusCode.CANCELLED: "CANCELLED",
    grpc.StatusCode.NOT_FOUND: "OPERATION_NOT_FOUND",
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_FIELD",
}

_OTHER_PROTOCOL: Final = re.compile(
    r"http1|HTTP/1|wrong version number|Received http2 header with status", re.IGNORECASE
)


def parse(error: grpc.RpcError) -> Failure:
    """Read an error from a call, asyncio or blocking, with or without details.

    Without details it did not come from a server of this project: the reason then says what that means (nobody
    answered, the deadline passed here, something else listens at that address).
    """
    code = error.code()
    text = error.details() or ""
    raw = _details_bytes(error)
    if raw is not None:
        try:
            return from_status(status_pb2.Status.FromString(raw))
        except DecodeError:
            text = f"{text} (its details cannot be read)"
    reason = _REASON_WITHOUT_DETAILS.get(code, "PROTOCOL_ERROR")
    if code is grpc.StatusCode.UNAVAILABLE and _OTHER_PROTOCOL.search(text):
        reason = "NOT_A_SIDECAR"
        text = f"what answers there does not speak gRPC ({text})"
    return Failure(code, reason, clean_text(text or code.name))


def from_status(status: status_pb2.Status) -> Failure:
    """Read an error from a google.rpc.Status."""
    found = Failure(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), "", status.message)
    metadata: dict[str, str] = {}
    for detail in status.details:
        _read_detail(found, metadata, detail)
    found.metadata = metadata
    if not found.reason:
        found.reason = _REASON_WITHOUT_DETAILS.get(found.code, "PROTOCOL_ERROR")
    return found


def _read_detail(found: Failure, metadata: dict[str, str], detail: PackedAny) -> None:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    unmet = error_details_pb2.PreconditionFailure()
    if detail.Unpack(info):
        found.reason = info.reason
        metadata.update(info.metadata)
    elif detail.Unpack(retry):
        found.retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    elif detail.Unpack(bad):
        found.violations = tuple(Violation(v.field, v.description) for v in bad.field_violations)
    elif detail.Unpack(unmet):
        found.preconditions = tuple(Precondition(v.type, v.subject, v.description) for v in unmet.violations)
    elif detail.type_url.startswith(_TYPE_PREFIX + "kvctl.v1."):
        found.result = _unpack_typed(detail)


def _unpack_typed(detail: PackedAny) -> Message | None:
    try:
        descriptor = descriptor_pool.Default().FindMessageTypeByName(detail.type_url.removeprefix(_TYPE_PREFIX))
    except KeyError:
        return None  # a newer server's type: the code, reason and text still say what happened
    message: Message = message_factory.GetMessageClass(descriptor)()
    detail.Unpack(message)
    return message


def _details_bytes(error: grpc.RpcError) -> bytes | None:
    trailing: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            return value
    return None
