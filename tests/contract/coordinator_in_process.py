"""A whole coordinator on this loop, as `kvctl-coordinator` would run it, and what a test needs to talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc, types_pb2

from sidecar.coordinator import config
from sidecar.coordinator.app import Application
from sidecar.rpc import addresses, channels
from sidecar.rpc.channels import NO_SECURITY, ClientSecurity

ENDED = (4, 5, 6, 7)


@dataclass
class Running:
    app: Application
    address: str
    metrics: str
    channel: grpc.aio.Channel
    stub: fleet_pb2_grpc.FleetAdminStub
    task: asyncio.Task[int]

    async def ended(self, operation_id: str, timeout: float = 60) -> fleet_pb2.FleetOperation:
        async with asyncio.timeout(timeout):
            request = fleet_pb2.WatchOperationRequest(operation_id=operation_id)
            async for _ in self.stub.WatchOperation(request):
                pass
        return await self.get(operation_id)

    async def get(self, operation_id: str) -> fleet_pb2.FleetOperation:
        request = fleet_pb2.FleetAdminGetOperationRequest(operation_id=operation_id)
        return (await self.stub.GetOperation(request)).operation

    async def start(self, spec: fleet_pb2.OperationSpec, operation_id: str = "") -> fleet_pb2.FleetOperation:
        request = fleet_pb2.StartOperationRequest(operation_id=operation_id, spec=spec)
        return (await self.stub.StartOperation(request)).operation

    async def run(self, spec: fleet_pb2.OperationSpec, timeout: float = 60) -> fleet_pb2.FleetOperation:
        return await self.ended((await self.start(spec)).operation_id, timeout)

    async def page(self, path: str) -> tuple[int, str]:
        host, _, port = self.metrics.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return int(head.split(" ")[1]), body

    def stop(self) -> None:
        """As SIGTERM does."""
        self.app._on_signal()


@asynccontextmanager
async def coordinator(
    folder: Path, targets: Sequence[str] = (), *arguments: str, security: ClientSecurity = NO_SECURITY
) -> AsyncIterator[Running]:
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    words = [word for target in targets for word in ("--targets", target)]
    if "--store" not in arguments:
        words += ["--store", str(folder / "ops.db")]
    if "--audit-log" not in arguments:
        words += ["--audit-log", str(folder / "audit.jsonl")]
    words += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--ready-file", str(ready), "--grace", "5s"]
    app = Application(config.load([*words, *arguments], {}))
    task = asyncio.create_task(app.run())
    await until(lambda: task.done() or ready.exists(), 60)
    if task.done():
        task.result()
        raise AssertionError("the coordinator ended before it served")
    found = json.loads(ready.read_text())
    channel = channels.connect(addresses.parse(found["listen"][0]), security)
    try:
        yield Running(app, found["listen"][0], found["metrics"], channel, fleet_pb2_grpc.FleetAdminStub(channel), task)
    finally:
        await channel.close()
        app._stop.set()
        async with asyncio.timeout(60):
            await task


async def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    """Poll a condition of code that has no event for it; TimeoutError when it never holds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def keep_reset(timeout: int = 30, **rollout: object) -> fleet_pb2.OperationSpec:
    spec = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(all=True), rollout=fleet_pb2.Rollout(**rollout))  # type: ignore[arg-type]
    spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
    spec.timeout.seconds = timeout
    return spec
