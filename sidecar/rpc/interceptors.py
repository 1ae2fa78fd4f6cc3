"""What happens around every call, on every server here, in one interceptor.

Order: does the method exist, may the caller use it, is there room, run it, and turn whatever comes out into one kind of
error. An exception that escapes a grpc.aio handler reaches the caller as UNKNOWN with a Python repr; an escaping
CancelledError can leave the caller waiting for good; a method that a server does not serve has no details at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, NoReturn, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from sidecar.rpc import tracing
from sidecar.rpc.auth import OPEN_METHODS, Authorizer, Caller
from sidecar.rpc.errors import AbortableContext, Failure, abort, failure

LOG: Final = logging.getLogger("kvctl.rpc")

CALLER: Final[contextvars.ContextVar[Caller]] = contextvars.ContextVar("caller")
"""Who made the call that the running handler serves."""


class Context(AbortableContext, Protocol):
    """The part of grpc.aio's servicer context that is used here."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """Metadata sent by the caller."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """What the transport knows of the caller."""

    def peer(self) -> str:
        """Where the call came from."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""

    async def write(self, message: Message) -> None:
        """Send one message of a stream."""


UnaryHandler = Callable[[Message, Context], Awaitable[Message]]
WritingHandler = Callable[[Message, Context], Awaitable[None]]
StreamHandler = Callable[[Message, Context], AsyncIterator[Message]]


class Gate(grpc.aio.ServerInterceptor):
    """Access, limits and errors of one server."""

    def __init__(self, authorizer: Authorizer, *, max_calls: int = 256, spans: tracing.SpanMaker | None = None) -> None:
        """At most `max_calls` calls run at once, watches included; more are RESOURCE_EXHAUSTED at once."""
        self._authorizer = authorizer
        self._span = spans or _no_span
        self._max_calls = max_calls
        self._calls = 0

    async def intercept_service(  # type: ignore[override]  # the stubs tie both type variables to the caller
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Message, Message] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Message, Message]:
        """Wrap the handler, or answer for a method that does not exist."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(_refusing(_method_not_served(method)))
        if handler.request_streaming:
            # Only reflection streams requests; it is registered on loopback only and sees no certificates.
            try:
                self._authorizer.authorize(method, handler_call_details.invocation_metadata or (), {})
            except Failure as error:
                return grpc.unary_unary_rpc_method_handler(_refusing(error))
            return handler
        if handler.response_streaming:
            wrapped: StreamHandler | WritingHandler
            if inspect.isasyncgenfunction(handler.unary_stream):
                wrapped = self._stream(method, cast("StreamHandler", handler.unary_stream))
            else:
                wrapped = self._writing(method, cast("WritingHandler", handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(
                wrapped,  # grpc.aio takes both kinds
                handler.request_deserializer,
                handler.response_serializer,
            )
        unary = cast("UnaryHandler", handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, unary), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, method: str, inner: UnaryHandler) -> UnaryHandler:
        async def call(request: Message, context: Context) -> Message:
            began = time.monotonic()
            self._calls += 1
            try:
                self._admit(method, context)
                with self._span(method):
                    answer = await inner(request, context)
            except BaseException as raised:  # noqa: BLE001 - nothing may escape a handler, see the module's docstring
                await _end(method, context, began, raised)
            finally:
                self._calls -= 1
            _log_call(method, context, began, None)
            return answer

        return call

    def _stream(self, method: str, inner: StreamHandler) -> StreamHandler:
        async def call(request: Message, context: Context) -> AsyncIterator[Message]:
            began = time.monotonic()
            self._calls += 1
            try:
                self._admit(method, context)
                async for message in inner(request, context):
                    yield message
            except GeneratorExit:
                raise
            except BaseException as raised:  # noqa: BLE001 - nothing may escape a handler, see the module's docstring
                await _end(method, context, began, raised)
            finally:
                self._calls -= 1
            _log_call(method, context, began, None)

        return call

    def _writing(self, method: str, inner: WritingHandler) -> WritingHandler:
        """A streaming handler that writes to the context itself."""

        async def call(request: Message, context: Context) -> None:
            began = time.monotonic()
            self._calls += 1
            try:
                self._admit(method, context)
                await inner(request, context)
            except BaseException as raised:  # noqa: BLE001 - nothing may escape a handler, see the module's docstring
                await _end(method, context, began, raised)
            finally:
                self._calls -= 1
            _log_call(method, context, began, None)

        return call

    def _admit(self, method: str, context: Context) -> None:
        metadata = context.invocation_metadata() or ()
        CALLER.set(self._authorizer.authorize(method, metadata, context.auth_context()))
        tracing.TRACE_PARENT.set(tracing.read(metadata))
        if self._calls > self._max_calls and method not in OPEN_METHODS:
            raise failure(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_OPERATIONS",
                f"{self._calls - 1} calls are under way here, the most this server takes; try again shortly",
                retry_after=1.0,
            )


def _no_span(_name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _refusing(error: Failure) -> Callable[[Message, Context], Awaitable[NoReturn]]:
    async def refuse(_request: Message, context: Context) -> NoReturn:
        await abort(context, error)

    return refuse


async def _end(method: str, context: Context, began: float, raised: BaseException) -> NoReturn:
    error = _as_failure(method, raised)
    _log_call(method, context, began, error)
    # Raises; when the caller has gone meanwhile, it raises what gRPC itself takes as the end of the call.
    await abort(context, error)


def _method_not_served(method: str) -> Failure:
    return failure(
        grpc.StatusCode.UNIMPLEMENTED,
        "METHOD_NOT_SERVED",
        f"{method} is not served here; check that the address is the one meant and that both ends have one version",
        metadata={"method": method},
    )


def _as_failure(method: str, raised: BaseException) -> Failure:
    if isinstance(raised, Failure):
        return raised
    if isinstance(raised, NotImplementedError):
        return _method_not_served(method)
    if isinstance(raised, asyncio.CancelledError):
        return failure(grpc.StatusCode.CANCELLED, "CANCELLED", f"{method} was cancelled before it answered")
    if isinstance(raised, grpc.aio.AbortError):
        raise raised  # the handler has aborted by itself
    if not isinstance(raised, Exception):
        raise raised
    LOG.error("handler raised method=%s", method, exc_info=raised)
    return failure(
        grpc.StatusCode.INTERNAL,
        "SERVER_DEFECT",
        f"{method}: a defect here ({type(raised).__name__}); the server's log has the trace, please report it",
        metadata={"method": method},
    )


def _log_call(method: str, context: Context, began: float, error: Failure | None) -> None:
    took_ms = (time.monotonic() - began) * 1e3
    if error is None:
        LOG.debug("call method=%s peer=%s code=OK took_ms=%.1f", method, context.peer(), took_ms)
        return
    LOG.info(
        "call method=%s peer=%s code=%s reason=%s took_ms=%.1f trace=%s message=%r",
        method,
        context.peer(),
        error.code.name,
        error.reason,
        took_ms,
        tracing.trace_id() or "-",
        error.message,
    )
