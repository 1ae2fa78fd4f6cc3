"""For whom a server keeps room, and what the calls are told that it does not outlive."""

# ruff: noqa: N802 - handlers have the names of their RPCs
from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc

from sidecar.rpc import addresses, channels, errors, interceptors
from sidecar.rpc.auth import Authorizer, Role, TokenFile
from sidecar.rpc.health import Health
from sidecar.rpc.server import ServerSettings
from sidecar.rpc.serving import Serving

Code = grpc.StatusCode
RESET = "/kvctl.v1.CacheAdmin/ResetPrefixCache"
RULES = {
    RESET: Role.OPERATOR,
    **{f"/kvctl.v1.CacheAdmin/{name}": Role.VIEWER for name in ("GetReplica", "GetOperation", "WatchAdmission")},
}
LIMIT_S = 60


class Patient(replica_pb2_grpc.CacheAdminServicer):
    """Identity is told at once, everything else ends when it may."""

    def __init__(self) -> None:
        self.entered = 0
        self.may_end = asyncio.Event()

    async def _wait(self) -> None:
        self.entered += 1
        await self.may_end.wait()

    async def GetReplica(self, request, context):
        return api.GetReplicaResponse()

    async def GetOperation(self, request, context):
        await self._wait()
        return api.GetOperationResponse()

    async def ResetPrefixCache(self, request, context):
        await self._wait()
        return api.ResetPrefixCacheResponse(request_id="done")

    async def WatchAdmission(self, request, context) -> AsyncIterator[api.WatchAdmissionResponse]:
        yield api.WatchAdmissionResponse()
        await self._wait()


class Served:
    def __init__(self, server: Serving, patient: Patient, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.patient = patient
        self.channel = channel
        self.stub = replica_pb2_grpc.CacheAdminStub(channel)

    def reset(self, **fields: Any) -> Any:
        return self.stub.ResetPrefixCache(api.ResetPrefixCacheRequest(**fields), timeout=LIMIT_S)

    def look(self, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        return self.stub.GetOperation(api.GetOperationRequest(), timeout=LIMIT_S, metadata=metadata)

    def who(self, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        return self.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S, metadata=metadata)

    async def watch(self) -> Any:
        watch = self.stub.WatchAdmission(api.WatchAdmissionRequest(), timeout=LIMIT_S)
        await watch.read()
        return watch

    async def entered(self, calls: int) -> None:
        await until(lambda: self.patient.entered == calls)


@asynccontextmanager
async def serving(max_calls: int = 256, tokens: tuple[TokenFile, ...] = ()) -> AsyncIterator[Served]:
    patient = Patient()
    settings = ServerSettings(
        [addresses.parse_listen("127.0.0.1:0")], Authorizer(RULES, tokens=tokens), max_calls=max_calls
    )
    add_service = functools.partial(replica_pb2_grpc.add_CacheAdminServicer_to_server, patient)
    server = Serving(settings, [add_service, Health("kvctl.v1.CacheAdmin").register])
    (bound,) = server.bind()
    await server.start()
    try:
        async with channels.connect(bound) as channel:
            yield Served(server, patient, channel)
    finally:
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def told(call: Any) -> errors.Failure:
    """How a call has failed, by its details."""
    async with asyncio.timeout(LIMIT_S):
        await call.code()
        details = dict(await call.trailing_metadata()).get(errors.DETAILS_KEY)
    assert isinstance(details, bytes), f"no details came with {await call.code()}"
    return errors.from_status(status_pb2.Status.FromString(details))


# --- room --------------------------------------------------------------------------------------------------------


async def test_no_number_of_watches_keeps_out_those_who_act():
    async with serving(max_calls=8) as here:
        watches = [await here.watch() for _ in range(7)]
        refused = await told(here.stub.WatchAdmission(api.WatchAdmissionRequest(), timeout=LIMIT_S))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_OPERATIONS")
        assert "1 of the 8 it takes are kept for operators" in refused.message
        assert refused.retry_after
        await here.who()
        reset = here.reset()
        await here.entered(8)
        assert (await told(here.who())).reason == "TOO_MANY_OPERATIONS", "those who act fill the rest"
        here.patient.may_end.set()
        assert (await reset).request_id == "done"
        for watch in watches:
            watch.cancel()


async def test_no_number_of_viewers_keeps_out_operators(tmp_path: Path):
    (tmp_path / "viewer").write_text("v")
    (tmp_path / "operator").write_text("o")
    tokens = (TokenFile(Role.VIEWER, tmp_path / "viewer"), TokenFile(Role.OPERATOR, tmp_path / "operator"))
    viewer, operator = (("authorization", "Bearer v"),), (("authorization", "Bearer o"),)
    async with serving(max_calls=8, tokens=tokens) as here:
        looks = [here.look(viewer) for _ in range(7)]
        await here.entered(7)
        assert (await told(here.who(viewer))).reason == "TOO_MANY_OPERATIONS"
        await here.who(operator)
        here.patient.may_end.set()
        await asyncio.gather(*looks)


async def test_health_watches_are_bounded_by_themselves_and_health_is_always_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interceptors, "MOST_PROBES", 3)
    async with serving(max_calls=1) as here:
        stub, request = health_pb2_grpc.HealthStub(here.channel), health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request, timeout=LIMIT_S) for _ in range(3)]
        for watch in watches:
            await watch.read()
        refused = await told(stub.Watch(request, timeout=LIMIT_S))
        assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_OPERATIONS")
        await stub.Check(request, timeout=LIMIT_S)
        await here.who()
        for watch in watches:
            watch.cancel()


async def test_a_call_whose_message_never_comes_does_not_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(interceptors, "MESSAGE_S", 0.05)
    async with serving() as here:
        for path in (RESET, "/grpc.health.v1.Health/Check"):
            refused = await told(here.channel.stream_unary(path)())
            assert (refused.code, refused.reason) == (Code.INVALID_ARGUMENT, "UNREADABLE_MESSAGE")
            assert "no message came" in refused.message


# --- the end -----------------------------------------------------------------------------------------------------


async def test_calls_that_a_server_does_not_outlive_are_told_what_is_known_of_them():
    async with serving() as here:
        begun, checked, look = here.reset(), here.reset(validate_only=True), here.look()
        watch = await here.watch()
        await here.entered(4)
        wordless = here.channel.stream_unary(RESET)()
        await until(lambda: len(here.server._gate._under_way) == 5)
        await here.server.stop(0)
        reset = await told(begun)
        assert (reset.code, reset.reason) == (Code.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")
        assert reset.metadata["execution"] == "UNKNOWN"
        for call in (checked, look, watch, wordless):
            other = await told(call)
            assert (other.code, other.reason) == (Code.UNAVAILABLE, "SERVER_STOPPING")
            assert other.metadata["execution"] == "NOT_EXECUTED"
            assert other.retry_after


async def test_calls_that_end_within_the_grace_have_their_answer():
    async with serving() as here:
        reset = here.reset()
        await here.entered(1)
        stopping = asyncio.create_task(here.server.stop(LIMIT_S))
        await until(lambda: here.server._gate._stopping)
        here.patient.may_end.set()
        assert (await reset).request_id == "done"
        async with asyncio.timeout(LIMIT_S / 2):
            await stopping
