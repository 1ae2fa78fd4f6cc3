r"""A server that no call can end.

grpcio decodes the name of a method that it does not know as UTF-8 in the one task that takes calls in, and nothing
there catches what that raises: one call for `/\xff`, from anyone who can connect, credentials or not, and the server
takes no call any more while its process looks healthy. (Putting another server in its place is no way out: the dead one
frees memory into which gRPC's core still writes.) So that task is never given such a call. Every method of ours is
registered with gRPC by name; what arrives for any other name comes in through one coroutine of its own, which is taken
over here and answers each with UNIMPLEMENTED and details, without looking at the name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from sidecar.rpc import server as rpc_server
from sidecar.rpc.addresses import Address
from sidecar.rpc.errors import abort, failure
from sidecar.rpc.interceptors import LAST_WORDS_S, Gate
from sidecar.rpc.late_calls import Instance
from sidecar.rpc.server import ServerSettings

LOG: Final = logging.getLogger("kvctl.rpc")

_TAKES_UNKNOWN: Final = "AioServer._request_call"
"""The coroutine of grpcio that ends with the next call for a method that was not registered."""

Register = Callable[[grpc.aio.Server], None]


class Serving:
    """One server, from its addresses to its end. Belongs to one event loop: `bind`, `start`, then `stop`."""

    def __init__(
        self, settings: ServerSettings, register: Sequence[Register], instance: Instance | None = None
    ) -> None:
        """`register`: each adds a service to a server that has not started."""
        self._settings = settings
        self._gate: Final[Gate] = rpc_server.gate(settings, instance)
        self._server = rpc_server.build(settings, self._gate)
        for add_service in register:
            add_service(self._server)
        rpc_server.add_reflection(self._server, settings)

    def bind(self) -> list[Address]:
        """Take every address; returns them with the ports the kernel chose. CannotListen names the one that failed."""
        bound = rpc_server.bind(self._server, self._settings)
        self._settings = replace(self._settings, listen=bound)
        return bound

    async def start(self) -> None:
        """Take calls."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        taken_over = False

        def make_task(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> Any:  # noqa: ANN401 - of asyncio
            nonlocal taken_over
            if getattr(coro, "__qualname__", "") == _TAKES_UNKNOWN:
                taken_over = True
                coro = self._refuse_unknown(coro)
            return before(loop, coro, **more) if before is not None else asyncio.Task(coro, loop=loop, **more)

        # grpcio makes its tasks before `start` returns, and the one for unknown methods only then.
        loop.set_task_factory(make_task)
        try:
            await self._server.start()
        finally:
            loop.set_task_factory(before)
        if not taken_over:
            LOG.warning("this version of grpcio (%s) takes calls in another way than is known here", grpc.__version__)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, tell those that have not ended within the grace what is known, and leave no socket file
        behind.
        """
        stopping = asyncio.ensure_future(self._server.stop(grace_s + LAST_WORDS_S))
        await self._gate.end(grace_s)
        await stopping
        rpc_server.remove_unix_sockets(self._settings)

    async def _refuse_unknown(self, first: Coroutine[Any, Any, object]) -> None:
        """Stands in for the coroutine of grpcio: ends only as that one does when the server stops."""
        core = self._server._server  # type: ignore[attr-defined]
        waiting = _kept(first)
        answering: set[asyncio.Task[None]] = set()
        while True:
            try:
                # Shielded: what waits for a call must live as long as gRPC's core may write into it.
                call = await asyncio.shield(waiting)
            except cygrpc._RequestCallError:
                # A call that ended before it was taken in, or the end of the server. Anything else would come again.
                if not core.is_running():
                    raise
                waiting = _kept(core._request_call())
                continue
            waiting = _kept(core._request_call())
            task = asyncio.create_task(self._refuse(call))
            answering.add(task)
            task.add_done_callback(answering.discard)

    async def _refuse(self, call: object) -> None:
        context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
        unknown = failure(
            grpc.StatusCode.UNIMPLEMENTED,
            "METHOD_NOT_SERVED",
            "this method is not served here; check that the address is the one meant and that both ends have one "
            "version",
        )
        # AbortError is how grpcio ends a handler; the others say that the caller has gone.
        with contextlib.suppress(grpc.aio.BaseError):
            await abort(context, unknown, self._gate.instance.trailing())


def _kept(coro: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    """A task whose failure after the end of the server is of no interest."""
    task = asyncio.ensure_future(coro)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
