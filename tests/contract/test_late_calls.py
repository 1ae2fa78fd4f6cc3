"""A call that the network held up past its caller's deadline is not begun; a restarted sidecar is not mistaken."""

# ruff: noqa: N802 - handlers have the names of their RPCs
from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2, replica_pb2_grpc
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.coordinator import calls
from sidecar.coordinator.outcomes import Failure
from sidecar.rpc import addresses, channels, errors
from sidecar.rpc.addresses import Address
from sidecar.rpc.auth import Authorizer, Role
from sidecar.rpc.deadlines import Deadline
from sidecar.rpc.late_calls import CLOCK_KEY, INSTANCE_KEY, NOT_AFTER_KEY, NOT_AFTER_NS, Instance, Known, learn
from sidecar.rpc.server import ServerSettings
from sidecar.rpc.serving import Serving

Code = grpc.StatusCode
RULES = {f"/kvctl.v1.CacheAdmin/{method}": Role.VIEWER for method in ("GetReplica", "ResetPrefixCache")}
RESET = fleet_pb2.OperationSpec(reset=api.ResetPrefixCacheRequest())
LIMIT_S = 60.0
SECOND = 10**9


class Counting(replica_pb2_grpc.CacheAdminServicer):
    """Counts what it was asked to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = 0
        self.budget_s = 0.0

    async def GetReplica(self, request, context):
        return api.GetReplicaResponse(replica=types.ReplicaInfo(name=self.name))

    async def ResetPrefixCache(self, request, context):
        self.begun += 1
        self.budget_s = Deadline.of_call(context).remaining()
        return api.ResetPrefixCacheResponse(request_id=request.request_id)


@contextlib.asynccontextmanager
async def sidecar(name: str = "r0", listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[Counting, Address]]:
    counting = Counting(name)
    settings = ServerSettings([addresses.parse_listen(listen)], Authorizer(RULES))
    serving = Serving(settings, [lambda server: replica_pb2_grpc.add_CacheAdminServicer_to_server(counting, server)])
    (bound,) = serving.bind()
    await serving.start()
    try:
        yield counting, bound
    finally:
        await serving.stop(0)


class Network:
    """Between a caller and a sidecar; can hold up what the caller sends."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._relays: set[asyncio.Task[None]] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.holding = asyncio.Event()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._address.host, self._address.port)
        for relay in (self._relay(reader, back, self.open), self._relay(there, writer, None)):
            task = asyncio.create_task(relay)
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if gate is not None and not gate.is_set():
                    self.holding.set()
                    await gate.wait()
                writer.write(data)
        writer.close()

    @contextlib.asynccontextmanager
    async def between(self) -> AsyncIterator[Address]:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        try:
            yield addresses.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            for task in self._relays:
                task.cancel()
            server.close()


async def sent_late(*, bound: bool) -> tuple[Counting, object]:
    """A reset held up until after its caller's deadline; `bound`: it says so in its metadata."""
    async with sidecar() as (counting, address):
        network = Network(address)
        async with network.between() as near, channels.connect(near) as channel:
            stub = replica_pb2_grpc.CacheAdminStub(channel)
            assert not isinstance(await calls.get_replica(channel, str(near), LIMIT_S), Failure)
            deadline_ns = time.monotonic_ns() + SECOND // 2
            metadata = await calls.bound_in_time(channel, deadline_ns)
            assert not isinstance(metadata, Failure)
            network.open.clear()
            # Without a gRPC timeout of its own: what is tested is the instant in the metadata alone.
            call = stub.ResetPrefixCache(api.ResetPrefixCacheRequest(), metadata=metadata if bound else ())
            waiting = asyncio.ensure_future(call.code())
            await network.holding.wait()
            await asyncio.sleep((deadline_ns - time.monotonic_ns()) / SECOND + 0.01)
            network.open.set()
            async with asyncio.timeout(LIMIT_S):
                await waiting
            if await call.code() is Code.OK:
                return counting, await call
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            return counting, errors.parse(raised.value)


async def test_a_call_held_up_past_its_callers_deadline_is_not_begun():
    counting, told = await sent_late(bound=True)
    assert isinstance(told, errors.Failure)
    assert (told.code, told.reason) == (Code.DEADLINE_EXCEEDED, "NOT_EXECUTED")
    assert told.metadata["execution"] == "NOT_EXECUTED"
    assert counting.begun == 0


async def test_a_caller_that_names_no_instant_is_served_as_ever():
    counting, told = await sent_late(bound=False)
    assert isinstance(told, api.ResetPrefixCacheResponse)
    assert counting.begun == 1


async def test_a_call_in_time_is_begun_and_ends_by_its_callers_deadline():
    async with sidecar() as (counting, address), channels.connect(address) as channel:
        answer = await calls.call_target(channel, RESET, str(uuid.uuid4()), "r0", LIMIT_S)
        assert answer.result.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
        assert 0 < counting.budget_s <= LIMIT_S
        stub = replica_pb2_grpc.CacheAdminStub(channel)
        metadata = await calls.bound_in_time(channel, time.monotonic_ns() + 20 * SECOND)
        await stub.ResetPrefixCache(api.ResetPrefixCacheRequest(), timeout=LIMIT_S * 60, metadata=metadata)
        assert counting.budget_s <= 20, "the named instant comes before the length of time that gRPC passed"


async def connected_again(channel: grpc.aio.Channel) -> None:
    """Until the channel has found the server that took over the address."""
    stub = replica_pb2_grpc.CacheAdminStub(channel)
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S, wait_for_ready=True)
                return


async def test_a_sidecar_restarted_since_it_was_asked_is_asked_again_and_called():
    async with contextlib.AsyncExitStack() as first:
        _, address = await first.enter_async_context(sidecar())
        async with channels.connect(address) as channel:
            await calls.get_replica(channel, str(address), LIMIT_S)
            await first.aclose()
            async with sidecar(listen=str(address)) as (counting, _):
                await connected_again(channel)
                answer = await calls.call_target(channel, RESET, str(uuid.uuid4()), "r0", LIMIT_S)
                assert answer.result.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
                assert counting.begun == 1


async def test_another_replica_at_the_address_is_not_called_however_often_it_is_tried():
    async with contextlib.AsyncExitStack() as first:
        _, address = await first.enter_async_context(sidecar())
        async with channels.connect(address) as channel:
            await calls.get_replica(channel, str(address), LIMIT_S)
            await first.aclose()
            async with sidecar("r7", str(address)) as (counting, _):
                await connected_again(channel)
                for _ in range(3):
                    answer = await calls.call_target(channel, RESET, str(uuid.uuid4()), "r0", LIMIT_S)
                    assert (answer.result.code, answer.result.reason) == ("UNAVAILABLE", "OTHER_INSTANCE")
                    assert answer.result.execution == types.EXECUTION_NOT_EXECUTED
                    assert "r7" in answer.result.message
                assert counting.begun == 0


@pytest.mark.parametrize("text", ["soon", "-5", "1.5", "9" * 30, "²"])
async def test_an_instant_that_is_none_is_refused(text):
    instance = Instance.new()
    for metadata in ([(INSTANCE_KEY, instance.id), (NOT_AFTER_KEY, text)], [(NOT_AFTER_KEY, "5")]):
        with pytest.raises(errors.Failure) as raised:
            instance.check("/x", metadata)
        assert (raised.value.code, raised.value.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert [violation.field for violation in raised.value.violations] == [NOT_AFTER_KEY]


async def test_every_answer_names_the_process_and_its_clock_also_a_refusal():
    async with sidecar() as (_, address), channels.connect(address) as channel:
        before = time.monotonic_ns()
        call = replica_pb2_grpc.CacheAdminStub(channel).GetReplica(api.GetReplicaRequest(), timeout=LIMIT_S)
        await call
        found = learn(await call.trailing_metadata(), before, time.monotonic_ns())
        assert found is not None
        assert before <= found.clock_ns <= found.heard_ns
        for path in ("/kvctl.v1.CacheAdmin/GetOperation", "/kvctl.v1.CacheAdmin/Nope"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(path)(b"", timeout=LIMIT_S)
            refused = learn(raised.value.trailing_metadata(), before, time.monotonic_ns())
            assert refused is not None
            assert refused.instance == found.instance


def test_an_instant_is_never_taken_for_later_than_it_is():
    """Wherever in the round trip the clock was read, and whatever the two clocks count from."""
    offset = 77 * SECOND
    for read_at in (100, 105, 110):
        known = Known("a", read_at + offset, sent_ns=100, heard_ns=110)
        told = dict(known.metadata(deadline_ns=500))
        assert told[INSTANCE_KEY] == "a"
        assert 490 <= int(told[NOT_AFTER_KEY]) - offset <= 500


def test_the_answer_that_tells_the_clock_best_is_gone_by_until_it_is_old():
    close, wide = Known("a", 0, 0, 1000), Known("a", 0, 5000, 8000)
    assert close.or_better(wide) is close
    assert wide.or_better(close) is close
    later = Known("a", 0, 3600 * SECOND, 3600 * SECOND + 3000)
    assert close.or_better(later) is later, "an hour of drift is worse than a slower answer"
    assert close.or_better(Known("b", 0, 5000, 8000)).instance == "b"


def test_an_answer_without_the_two_words_teaches_nothing():
    assert learn((), 0, 1) is None
    assert learn(((INSTANCE_KEY, "a"),), 0, 1) is None
    assert learn(((INSTANCE_KEY, "a"), (CLOCK_KEY, "x")), 0, 1) is None


def test_the_named_instant_bounds_a_handlers_deadline():
    class Call:
        def time_remaining(self) -> float:
            return 30.0

    token = NOT_AFTER_NS.set(time.monotonic_ns() + 2 * SECOND)
    try:
        assert Deadline.of_call(Call()).remaining() <= 2.0
    finally:
        NOT_AFTER_NS.reset(token)
    assert Deadline.of_call(Call()).remaining() > 20.0
