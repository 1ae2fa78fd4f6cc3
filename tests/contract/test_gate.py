"""The gate around every handler: whatever a handler does, the caller gets one kind of error, soon."""

# ruff: noqa: N802 - handlers have the names of their RPCs
from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc

from sidecar.rpc import addresses, channels, errors, tracing
from sidecar.rpc import server as rpc_server
from sidecar.rpc.auth import Authorizer, Role
from sidecar.rpc.server import ServerSettings

Code = grpc.StatusCode
RULES = {f"/kvctl.v1.CacheAdmin/{method.name}": Role.VIEWER for method in
         api.DESCRIPTOR.services_by_name["CacheAdmin"].methods}  # fmt: skip


class Unruly(replica_pb2_grpc.CacheAdminServicer):
    """Every way in which a handler can go wrong."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.trace = ""

    async def ResetPrefixCache(self, request, context):
        raise asyncio.CancelledError

    async def ReorderFreeQueue(self, request, context):
        raise RuntimeError(b"bytes \xff that are not UTF-8".decode("utf-8", "surrogateescape"))

    async def RelieveAdmission(self, request, context):
        text = b"lone \xff".decode("utf-8", "surrogateescape")
        raise errors.Failure(Code.ABORTED, "CANCELLED", text, {"request_id": "the-id"})

    async def GetReplica(self, request, context):
        self.entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()

    async def GetOperation(self, request, context):
        self.trace = tracing.TRACE_PARENT.get()
        return api.GetOperationResponse(message=str(channels.NO_SECURITY.metadata()))

    async def WatchAdmission(self, request, context) -> AsyncIterator[api.WatchAdmissionResponse]:
        yield api.WatchAdmissionResponse(changed=True)
        raise asyncio.CancelledError


class Served:
    def __init__(self, channel: grpc.aio.Channel, unruly: Unruly, bound: addresses.Address) -> None:
        self.bound = bound
        self.stub = replica_pb2_grpc.CacheAdminStub(channel)
        self.unruly = unruly


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    settings = ServerSettings([addresses.parse_listen("127.0.0.1:0")], Authorizer(RULES))
    server = rpc_server.build(settings)
    unruly = Unruly()
    replica_pb2_grpc.add_CacheAdminServicer_to_server(unruly, server)
    (bound,) = rpc_server.bind(server, settings)
    await server.start()
    async with channels.connect(bound) as channel:
        yield Served(channel, unruly, bound)
    await server.stop(0)


async def failure_of(call) -> errors.Failure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(30):
            await call
    return errors.parse(raised.value)


async def test_a_cancelled_error_in_a_handler_does_not_hang_the_caller(served):
    error = await failure_of(served.stub.ResetPrefixCache(api.ResetPrefixCacheRequest()))
    assert (error.code, error.reason) == (Code.CANCELLED, "CANCELLED")


async def test_a_cancelled_error_in_a_stream_does_not_hang_the_caller(served):
    watch = served.stub.WatchAdmission(api.WatchAdmissionRequest())
    assert (await watch.read()).changed
    assert (await failure_of(watch.read())).reason == "CANCELLED"


async def test_a_defect_is_internal_names_its_type_and_gives_no_trace_away(served):
    error = await failure_of(served.stub.ReorderFreeQueue(api.ReorderFreeQueueRequest()))
    assert (error.code, error.reason) == (Code.INTERNAL, "SERVER_DEFECT")
    assert "RuntimeError" in error.message
    assert "not UTF-8" not in error.message


async def test_bytes_that_are_not_utf8_in_an_error_text_do_not_break_the_reply(served):
    error = await failure_of(served.stub.RelieveAdmission(api.RelieveAdmissionRequest()))
    assert (error.code, error.message) == (Code.ABORTED, "lone ?")


async def test_a_call_that_failed_is_logged_with_the_request_id_it_was_about(served, caplog):
    with caplog.at_level(logging.INFO, "kvctl.rpc"):
        await failure_of(served.stub.RelieveAdmission(api.RelieveAdmissionRequest()))
    assert "reason=CANCELLED request_id=the-id " in caplog.text


async def test_a_watch_that_its_caller_left_is_no_news_and_a_change_that_was_given_up_is(served, caplog, monkeypatch):
    monkeypatch.setitem(RULES, "/kvctl.v1.CacheAdmin/ResetPrefixCache", Role.OPERATOR)
    with caplog.at_level(logging.INFO, "kvctl.rpc"):
        await failure_of(served.stub.ResetPrefixCache(api.ResetPrefixCacheRequest()))
        watch = served.stub.WatchAdmission(api.WatchAdmissionRequest())
        await watch.read()
        await failure_of(watch.read())
    assert "ResetPrefixCache" in caplog.text
    assert "WatchAdmission" not in caplog.text


async def test_a_method_the_server_did_not_implement_has_its_reason(served):
    error = await failure_of(served.stub.CancelOperation(api.CancelOperationRequest()))
    assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "METHOD_NOT_SERVED")


async def test_a_caller_that_goes_away_ends_its_handler_and_nothing_else(served):
    call = served.stub.GetReplica(api.GetReplicaRequest())
    waiting = asyncio.ensure_future(call.wait_for_connection())
    async with asyncio.timeout(30):
        await served.unruly.entered.wait()
        call.cancel()
        await served.unruly.cancelled.wait()
        await asyncio.gather(waiting, return_exceptions=True)
        await served.stub.GetOperation(api.GetOperationRequest())


async def test_a_trace_context_goes_on_to_the_next_hop(served):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await served.stub.GetOperation(api.GetOperationRequest(), metadata=(("traceparent", parent),))
    assert served.unruly.trace == parent
    assert parent in answer.message
    answer = await served.stub.GetOperation(api.GetOperationRequest())
    assert answer.message == "()"


async def test_a_proxy_in_the_environment_does_not_capture_loopback(served, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with channels.connect(served.bound) as channel:
        stub = replica_pb2_grpc.CacheAdminStub(channel)
        await stub.GetOperation(api.GetOperationRequest(), timeout=30)


async def test_a_channel_finds_a_server_again_within_seconds_of_its_return():
    settings = ServerSettings([addresses.parse_listen("127.0.0.1:0")], Authorizer(RULES))

    async def serve(settings: ServerSettings):
        server = rpc_server.build(settings)
        replica_pb2_grpc.add_CacheAdminServicer_to_server(Unruly(), server)
        (bound,) = rpc_server.bind(server, settings)
        await server.start()
        return server, bound

    server, bound = await serve(settings)
    async with channels.connect(bound) as channel:
        stub = replica_pb2_grpc.CacheAdminStub(channel)
        await stub.GetOperation(api.GetOperationRequest(), timeout=30)
        await server.stop(0)
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetOperation(api.GetOperationRequest(), timeout=0.1)
        server, _ = await serve(ServerSettings([bound], Authorizer(RULES)))
        await stub.GetOperation(api.GetOperationRequest(), timeout=6, wait_for_ready=True)
    await server.stop(0)


def test_spans_that_are_asked_for_and_cannot_be_made_are_told_of(monkeypatch, caplog):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert tracing.span_maker("kvctl-sidecar") is None
    assert caplog.text == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert tracing.span_maker("kvctl-sidecar") is None
    assert "although OTEL_EXPORTER_OTLP_ENDPOINT is set" in caplog.text
    assert "kvctl[otel]" in caplog.text
