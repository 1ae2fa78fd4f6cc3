"""What no gRPC client sends: a server refuses it with details where it can, and goes on serving in any case."""

# ruff: noqa: N802 - handlers have the names of their RPCs
from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc
from kvctl.v1 import types_pb2 as types

from sidecar.rpc import addresses, channels, errors
from sidecar.rpc.auth import Authorizer, Role
from sidecar.rpc.channels import MAX_MESSAGE_BYTES
from sidecar.rpc.health import Health
from sidecar.rpc.interceptors import MAX_METADATA_BYTES
from sidecar.rpc.server import ServerSettings
from sidecar.rpc.serving import Serving
from tests.contract.raw_http2 import answer, send_call
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess

Code = grpc.StatusCode
GET_REPLICA = "/kvctl.v1.CacheAdmin/GetReplica"
RULES = {f"/kvctl.v1.CacheAdmin/{method.name}": Role.VIEWER for method in
         api.DESCRIPTOR.services_by_name["CacheAdmin"].methods}  # fmt: skip
LETHAL = b"/kvctl.v1.CacheAdmin/\xff"
LIMIT_S = 30


class Patient(replica_pb2_grpc.CacheAdminServicer):
    """Answers at once, or when it may."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.may_end = asyncio.Event()

    async def GetReplica(self, request, context):
        return api.GetReplicaResponse()

    async def GetOperation(self, request, context):
        self.entered.set()
        await self.may_end.wait()
        return api.GetOperationResponse(message="finished")


class Served:
    def __init__(self, address: addresses.Address, patient: Patient, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.patient = patient
        self.channel = channel
        self.stub = replica_pb2_grpc.CacheAdminStub(channel)

    async def raw(self, path: bytes, *rest) -> bytes:
        """The answer to a call made by hand."""
        return await asyncio.to_thread(lambda: answer(send_call(self.address, path, *rest)))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Short wherever the tests run: a path of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(params=["tcp", "unix"])
async def served(request, short_folder: Path) -> AsyncIterator[Served]:
    where = "127.0.0.1:0" if request.param == "tcp" else f"unix:{short_folder}/s"
    patient = Patient()
    settings = ServerSettings([addresses.parse_listen(where)], Authorizer(RULES), max_calls=2)
    serve = [lambda server: replica_pb2_grpc.add_CacheAdminServicer_to_server(patient, server), Health("x").register]
    serving = Serving(settings, serve)
    (bound,) = serving.bind()
    await serving.start()
    async with channels.connect(bound) as channel:
        yield Served(bound, patient, channel)
    patient.may_end.set()
    await serving.stop(0.5)
    assert list(short_folder.iterdir()) == []  # noqa: ASYNC240 - nothing else runs


async def failure_of(call) -> errors.Failure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert errors.DETAILS_KEY in dict(raised.value.trailing_metadata())
    return errors.parse(raised.value)


# --- refused with details ----------------------------------------------------------------------------------------


async def test_bytes_that_are_no_message_of_the_method_are_an_invalid_argument(served):
    call = served.channel.unary_unary("/kvctl.v1.CacheAdmin/ResetPrefixCache")
    for raw in (b"\xff\xff\xff\xff", b"\x0a\xff", b"\x0a\x02\xff\xfe"):
        error = await failure_of(call(raw, timeout=LIMIT_S))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "UNREADABLE_MESSAGE")
        assert "nothing was done" in error.message


async def test_a_stream_is_refused_in_the_same_way(served):
    call = served.channel.unary_stream("/kvctl.v1.CacheAdmin/WatchAdmission")
    error = await failure_of(call(b"\xff\xff\xff\xff", timeout=LIMIT_S).read())
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "UNREADABLE_MESSAGE")


async def test_a_call_without_a_message_is_answered(served):
    received = await served.raw(GET_REPLICA.encode(), b"")
    assert b"the call ended without a message" in received
    assert errors.DETAILS_KEY.encode() in received


@pytest.mark.parametrize("path", [b"/kvctl.v1.CacheAdmin/Nope", b"/other.Service/Method", b"/", b"x", b""])
async def test_a_method_that_is_not_served_is_told_with_details_whatever_it_is_called(served, path):
    received = await served.raw(path)
    assert b"is not served here" in received
    assert errors.DETAILS_KEY.encode() in received


async def test_a_request_over_the_limit_is_told_how_large_it_may_be(served):
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(served.address.target, options=options) as channel:
        call = channel.unary_unary(GET_REPLICA)
        error = await failure_of(call(bytes(MAX_MESSAGE_BYTES + 1), timeout=LIMIT_S))
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert str(MAX_MESSAGE_BYTES) in error.message
        # Far over it, gRPC itself refuses before anything is read: the table of docs/sidecar.md.
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(bytes(5 * MAX_MESSAGE_BYTES), timeout=LIMIT_S)
        assert raised.value.code() is Code.RESOURCE_EXHAUSTED


async def test_metadata_over_the_limit_is_told_how_large_it_may_be(served):
    async def ask(size: int) -> None:
        await served.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S, metadata=(("x-long", "m" * size),))

    await ask(MAX_METADATA_BYTES - 500)
    error = await failure_of(ask(MAX_METADATA_BYTES))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")


async def test_more_calls_than_there_is_room_for_are_told_to_come_again(served):
    waiting = [served.stub.GetOperation(api.GetOperationRequest(), timeout=LIMIT_S * 2) for _ in range(2)]
    await served.patient.entered.wait()
    # The second of them may still be on its way in.
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await served.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S)
            except grpc.aio.AioRpcError as error:
                told = errors.parse(error)
                break
    assert (told.code, told.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_OPERATIONS")
    assert told.retry_after
    served.patient.may_end.set()
    assert [(await call).message for call in waiting] == ["finished"] * 2


async def test_probes_take_no_room_and_calls_that_send_no_message_do(served):
    watches = [health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(4)]
    assert all([await watch.read() for watch in watches])
    await served.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S)
    silent = [served.channel.stream_unary(GET_REPLICA)() for _ in range(2)]
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await served.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S)
            except grpc.aio.AioRpcError as error:
                told = errors.parse(error)
                break
    assert told.reason == "TOO_MANY_OPERATIONS"
    for call in [*watches, *silent]:
        call.cancel()


async def test_metadata_that_is_not_text_does_no_harm(served):
    more = tuple((name, b"\xff\xfe") for name in (b"x-a", b"authorization", b"traceparent", b"user-agent"))
    assert b"grpc-status\x010" in await served.raw(GET_REPLICA.encode(), b"\0\0\0\0\0", more)


# --- and what would end its loop ---------------------------------------------------------------------------------


async def test_a_method_name_that_is_not_utf8_ends_neither_the_server_nor_the_calls_under_way(served):
    under_way = served.stub.GetOperation(api.GetOperationRequest(), timeout=LIMIT_S * 2)
    await served.patient.entered.wait()
    for _ in range(20):
        assert b"is not served here" in await served.raw(LETHAL)
    await served.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S)
    served.patient.may_end.set()
    assert (await under_way).message == "finished"


async def test_many_callers_of_such_names_who_do_not_wait_do_no_harm(served):
    for _ in range(50):
        (await asyncio.to_thread(send_call, served.address, LETHAL)).close()
    await served.stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S)
    assert b"is not served here" in await served.raw(LETHAL)


def test_a_sidecar_survives_it_and_an_operation_under_way_keeps_its_result(tmp_path):
    directory = tmp_path / "engines"
    directory.mkdir(mode=0o700)
    engine = EngineProcess(directory)
    sidecar = SidecarProcess(directory, tmp_path)
    try:
        sidecar.wait_ready(LIMIT_S)
        engine.do("slow", method="drop_prefix_cache", seconds=1.0)
        request = api.ResetPrefixCacheRequest(
            request_id=str(uuid.uuid4()), running_requests=types.RUNNING_REQUESTS_KEEP
        )
        with sidecar.stub() as stub:
            reset = stub.ResetPrefixCache.future(request, timeout=LIMIT_S)
            wait_until(lambda: len(sidecar.audit()) == 1, LIMIT_S)
            assert b"is not served here" in answer(send_call(addresses.parse(sidecar.address), LETHAL))
            assert len(reset.result(LIMIT_S).engines) == 1
            found = stub.GetOperation(api.GetOperationRequest(request_id=request.request_id), timeout=LIMIT_S)
        assert found.finished
        assert len(engine.do("state")["effects"]) == 1
        assert "Traceback" not in sidecar.log()
        assert sidecar.terminate(LIMIT_S) == 0
    finally:
        sidecar.end()
        engine.end()


async def test_nobody_else_can_connect_to_a_unix_socket_not_even_as_it_appears(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appeared: list[int] = []
    really = Path.chmod

    def note(path: Path, mode: int) -> None:
        appeared.append(stat.S_IMODE(path.stat().st_mode))
        really(path, mode)

    monkeypatch.setattr(Path, "chmod", note)
    server = Serving(ServerSettings([addresses.parse_listen(f"unix:{short_folder}/s")], Authorizer(RULES)), [])
    before = os.umask(0)
    try:
        server.bind()
        during = os.umask(0)
    finally:
        os.umask(before)
    assert (appeared, during) == ([0o600], 0)
    await server.start()
    await server.stop(0)
