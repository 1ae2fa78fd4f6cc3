"""The way through a coordinator when it is silent, stops, or comes back."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc
from test_cli_coordinator import start

from sidecar.client.remote import CALL_TIMEOUT_S, CoordinatorError, CoordinatorReach, Detached
from sidecar.rpc import addresses
from sidecar.rpc.auth import Authorizer, Role
from sidecar.rpc.errors import failure
from sidecar.rpc.late_calls import INSTANCE_KEY, NOT_AFTER_KEY, Instance
from sidecar.rpc.server import ServerSettings
from sidecar.rpc.serving import Serving

ALL = fleet_pb2.Targets(all=True)


class Coordinator(fleet_pb2_grpc.FleetAdminServicer):
    """Gives one sample a call, and then what `ends` says."""

    def __init__(self, *ends: grpc.StatusCode | None) -> None:
        self.ends = list(ends)
        self.calls = 0

    async def WatchFleetAdmission(self, request, context):  # noqa: N802
        self.calls += 1
        yield fleet_pb2.WatchFleetAdmissionResponse(replica=fleet_pb2.ReplicaAdmission(replica=f"r{self.calls}"))
        code = self.ends.pop(0)
        if code is not None:
            await context.abort(code, "it stops")


@asynccontextmanager
async def reach_of(servicer: Coordinator) -> AsyncIterator[CoordinatorReach]:
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetAdminServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reach = CoordinatorReach(f"127.0.0.1:{port}")
    try:
        yield reach
    finally:
        await reach.close()
        await server.stop(None)


async def test_a_watch_goes_on_when_the_coordinator_stopped_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    with caplog.at_level(logging.WARNING, "sidecar.client.remote"):
        async with reach_of(Coordinator(grpc.StatusCode.UNAVAILABLE, None, grpc.StatusCode.UNAVAILABLE)) as reach:
            async for sample in reach.watch(ALL, 0.0):
                seen.append(sample.replica.replica)
                if len(seen) == 3:
                    break
    assert seen == ["r1", "r2", "r3"]
    lost, back = [record.getMessage() for record in caplog.records]
    assert lost.startswith("coordinator 127.0.0.1:")
    assert lost.endswith("it stops; trying again")
    assert back == "the coordinator answers again"


async def test_a_watch_that_is_refused_ends_with_the_reason() -> None:
    servicer = Coordinator(grpc.StatusCode.PERMISSION_DENIED)
    async with reach_of(servicer) as reach:
        with pytest.raises(CoordinatorError, match="it stops"):
            async for _ in reach.watch(ALL, 0.0):
                pass
    assert servicer.calls == 1


async def test_a_watch_of_a_coordinator_that_never_answered_is_an_error() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        reach = CoordinatorReach(f"127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(CoordinatorError, match="connection refused"):
            async for _ in reach.watch(ALL, 0.0):
                pass
        await reach.close()


@pytest.mark.parametrize("command", [["reset", "--mode", "keep"], ["replicas"]])
async def test_ctrl_c_while_a_silent_coordinator_is_asked_ends_the_command_with_nothing_started(
    tmp_path: Path, command: list[str]
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(4)
        silent.settimeout(60)
        process = await start(tmp_path, *command, "--coordinator", f"127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            process.send_signal(signal.SIGINT)
            output, problems = await asyncio.wait_for(process.communicate(), 60)
    # Had it waited for its time limit, it would exit 4 and say that nobody answered.
    assert (process.returncode, output) == (130, b"")
    assert b"interrupted" in problems
    assert b"Traceback" not in problems


class Slow(Coordinator):
    """Has got a start and does not answer it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def StartOperation(self, request, context):  # noqa: N802
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_stop_before_the_start_is_confirmed_names_the_operation_that_may_have_been_started() -> None:
    servicer = Slow()
    operation_id = "11111111-2222-3333-4444-555555555555"
    async with reach_of(servicer) as reach:
        spec = fleet_pb2.OperationSpec(targets=ALL)
        running = asyncio.create_task(reach.run(spec, operation_id))
        await asyncio.wait_for(servicer.asked.wait(), 30)
        await reach.stop()
        with pytest.raises(Detached) as left:
            await asyncio.wait_for(running, 30)
    assert (left.value.operation_id, left.value.started) == (operation_id, False)


class Strict(fleet_pb2_grpc.FleetAdminServicer):
    """Knows no operation, and takes none."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}

    async def GetOperation(self, request, context):  # noqa: N802
        raise failure(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", "none of that id")

    async def StartOperation(self, request, context):  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        raise failure(grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING", "not now")


async def test_a_start_names_the_coordinator_that_is_meant_and_the_instant_after_which_it_must_not_begin() -> None:
    strict = Strict()
    rules = {f"/kvctl.v1.FleetAdmin/{method}": Role.VIEWER for method in ("GetOperation", "StartOperation")}
    settings = ServerSettings([addresses.parse_listen("127.0.0.1:0")], Authorizer(rules))
    instance = Instance.new()
    server = Serving(settings, [lambda into: fleet_pb2_grpc.add_FleetAdminServicer_to_server(strict, into)], instance)
    (bound,) = server.bind()
    await server.start()
    reach = CoordinatorReach(str(bound))
    began_ns = time.monotonic_ns()
    try:
        with pytest.raises(CoordinatorError, match="not now"):
            await reach.run(fleet_pb2.OperationSpec(targets=ALL))
    finally:
        await reach.close()
        await server.stop(0)
    assert strict.metadata[INSTANCE_KEY] == instance.id
    assert began_ns < int(strict.metadata[NOT_AFTER_KEY]) < time.monotonic_ns() + CALL_TIMEOUT_S * 1e9
