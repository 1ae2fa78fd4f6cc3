"""One call to one replica, and what became of it as a row of the fleet's result.

Every function here takes an open channel and a time limit in seconds, and never raises for what a replica or the
network did: that is a result like any other.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from kvctl.v1 import fleet_pb2, replica_pb2, replica_pb2_grpc, types_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.outcomes import Failure, MutationResult
from sidecar.coordinator.port import Answer, Asked
from sidecar.coordinator.targets import derive_request_id

KINDS: Final = {
    "reset": types_pb2.OPERATION_KIND_RESET,
    "reorder": types_pb2.OPERATION_KIND_REORDER,
    "relieve": types_pb2.OPERATION_KIND_RELIEVE,
    "pause": types_pb2.OPERATION_KIND_PAUSE,
    "resume": types_pb2.OPERATION_KIND_RESUME,
}
"""Field of OperationSpec -> kind of operation."""


Metadata = tuple[tuple[str, str], ...]
"""Credentials that go with a call."""


async def call_target(
    channel: grpc.aio.Channel,
    spec: fleet_pb2.OperationSpec,
    request_id: str,
    replica: str,
    timeout_s: float,
    metadata: Metadata = (),
) -> Answer:
    """Run the operation on one replica, once.

    `replica` is the name that request ids are derived from; a resume finds the lease of a fleet-wide pause by it.
    """
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    started = time.monotonic()
    retry_after_s = 0.0
    try:
        row = outcomes.of_answer(await _invoke(stub, spec, request_id, replica, timeout_s, metadata))
    except grpc.aio.AioRpcError as error:
        failure = outcomes.read_failure(error)
        retry_after_s = failure.retry_after_s
        row = outcomes.of_failure(failure, sent=True)
    row.request_id = request_id
    row.took.FromTimedelta(timedelta(seconds=time.monotonic() - started))
    return Answer(row, retry_after_s)


async def _invoke(
    stub: replica_pb2_grpc.CacheAdminAsyncStub,
    spec: fleet_pb2.OperationSpec,
    request_id: str,
    replica: str,
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
            if spec.resume.pause_request_id:
                resume.pause_request_id = derive_request_id(spec.resume.pause_request_id, replica)
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
            return Asked(known=False)
        failure = outcomes.read_failure(error)
        return Asked(None, Answer(outcomes.of_failure(failure, sent=True), failure.retry_after_s))
    row = outcomes.of_record(record)
    return Asked(known=True, answer=None if row is None else Answer(row))


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
    channel: grpc.aio.Channel, address: str, timeout_s: float, metadata: Metadata = (), waited_s: float = 0.0
) -> types_pb2.ReplicaInfo | Failure:
    """Who answers at an address; a Failure in words when nobody does, or somebody who is no sidecar.

    Asked twice: two answers by two sidecars mean that a load balancer stands between, which would hand an operation
    to one replica of many and its retry to another. `timeout_s` is for both together; `waited_s`: time waited
    for it before, which the text of a failure counts in.
    """
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    request = replica_pb2.GetReplicaRequest()
    deadline = time.monotonic() + timeout_s
    try:
        first = (await stub.GetReplica(request, timeout=timeout_s, metadata=metadata)).replica
        left_s = max(deadline - time.monotonic(), 0.001)
        again = (await stub.GetReplica(request, timeout=left_s, metadata=metadata)).replica
    except grpc.aio.AioRpcError as error:
        return outcomes.unreachable(outcomes.read_failure(error), address, timeout_s + waited_s)
    if first.instance_id != again.instance_id:
        what = (
            f"{address} is a load balancer: two calls were answered by two replicas "
            f"({first.name or first.instance_id} and {again.name or again.instance_id}). Give each sidecar's address."
        )
        return Failure("UNAVAILABLE", outcomes.NOT_A_SIDECAR, what)
    return first


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
