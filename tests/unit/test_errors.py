"""Errors as they travel: everything a caller needs, in what gRPC can carry."""

from __future__ import annotations

import uuid

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from kvctl.v1 import errors_pb2, replica_pb2, types_pb2

from sidecar.rpc import errors
from sidecar.rpc.errors import Precondition, Violation, failure


class Received(grpc.RpcError):
    """A call's error as a client library presents it."""

    def __init__(self, code, details="", trailing=()):
        self._code, self._details, self._trailing = code, details, trailing

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailing


def reset_response(engines: int, text: str = "", failed: int = -1) -> replica_pb2.ResetPrefixCacheResponse:
    return replica_pb2.ResetPrefixCacheResponse(
        request_id=str(uuid.uuid4()),
        engines=[
            types_pb2.EngineReset(
                status=types_pb2.EngineStatus(
                    engine=types_pb2.EngineRef(data_parallel_rank=rank, incarnation="ab" * 16),
                    code=9 if rank == failed else 0,
                    message=text,
                )
            )
            for rank in range(engines)
        ],
    )


def wire_bytes(error: errors.Failure) -> int:
    """What text and details take in HTTP/2 headers: percent-encoded text, base64 details."""
    text = errors.clean_text(error.message)
    percent = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in text.encode())
    details = errors.trailing_metadata(error)[0][1]
    return percent + (len(details) + 2) // 3 * 4


def through_the_wire(error: errors.Failure) -> errors.Failure:
    return errors.parse(Received(error.code, error.message, errors.trailing_metadata(error)))


def test_everything_said_on_one_end_is_read_on_the_other():
    sent = failure(
        grpc.StatusCode.FAILED_PRECONDITION,
        "BLOCKS_HELD_BY_REQUESTS",
        "4 blocks are held",
        metadata={"request_id": "x"},
        retry_after=0.5,
        violations=[Violation("scope", "no")],
        preconditions=[Precondition("BLOCKS_HELD", "engine 0", "wait")],
        result=reset_response(2),
    )
    got = through_the_wire(sent)
    assert (got.code, got.reason, got.message, got.metadata) == (sent.code, sent.reason, sent.message, sent.metadata)
    assert (got.retry_after, got.violations, got.preconditions) == (0.5, sent.violations, sent.preconditions)
    assert got.result == sent.result


def test_a_reason_that_is_not_in_the_list_cannot_be_sent():
    with pytest.raises(ValueError, match="NO_SUCH_REASON"):
        failure(grpc.StatusCode.INTERNAL, "NO_SUCH_REASON", "x")


def test_every_reason_of_the_schema_can_be_sent():
    for name in errors_pb2.Reason.keys():  # noqa: SIM118
        reason = name.removeprefix("REASON_")
        assert through_the_wire(failure(grpc.StatusCode.INTERNAL, reason, "x")).reason == reason


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=5000), st.integers(0, 80), st.text(max_size=300), st.integers(0, 40))
def test_an_error_always_fits_into_trailing_metadata(message, engines, text, violations):
    error = failure(
        grpc.StatusCode.FAILED_PRECONDITION,
        "CONNECTOR_BUSY",
        message,
        metadata={str(n): text for n in range(20)},
        retry_after=1,
        violations=[Violation("field", text)] * violations,
        preconditions=[Precondition("T", "s", text)] * violations,
        result=reset_response(engines, errors.clean_text(text)),
    )
    assert wire_bytes(error) < 8000
    assert through_the_wire(error).reason == "CONNECTOR_BUSY"


def test_a_result_that_does_not_fit_loses_succeeded_engines_first_and_says_so():
    whole = reset_response(200, "y" * 60, failed=199)
    got = through_the_wire(failure(grpc.StatusCode.FAILED_PRECONDITION, "CONNECTOR_BUSY", "x", result=whole)).result
    assert isinstance(got, replica_pb2.ResetPrefixCacheResponse)
    assert got.truncated
    assert 0 < len(got.engines) < 200
    assert got.engines[-1].status.engine.data_parallel_rank == 199
    assert not whole.truncated


@given(st.text())
def test_text_is_cut_to_valid_utf8_without_control_characters(text):
    cut = errors.clean_text(text, 40)
    assert len(cut.encode()) <= 40
    assert not any(ord(character) < 32 for character in cut)


def test_bytes_that_are_not_utf8_do_not_break_the_text():
    broken = b"disk \xff\xfe full".decode("utf-8", "surrogateescape")
    assert errors.clean_text(broken).encode() == b"disk ?? full"


def test_the_status_agrees_with_what_grpc_status_demands():
    status = errors.to_status(failure(grpc.StatusCode.ABORTED, "REQUEST_ID_REUSED", "line\nbreak"))
    assert status.code == code_pb2.ABORTED
    assert status.message == "line break"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("kvctl", "REQUEST_ID_REUSED")


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", "REPLICA_UNREACHABLE"),
        (grpc.StatusCode.UNAVAILABLE, "Trying to connect an http1.x server", "NOT_A_SIDECAR"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "NOT_A_SIDECAR"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "OUTCOME_UNKNOWN"),
        (grpc.StatusCode.UNKNOWN, "boom", "PROTOCOL_ERROR"),
    ],
)
def test_an_error_without_details_says_what_its_absence_means(code, details, reason):
    assert errors.parse(Received(code, details)).reason == reason


def test_details_that_cannot_be_read_are_no_reason_to_fail():
    got = errors.parse(Received(grpc.StatusCode.INTERNAL, "x", ((errors.DETAILS_KEY, b"\xff\xff\xff"),)))
    assert got.code is grpc.StatusCode.INTERNAL
    assert "cannot be read" in got.message


def test_a_newer_servers_result_type_leaves_the_rest_readable():
    status = errors.to_status(failure(grpc.StatusCode.ABORTED, "CANCELLED", "x"))
    status.details.add(type_url="type.googleapis.com/kvctl.v1.FromTheFuture", value=b"\x0a\x01x")
    got = errors.from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert (got.reason, got.result) == ("CANCELLED", None)
