"""One call to one replica, and what became of it as a row of the fleet's result.

Every function here takes an open channel and a time limit in seconds, and never raises for what a replica or the
network did: that is a result like any other. A mutation names the sidecar process it is meant for and the instant after
which it must not begin (see `sidecar.rpc.late_calls`): the network may hold a call up for longer than its caller waits.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from kvctl.v1 import fleet_pb2, replica_pb2, replica_pb2_grpc, types_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.outcomes import Failure, MutationResult
from sidecar.coordinator.pauses import pause_meant
from sidecar.coordinator.port import Answer, Asked
from sidecar.rpc import errors, late_calls
from sidecar.rpc.errors import RECORDS_REACH_BACK
from sidecar.rpc.late_calls import Known

KINDS: Final = {
    "reset": types_pb2.OPERATION_KIND_RESET,
    "reorder": types_pb2.OPERATION_KIND_REORDER,
    "relieve": types_pb2.OPERATION_KIND_RELIEVE,
    "pause": types_pb2.OPERATION_KIND_PAUSE,
    "resume": types_pb2.OPERATION_KIND_RESUME,
}
"""Field of OperationSpec -> kind of operation."""

OTHER_INSTANCE: Final = "OTHER_INSTANCE"

Metadata = tuple[tuple[str, str], ...]
"""Credentials that go with a call."""

_QUESTION_S: Final = 5.0
"""Longest wait for what a sidecar has on record of a pause: without an answer there is still time to call it."""
_TOLERATED_DOUBT: Final = 0.2
"""Share of a call's time by which it may be taken for late too early; with more doubt the clock is asked for again."""


@dataclass(frozen=True, slots=True)
class _Sidecar:
    """Who answered over a channel."""

    name: str
    known: Known | None
    """None: a sidecar that does not tell its clock."""


_SIDECARS: Final[WeakKeyDictionary[grpc.aio.Channel, _Sidecar]] = WeakKeyDictionary()


async def call_target(
    channel: grpc.aio.Channel,
    spec: fleet_pb2.OperationSpec,
    request_id: str,
    replica: str,
    timeout_s: float,
    metadata: Metadata = (),
) -> Answer:
    """Run the operation on one replica, once.

    `replica` is the name that request ids are derived from; a resume finds the lease of a fleet-wide pause by it. A
    sidecar that was restarted meanwhile is asked who it is and called again.
    """
    started = time.monotonic()
    deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    sent, found = await _call(channel, spec, request_id, replica, deadline_ns, metadata)
    if isinstance(found, Failure) and found.reason == OTHER_INSTANCE:
        moved = await ask_again(channel, deadline_ns, metadata)
        sent, found = False, moved or found
        if moved is None:
            sent, found = await _call(channel, spec, request_id, replica, deadline_ns, metadata)
    if isinstance(found, Failure):
        row = outcomes.of_failure(found, sent=sent)
        if found.reason == OTHER_INSTANCE:
            row.execution = types_pb2.EXECUTION_NOT_EXECUTED
    else:
        row = outcomes.of_answer(found)
    row.request_id = request_id
    row.took.FromTimedelta(timedelta(seconds=time.monotonic() - started))
    return Answer(row, found.retry_after_s if isinstance(found, Failure) else 0.0)


async def _call(
    channel: grpc.aio.Channel,
    spec: fleet_pb2.OperationSpec,
    request_id: str,
    replica: str,
    deadline_ns: int,
    metadata: Metadata,
) -> tuple[bool, MutationResult | Failure]:
    """Whether the call may have reached the sidecar, and what it came to."""
    bound = await bound_in_time(channel, deadline_ns, metadata)
    if isinstance(bound, Failure):
        return False, bound
    pause_id = ""
    if spec.resume.pause_request_id and not spec.validate_only:

        async def ask(tried: str) -> Asked:
            limit_s = min(_left_s(deadline_ns) / 2, _QUESTION_S)
            return await ask_operation(channel, tried, limit_s, metadata)

        pause_id = await pause_meant(spec.resume.pause_request_id, replica, ask)
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    try:
        return True, await _invoke(stub, spec, request_id, pause_id, _left_s(deadline_ns), (*metadata, *bound))
    except grpc.aio.AioRpcError as error:
        return True, outcomes.read_failure(error)


async def bound_in_time(channel: grpc.aio.Channel, deadline_ns: int, metadata: Metadata = ()) -> Metadata | Failure:
    """Metadata by which a mutation over this channel does not begin after an instant of CLOCK_MONOTONIC here.

    Asks the sidecar for its clock when that is not known, or not well enough; a Failure when it cannot be asked, and
    the mutation must then not be sent.
    """
    sidecar = _SIDECARS.get(channel)
    now_ns = time.monotonic_ns()
    if sidecar is None:
        try:
            sidecar = _SIDECARS[channel] = (await _meet(channel, _left_s(deadline_ns), metadata))[1]
        except grpc.aio.AioRpcError as error:
            return outcomes.read_failure(error)
    elif sidecar.known and sidecar.known.doubt_ns(now_ns) > (deadline_ns - now_ns) * _TOLERATED_DOUBT:
        try:
            met = (await _meet(channel, _left_s(deadline_ns), metadata))[1]
        except grpc.aio.AioRpcError:
            met = sidecar  # what is known errs to the safe side
        if met.known and met.known.instance == sidecar.known.instance:
            sidecar = _SIDECARS[channel] = _Sidecar(met.name, sidecar.known.or_better(met.known))
    return sidecar.known.metadata(deadline_ns) if sidecar.known else ()


async def ask_again(channel: grpc.aio.Channel, deadline_ns: int, metadata: Metadata) -> Failure | None:
    """Who is there now, after another process than the one that was meant has answered; None when it may be called."""
    before = _SIDECARS.pop(channel, None)
    try:
        first, now = await _meet(channel, _left_s(deadline_ns), metadata)
        again, _ = await _meet(channel, _left_s(deadline_ns), metadata)
    except grpc.aio.AioRpcError as error:
        return outcomes.read_failure(error)
    if first.instance_id != again.instance_id:
        return _load_balancer("this address", first, again)
    if before is not None and before.name != now.name:
        _SIDECARS[channel] = before  # so that no later try takes the one for the other
        what = f"the replica {before.name} was here, and now {now.name} answers: nothing was done to it"
        return Failure("UNAVAILABLE", OTHER_INSTANCE, what)
    _SIDECARS[channel] = now
    return None


async def _meet(
    channel: grpc.aio.Channel, timeout_s: float, metadata: Metadata
) -> tuple[types_pb2.ReplicaInfo, _Sidecar]:
    """GetReplica, and what its trailing metadata tells."""
    sent_ns = time.monotonic_ns()
    call = replica_pb2_grpc.CacheAdminStub(channel).GetReplica(
        replica_pb2.GetReplicaRequest(), timeout=timeout_s, metadata=metadata
    )
    info = (await call).replica
    heard_ns = time.monotonic_ns()
    trailing = await call.trailing_metadata()
    return info, _Sidecar(info.name, late_calls.learn(trailing, sent_ns, heard_ns))


def _left_s(deadline_ns: int) -> float:
    return max((deadline_ns - time.monotonic_ns()) / 1e9, 0.001)


async def _invoke(
    stub: replica_pb2_grpc.CacheAdminAsyncStub,
    spec: fleet_pb2.OperationSpec,
    request_id: str,
    pause_id: str,
    timeout_s: float,
    metadata: Metadata,
) -> MutationResult:
    match spec.WhichOneof("operation"):
        case "reset":
            reset = replica_pb2.ResetPrefixCacheRequest()
            reset.CopyFrom(spec.reset)
            reset.request_id, reset.validate_only = request_id, spec.validate_only or spec.reset.validate_only
            return await stub.ResetPrefixCache(reset, timeout=timeout_s, metadata=metadata)
        case "reorder":
            reorder = replica_pb2.ReorderFreeQueueRequest()
            reorder.CopyFrom(spec.reorder)
            reorder.request_id, reorder.validate_only = request_id, spec.validate_only or spec.reorder.validate_only
            return await stub.ReorderFreeQueue(reorder, timeout=timeout_s, metadata=metadata)
        case "relieve":
            relieve = replica_pb2.RelieveAdmissionRequest(
                request_id=request_id, validate_only=spec.validate_only or spec.relieve.validate_only
            )
            return await stub.RelieveAdmission(relieve, timeout=timeout_s, metadata=metadata)
        case "pause":
            if spec.validate_only:
                return replica_pb2.PauseSchedulingResponse(request_id=request_id)
            pause = replica_pb2.PauseSchedulingRequest()
            pause.CopyFrom(spec.pause)
            pause.request_id = request_id
            return await stub.PauseScheduling(pause, timeout=timeout_s, metadata=metadata)
        case "resume":
            if spec.validate_only:
                return replica_pb2.ResumeSchedulingResponse(request_id=request_id)
            resume = replica_pb2.ResumeSchedulingRequest(request_id=request_id)
            resume.weight_version, resume.force = spec.resume.weight_version, spec.resume.force
            resume.pause_request_id = pause_id
            return await stub.ResumeScheduling(resume, timeout=timeout_s, metadata=metadata)
        case _:
            raise ValueError("the operation spec names no operation; set one of " + ", ".join(KINDS))


async def ask_operation(channel: grpc.aio.Channel, request_id: str, timeout_s: float, metadata: Metadata = ()) -> Asked:
    """What the replica has on record for a request id whose answer was lost."""
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    request = replica_pb2.GetOperationRequest(request_id=request_id)
    try:
        record = await stub.GetOperation(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return Asked(known=False, records_s=_records_s(error))
        failure = outcomes.read_failure(error)
        return Asked(None, Answer(outcomes.of_failure(failure, sent=True), failure.retry_after_s))
    row = outcomes.of_record(record)
    return Asked(known=True, answer=None if row is None else Answer(row))


def _records_s(error: grpc.aio.AioRpcError) -> float:
    """How far back the records reach in which an id was not found; without limit when the replica does not say."""
    told = errors.parse(error).metadata.get(RECORDS_REACH_BACK, "")
    return float(told) if told.isascii() and told.isdigit() else math.inf


async def cancel_operation(
    channel: grpc.aio.Channel, request_id: str, timeout_s: float, metadata: Metadata = ()
) -> bool:
    """Withdraw an operation that has had no effect yet; whether at least one engine did."""
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    request = replica_pb2.CancelOperationRequest(request_id=request_id)
    try:
        answer = await stub.CancelOperation(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError:
        return False
    return answer.cancelled


async def get_replica(
    channel: grpc.aio.Channel,
    address: str,
    timeout_s: float,
    metadata: Metadata = (),
    waited_s: float = 0.0,
    *,
    to_call_it: bool = False,
) -> types_pb2.ReplicaInfo | Failure:
    """Who answers at an address; a Failure in words when nobody does, or somebody who is no sidecar.

    Asked twice: two answers by two sidecars mean that a load balancer stands between, which would hand an operation
    to one replica of many and its retry to another. `to_call_it`: once is enough for a sidecar that refuses calls meant
    for another one. `timeout_s` is for both together; `waited_s`: time waited for it before, which the text of a
    failure counts in.
    """
    deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
    try:
        first, met = await _meet(channel, timeout_s, metadata)
        if to_call_it and met.known:
            _SIDECARS[channel] = met
            return first
        again, met_again = await _meet(channel, _left_s(deadline_ns), metadata)
    except grpc.aio.AioRpcError as error:
        return outcomes.unreachable(outcomes.read_failure(error), address, timeout_s + waited_s)
    if first.instance_id != again.instance_id:
        return _load_balancer(address, first, again)
    if met.known and met_again.known:
        met = _Sidecar(met.name, met.known.or_better(met_again.known))
    _SIDECARS[channel] = met
    return first


def _load_balancer(address: str, one: types_pb2.ReplicaInfo, other: types_pb2.ReplicaInfo) -> Failure:
    what = (
        f"{address} is a load balancer: two calls were answered by two replicas "
        f"({one.name or one.instance_id} and {other.name or other.instance_id}). Give each sidecar's address."
    )
    return Failure("UNAVAILABLE", outcomes.NOT_A_SIDECAR, what)


async def get_admission(
    channel: grpc.aio.Channel, timeout_s: float, metadata: Metadata = ()
) -> replica_pb2.AdmissionStatusResponse | Failure:
    """One replica's admission."""
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    try:
        return await stub.AdmissionStatus(replica_pb2.AdmissionStatusRequest(), timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return outcomes.read_failure(error)


def seconds(duration: Duration) -> float:
    """A protobuf duration in seconds."""
    return float(duration.seconds) + duration.nanos / 1e9
