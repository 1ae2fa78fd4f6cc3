"""grpc.health.v1, starting as not serving.

The stock asyncio servicer calls the whole server SERVING from its first moment, before anything was checked. This one
says NOT_SERVING until it is told otherwise, and goes back to it for good when the server drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from sidecar.rpc.errors import failure


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of one server: the whole ("") and one named service always agree."""

    def __init__(self, service: str) -> None:
        """`service` is the full name, e.g. "kvctl.v1.CacheAdmin"."""
        self._names = ("", service)
        self._serving = False
        self._draining = False
        self._changed = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        """Add to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    @property
    def serving(self) -> bool:
        """Whether it says SERVING now."""
        return self._serving and not self._draining

    def set_serving(self, serving: bool) -> None:
        """Watchers are told at once when it changes."""
        if serving != self._serving:
            self._serving = serving
            self._tell()

    def drain(self) -> None:
        """NOT_SERVING for good, and every watch ends once it was told."""
        self._draining = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, name: str) -> int:
        status = health_pb2.HealthCheckResponse.ServingStatus
        if name not in self._names:
            return int(status.SERVICE_UNKNOWN)
        return int(status.SERVING if self.serving else status.NOT_SERVING)

    async def Check(  # noqa: N802 - the RPC's name
        self, request: health_pb2.HealthCheckRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthCheckResponse:
        """The health now; NOT_FOUND for a service that is not here, as the health protocol asks."""
        if request.service not in self._names:
            raise failure(
                grpc.StatusCode.NOT_FOUND,
                "METHOD_NOT_SERVED",
                f"service {request.service!r} is not served here; known: {self._names[1]}",
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802 - the RPC's name
        self, request: health_pb2.HealthCheckRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The health now and at each change."""
        last = -1
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if self._draining:
                return
            await changed.wait()
