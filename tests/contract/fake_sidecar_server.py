"""A sidecar without engines: real gRPC, scripted answers, and a record of every effect it had.

It keeps the two promises that a fan-out relies on: one effect a request id, and the recorded result for a repeat.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from kvctl.v1 import replica_pb2, replica_pb2_grpc, types_pb2

from sidecar.coordinator.outcomes import RESULT_FIELDS
from sidecar.rpc import errors
from sidecar.rpc.errors import failure
from sidecar.rpc.late_calls import Instance

Script = Callable[[str], Awaitable[None]]


class FakeSidecar(replica_pb2_grpc.CacheAdminServicer):
    def __init__(self, name: str = "r0", labels: dict[str, str] | None = None, engines: int = 1) -> None:
        self.name = name
        self.labels = labels or {}
        self.engines = engines
        self.instance_id = uuid.uuid4().hex
        self.effects: list[str] = []
        self.requests: list[object] = []
        self.record: dict[str, object] = {}
        self.fail_with: list[errors.Failure] = []
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.stalled = False
        self.verdict = types_pb2.VERDICT_FLOWING
        self.cancelled: list[str] = []
        self.forget_answers = False
        """Silence after the effect, once."""
        self.lose_answers = False
        """The connection breaks after the effect, once."""
        self.lose_calls = False
        """The connection breaks before any effect."""
        self.leases: dict[str, float] = {}
        self.renewals: list[replica_pb2.RenewPauseRequest] = []
        self.identity_calls = 0
        self.rotate_identity = False
        """Every question is answered by another one: a load balancer."""
        self.tells_instance = False
        """As sidecars do: its answers name it, and what is meant for another one is refused."""
        self.metadata: list[tuple[str, str]] = []
        self.order: list[str] | None = None

    # --- helpers ---------------------------------------------------------------------------------------------

    def status(self, rank: int = 0) -> types_pb2.EngineStatus:
        return types_pb2.EngineStatus(engine=types_pb2.EngineRef(data_parallel_rank=rank, incarnation="ab" * 16))

    async def _guard(self, kind: str, request, context):
        self.requests.append(request)
        self.metadata = [(k, v) for k, v in context.invocation_metadata()]
        if self.tells_instance:
            # Behind a load balancer the next call meets another one, too.
            here = Instance(uuid.uuid4().hex if self.rotate_identity else self.instance_id)
            try:
                here.check(kind, self.metadata)
            except errors.Failure as refusal:
                await errors.abort(context, refusal)
        if self.before:
            await self.before(kind)
        if self.lose_calls:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if request.request_id in self.record:
            return self.record[request.request_id]
        if self.fail_with:
            await errors.abort(context, self.fail_with.pop(0) if len(self.fail_with) > 1 else self.fail_with[0])
        return None

    def _did(self, kind: str, request_id: str, answer: object) -> None:
        self.effects.append(request_id)
        self.record[request_id] = answer
        if self.order is not None:
            self.order.append(f"{self.name}:{kind}")

    async def _maybe_lost(self, context) -> None:
        if self.forget_answers:
            self.forget_answers = False
            await asyncio.sleep(3600)
        if self.lose_answers:
            self.lose_answers = False
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    # --- CacheAdmin --------------------------------------------------------------------------------------------

    async def GetReplica(self, request, context):  # noqa: N802
        self.identity_calls += 1
        info = types_pb2.ReplicaInfo(name=self.name, instance_id=self.instance_id, labels=self.labels, version="0.1.0")
        if self.rotate_identity:
            info.instance_id = self.instance_id = uuid.uuid4().hex
        if self.tells_instance:
            context.set_trailing_metadata(Instance(self.instance_id).trailing())
        for rank in range(self.engines):
            info.engines.add(
                engine=types_pb2.EngineRef(data_parallel_rank=rank, incarnation="ab" * 16),
                backend=types_pb2.BACKEND_KIND_BRIDGE,
                connected=True,
                pid=4242 + rank,
                vllm_version="0.32.0",
                bridge_version="0.1.0",
                model="tiny",
                block_size=16,
                blocks=1000,
                prefix_caching_enabled=True,
                capabilities=[types_pb2.Capability(name="reset.keep", available=True)],
            )
        return replica_pb2.GetReplicaResponse(replica=info)

    async def ResetPrefixCache(self, request, context):  # noqa: N802
        known = await self._guard("reset", request, context)
        if known is not None:
            return known
        answer = replica_pb2.ResetPrefixCacheResponse(
            request_id=request.request_id, validate_only=request.validate_only
        )
        for rank in range(self.engines):
            engine = answer.engines.add(
                status=self.status(rank),
                cached_blocks_dropped=812,
                requests_running=3,
                requests_kept=3,
                prefix_caching_enabled=True,
                event_published=True,
                event_tiers=["GPU"],
            )
            engine.prefix_cache.state = types_pb2.TIER_STATE_DONE
            engine.connector.state = (
                types_pb2.TIER_STATE_NOT_CONFIGURED if request.reset_connector else types_pb2.TIER_STATE_NOT_REQUESTED
            )
            engine.multimodal.state = types_pb2.TIER_STATE_NOT_REQUESTED
            engine.encoder.state = types_pb2.TIER_STATE_NOT_REQUESTED
            engine.pause.longest_us = 400
        if not request.validate_only:
            self._did("reset", request.request_id, answer)
        await self._maybe_lost(context)
        return answer

    async def ReorderFreeQueue(self, request, context):  # noqa: N802
        known = await self._guard("reorder", request, context)
        if known is not None:
            return known
        answer = replica_pb2.ReorderFreeQueueResponse(request_id=request.request_id)
        for rank in range(self.engines):
            engine = answer.engines.add(status=self.status(rank), scope=request.scope, blocks_moved=4000)
            engine.before.ratio, engine.after.ratio, engine.pause.longest_us = 0.084, 1.0, 27000
        self._did("reorder", request.request_id, answer)
        return answer

    async def RelieveAdmission(self, request, context):  # noqa: N802
        known = await self._guard("relieve", request, context)
        if known is not None:
            return known
        answer = replica_pb2.RelieveAdmissionResponse(request_id=request.request_id)
        answer.engines.add(status=self.status(), request_ids=["req-1"], blocks_freed=84, attempts=1, max_attempts=3)
        self._did("relieve", request.request_id, answer)
        return answer

    async def PauseScheduling(self, request, context):  # noqa: N802
        known = await self._guard("pause", request, context)
        if known is not None:
            return known
        answer = replica_pb2.PauseSchedulingResponse(request_id=request.request_id)
        for rank in range(self.engines):
            engine = answer.engines.add(status=self.status(rank), state=types_pb2.SCHEDULING_STATE_PAUSED)
            engine.lease_remaining.CopyFrom(request.lease)
        self.leases[request.request_id] = request.lease.seconds
        self._did("pause", request.request_id, answer)
        await self._maybe_lost(context)
        return answer

    async def RenewPause(self, request, context):  # noqa: N802
        if self.before:
            await self.before("renew")
        if request.pause_request_id not in self.leases:
            await errors.abort(
                context,
                failure(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_SCHEDULING_STATE", "no pause holds with that id"),
            )
        self.renewals.append(request)
        if self.order is not None and request.weights_complete:
            self.order.append(f"{self.name}:complete")
        answer = replica_pb2.RenewPauseResponse()
        answer.engines.add(status=self.status(), state=types_pb2.SCHEDULING_STATE_PAUSED)
        return answer

    async def ResumeScheduling(self, request, context):  # noqa: N802
        known = await self._guard("resume", request, context)
        if known is not None:
            return known
        if request.pause_request_id and request.pause_request_id not in self.leases:
            text = f"this engine is not paused by {request.pause_request_id}"
            await errors.abort(context, failure(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_SCHEDULING_STATE", text))
        answer = replica_pb2.ResumeSchedulingResponse(request_id=request.request_id)
        for rank in range(self.engines):
            answer.engines.add(
                status=self.status(rank),
                state=types_pb2.SCHEDULING_STATE_RUNNING,
                weight_version=request.weight_version,
            )
        self.leases.pop(request.pause_request_id, None)
        self._did("resume", request.request_id, answer)
        return answer

    async def GetOperation(self, request, context):  # noqa: N802
        answer = self.record.get(request.request_id)
        if answer is None:
            await errors.abort(
                context, failure(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", "no operation with that id")
            )
        result = {RESULT_FIELDS[type(answer)]: answer}
        return replica_pb2.GetOperationResponse(request_id=request.request_id, finished=True, **result)

    async def CancelOperation(self, request, context):  # noqa: N802
        self.cancelled.append(request.request_id)
        self.leases.pop(request.request_id, None)
        return replica_pb2.CancelOperationResponse(cancelled=True)

    def admission(self) -> replica_pb2.AdmissionStatusResponse:
        answer = replica_pb2.AdmissionStatusResponse(stalled=self.stalled)
        for rank in range(self.engines):
            engine = answer.engines.add(verdict=self.verdict, stalled=self.stalled, steps=1000, tokens_per_second=250.0)
            engine.engine.data_parallel_rank = rank
            engine.verdict_for.seconds = 12
            engine.requests.running, engine.requests.waiting = 3, 1
            engine.blocks.total, engine.blocks.free, engine.blocks.cached = 1000, 700, 250
            engine.oldest_waiting.nanos = 250_000_000
            engine.contiguity.ratio = 0.93
            if self.stalled:
                engine.explanation = (
                    "nothing runs, 2 waiting requests hold 973 blocks, the head needs 32 and 27 are free"
                )
        return answer

    async def AdmissionStatus(self, request, context):  # noqa: N802
        if self.before:
            await self.before("admission")
        return self.admission()

    async def WatchAdmission(self, request, context):  # noqa: N802
        yield replica_pb2.WatchAdmissionResponse(admission=self.admission(), changed=True)
        while True:
            await asyncio.sleep(0.02)
            yield replica_pb2.WatchAdmissionResponse(admission=self.admission(), changed=False)


@asynccontextmanager
async def serving(*fakes: FakeSidecar):
    """Addresses of the fakes, each behind a real gRPC server on loopback."""
    servers, found = [], []
    for fake in fakes:
        server = grpc.aio.server()
        replica_pb2_grpc.add_CacheAdminServicer_to_server(fake, server)
        found.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield found
    finally:
        await asyncio.gather(*(server.stop(None) for server in servers))


def refused(blocks: int = 12, running: int = 3) -> errors.Failure:
    """FAILED_PRECONDITION as a sidecar says it, with the typed result."""
    result = replica_pb2.ResetPrefixCacheResponse(request_id="x")
    engine = result.engines.add(requests_running=running)
    engine.status.code, engine.status.reason = 9, "BLOCKS_HELD_BY_REQUESTS"
    engine.prefix_cache.state = types_pb2.TIER_STATE_REFUSED
    return failure(
        grpc.StatusCode.FAILED_PRECONDITION,
        "BLOCKS_HELD_BY_REQUESTS",
        f"{blocks} blocks are held by {running} running and 0 waiting requests",
        retry_after=0.1,
        result=result,
    )
