"""CacheAdmin: each RPC in a few lines. Everything that can be decided without I/O is decided elsewhere.

A handler reads the deadline first, checks the request against the rules, and hands over. What it raises, the gate (see
`sidecar.rpc.interceptors`) turns into one kind of error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc, types_pb2

from engine_bridge import __version__, protocol
from sidecar.backends.engine import EngineBackend, EngineSet, Lost, Unreachable
from sidecar.replica import requests, rules
from sidecar.replica.checks import forecast
from sidecar.replica.operations import Operations
from sidecar.replica.record import Operation
from sidecar.replica.sampler import Sampler
from sidecar.replica.watch import SlowReaderError, WatchEndedError, Watchers
from sidecar.rpc.auth import Role
from sidecar.rpc.deadlines import Deadline
from sidecar.rpc.errors import RECORDS_REACH_BACK, clean_text, failure
from sidecar.rpc.interceptors import CALLER, Context
from sidecar.rpc.late_calls import Instance

SERVICE: Final = "kvctl.v1.CacheAdmin"

ACCESS: Final[Mapping[str, Role]] = {
    f"/{SERVICE}/{method}": role
    for role, methods in {
        Role.VIEWER: ("AdmissionStatus", "WatchAdmission", "GetReplica", "GetOperation"),
        Role.OPERATOR: ("ResetPrefixCache", "ReorderFreeQueue", "RelieveAdmission", "CancelOperation"),
        Role.ADMIN: ("PauseScheduling", "RenewPause", "ResumeScheduling"),
    }.items()
    for method in methods
}
"""Least role a method needs. A method that is not here is denied."""

_KINDS: Final[dict[str, types_pb2.OperationKind.ValueType]] = {
    "reset": types_pb2.OPERATION_KIND_RESET,
    "reorder": types_pb2.OPERATION_KIND_REORDER,
    "relieve": types_pb2.OPERATION_KIND_RELIEVE,
    "pause": types_pb2.OPERATION_KIND_PAUSE,
    "resume": types_pb2.OPERATION_KIND_RESUME,
}

R = TypeVar("R", bound=Message)


class CacheAdmin:
    """Serves one replica. Not derived from the generated servicer: a method that is missing here then fails when the
    server starts, not when somebody calls it.
    """

    def __init__(
        self,
        name: str,
        labels: Mapping[str, str],
        instance: Instance,
        engines: EngineSet,
        operations: Operations,
        sampler: Sampler,
        watchers: Watchers,
    ) -> None:
        """`name` and `labels` are given to the sidecar by whoever runs it; `instance` is this process."""
        self._name = name
        self._labels = dict(labels)
        self._instance = instance
        self._started_at = time.time()
        self._engines = engines
        self._operations = operations
        self._sampler = sampler
        self._watchers = watchers

    def register(self, server: grpc.aio.Server) -> None:
        """Add to a server that has not started."""
        replica_pb2_grpc.add_CacheAdminServicer_to_server(cast("replica_pb2_grpc.CacheAdminServicer", self), server)

    # --- mutations -----------------------------------------------------------------------------------------------

    async def ResetPrefixCache(  # noqa: N802 - the RPC's name, like all that follow
        self, request: api.ResetPrefixCacheRequest, context: Context
    ) -> api.ResetPrefixCacheResponse:
        """See replica.proto."""
        return await self._mutate(request, context, api.ResetPrefixCacheResponse)

    async def ReorderFreeQueue(  # noqa: N802
        self, request: api.ReorderFreeQueueRequest, context: Context
    ) -> api.ReorderFreeQueueResponse:
        """See replica.proto."""
        return await self._mutate(request, context, api.ReorderFreeQueueResponse)

    async def RelieveAdmission(  # noqa: N802
        self, request: api.RelieveAdmissionRequest, context: Context
    ) -> api.RelieveAdmissionResponse:
        """See replica.proto."""
        return await self._mutate(request, context, api.RelieveAdmissionResponse)

    async def PauseScheduling(  # noqa: N802
        self, request: api.PauseSchedulingRequest, context: Context
    ) -> api.PauseSchedulingResponse:
        """See replica.proto."""
        return await self._mutate(request, context, api.PauseSchedulingResponse)

    async def ResumeScheduling(  # noqa: N802
        self, request: api.ResumeSchedulingRequest, context: Context
    ) -> api.ResumeSchedulingResponse:
        """See replica.proto."""
        return await self._mutate(request, context, api.ResumeSchedulingResponse)

    async def RenewPause(self, request: api.RenewPauseRequest, context: Context) -> api.RenewPauseResponse:  # noqa: N802
        """See replica.proto."""
        deadline = Deadline.of_call(context)
        rules.check(request)
        renewal = protocol.Renew(
            call=0,
            pause_request_id=requests.canonical_id(request.pause_request_id),
            lease_ns=int(rules.seconds(request.lease) * 1e9),
            weights_complete=request.weights_complete,
        )
        folded = await self._operations.renew(renewal, deadline, CALLER.get(), context.peer())
        if not folded.ok:
            raise folded.failure()
        return cast("api.RenewPauseResponse", folded.response)

    async def _mutate(self, request: requests.MutatingRequest, context: Context, response: type[R]) -> R:
        deadline = Deadline.of_call(context)
        wanted = requests.read(request)
        if wanted.validate_only:
            folded = await forecast(wanted, self._some_engines(), deadline)
        else:
            folded = await self._operations.run(wanted, deadline, CALLER.get(), context.peer())
        if not folded.ok:
            raise folded.failure()
        assert isinstance(folded.response, response)
        return folded.response

    # --- reading -------------------------------------------------------------------------------------------------

    async def AdmissionStatus(  # noqa: N802
        self, _request: api.AdmissionStatusRequest, context: Context
    ) -> api.AdmissionStatusResponse:
        """See replica.proto."""
        deadline = Deadline.of_call(context)
        self._some_engines()  # an empty answer would read as "nothing is stalled"
        return await self._sampler.status(min(0.5, deadline.for_next_hop().remaining()))

    async def WatchAdmission(self, request: api.WatchAdmissionRequest, context: Context) -> None:  # noqa: N802
        """See replica.proto."""
        rules.check(request)
        try:
            await self._watchers.pump(rules.seconds(request.interval), context.write)
        except SlowReaderError as error:
            raise failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", str(error)) from error
        except WatchEndedError as error:
            raise failure(grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING", str(error), retry_after=5.0) from error

    async def GetReplica(self, _request: api.GetReplicaRequest, _context: Context) -> api.GetReplicaResponse:  # noqa: N802
        """See replica.proto."""
        return api.GetReplicaResponse(
            replica=types_pb2.ReplicaInfo(
                name=self._name,
                instance_id=self._instance.id,
                labels=self._labels,
                version=__version__,
                engines=[describe(engine) for engine in self._engines.engines()],
                started_at=_timestamp(self._started_at),
                now=_timestamp(time.time()),
            ),
            clock_ns=time.monotonic_ns(),
        )

    async def GetOperation(self, request: api.GetOperationRequest, context: Context) -> api.GetOperationResponse:  # noqa: N802
        """See replica.proto."""
        deadline = Deadline.of_call(context)
        rules.check(request)
        request_id = requests.canonical_id(request.request_id)
        record = await self._operations.find(request_id, deadline)
        if record is None:
            raise _not_found(request_id, self._operations.records_reach_back_s())
        return _recorded(request_id, record)

    async def CancelOperation(  # noqa: N802
        self, request: api.CancelOperationRequest, context: Context
    ) -> api.CancelOperationResponse:
        """See replica.proto."""
        deadline = Deadline.of_call(context)
        rules.check(request)
        request_id = requests.canonical_id(request.request_id)
        self._some_engines()
        if await self._operations.find(request_id, deadline) is None:
            raise _not_found(request_id, self._operations.records_reach_back_s())
        answers = await self._operations.cancel(request_id, deadline, CALLER.get(), context.peer())
        return api.CancelOperationResponse(
            cancelled=any(isinstance(answer, protocol.Cancelled) and answer.cancelled for _, answer in answers),
            engines=[_cancelled(engine, answer) for engine, answer in answers],
        )

    def _some_engines(self) -> list[EngineBackend]:
        engines = list(self._engines.engines())
        trouble = self._engines.trouble()
        if not engines:
            raise failure(
                grpc.StatusCode.UNAVAILABLE,
                trouble.reason if trouble is not None else "NO_ENGINE",
                trouble.message if trouble is not None else f"no engine has appeared in {self._engines.place}",
                retry_after=5.0,
            )
        return engines


def describe(engine: EngineBackend) -> types_pb2.EngineInfo:
    """One engine as GetReplica shows it."""
    facts = engine.facts
    trouble = engine.trouble
    found = types_pb2.EngineInfo(
        engine=types_pb2.EngineRef(data_parallel_rank=engine.rank, incarnation=engine.incarnation),
        connected=engine.connected,
        unavailable_reason=clean_text(f"{trouble.reason}: {trouble.message}", 600) if trouble is not None else "",
        backend=types_pb2.BACKEND_KIND_BRIDGE,
    )
    if facts is None:
        return found
    if facts.backend == "http":
        found.backend = types_pb2.BACKEND_KIND_HTTP
    found.pid = facts.pid
    found.vllm_version = clean_text(facts.vllm_version, 64)
    found.bridge_version = clean_text(facts.bridge_version, 64)
    found.model = clean_text(facts.model, 256)
    found.block_size = facts.block_size
    found.blocks = facts.blocks
    found.prefix_caching_enabled = facts.prefix_caching
    found.data_parallel_size = facts.data_parallel_size
    found.capabilities.extend(
        types_pb2.Capability(name=clean_text(name, 64), available=not reason, reason=clean_text(reason, 300))
        for name, reason in sorted(facts.capabilities.items())
    )
    return found


def _recorded(request_id: str, record: Operation) -> api.GetOperationResponse:
    found = api.GetOperationResponse(
        request_id=request_id, kind=_KINDS[record.wanted.kind], started_at=_timestamp(record.started_at)
    )
    folded = record.folded
    if record.running or folded is None:
        found.message = f"{record.wanted.kind} {request_id} is under way"
        return found
    found.finished = not any(
        engine.status.execution == types_pb2.EXECUTION_UNKNOWN and engine.status.reason == "OUTCOME_UNKNOWN"
        for engine in folded.response.engines  # type: ignore[attr-defined]
    )
    found.code = folded.code.value[0]
    found.reason = folded.reason
    found.message = folded.message
    getattr(found, record.wanted.kind).CopyFrom(folded.response)
    return found


def _cancelled(engine: EngineBackend, answer: protocol.Cancelled | Lost | Unreachable) -> types_pb2.EngineStatus:
    status = types_pb2.EngineStatus(
        engine=types_pb2.EngineRef(data_parallel_rank=engine.rank, incarnation=engine.incarnation)
    )
    code = grpc.StatusCode.OK
    if isinstance(answer, Lost):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        unknown = answer.execution == "unknown"
        status.reason = "OUTCOME_UNKNOWN" if unknown else "NOT_EXECUTED"
        status.execution = types_pb2.EXECUTION_UNKNOWN if unknown else types_pb2.EXECUTION_NOT_EXECUTED
    elif isinstance(answer, Unreachable):
        code, status.reason = grpc.StatusCode.UNAVAILABLE, answer.reason
    elif not answer.cancelled:
        code = grpc.StatusCode.FAILED_PRECONDITION
    status.code = code.value[0]
    status.message = clean_text(answer.message, 600)
    return status


def _not_found(request_id: str, reach_back_s: float) -> Exception:
    return failure(
        grpc.StatusCode.NOT_FOUND,
        "OPERATION_NOT_FOUND",
        f"no operation {request_id} is on record here or at the engines, and records reach back {reach_back_s:.0f} s; "
        "it never started, or its record was replaced by later ones",
        metadata={"request_id": request_id, RECORDS_REACH_BACK: str(int(reach_back_s))},
    )


def _timestamp(seconds: float) -> Timestamp | None:
    if seconds <= 0:
        return None
    found = Timestamp()
    found.FromNanoseconds(int(seconds * 1e9))
    return found
