"""What happens around every call, on every server here, in one interceptor.

Order: does the method exist, may the caller use it, does it come in time, is there room, can the request be read, run
it, and turn whatever comes out into one kind of error. Left to gRPC, half of these end without details: a request that
cannot be parsed, one that is too large, a call without a message, a call that the server does not outlive. So handlers
are given bytes, whatever the method, and everything is read and refused here. An exception that escapes a grpc.aio
handler reaches the caller as UNKNOWN with a Python repr, and an escaping CancelledError can leave the caller waiting
for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from sidecar.rpc import tracing
from sidecar.rpc.auth import OPEN_METHODS, Authorizer, Caller, Role
from sidecar.rpc.channels import MAX_MESSAGE_BYTES
from sidecar.rpc.errors import AbortableContext, Failure, abort, failure
from sidecar.rpc.late_calls import NOT_AFTER_NS, Instance

LOG: Final = logging.getLogger("kvctl.rpc")

MAX_METADATA_BYTES: Final = 16 * 1024
"""Largest metadata accepted with a call, counted as HTTP/2 does: 32 bytes more an entry."""

LAST_WORDS_S: Final = 2.0
"""For what a call is told that the server does not outlive to be sent."""

KEPT_SHARE: Final = 8
"""One in so many calls is kept for those who act: watches and viewers get the rest of `max_calls`."""

MOST_PROBES: Final = 1024
"""Health watches at once. They need no credential and take nobody's room, and must not take all memory either."""

MESSAGE_S: Final = 30.0
"""For the message of a call to come, seconds: a call without one must not stay for good."""

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

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """What goes with the status at the end."""

    async def write(self, message: Message) -> None:
        """Send one message of a stream."""


UnaryHandler = Callable[[Message, Context], Awaitable[Message]]
WritingHandler = Callable[[Message, Context], Awaitable[None]]
StreamHandler = Callable[[Message, Context], AsyncIterator[Message]]
Handler = UnaryHandler | WritingHandler
Deserializer = Callable[[bytes], Message]
RawHandler = Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]
"""Takes what a caller sent as it came; grpc.aio's context of the same call answers."""


class Gate(grpc.aio.ServerInterceptor):
    """Access, limits and errors of one server."""

    def __init__(
        self,
        authorizer: Authorizer,
        *,
        max_calls: int = 256,
        spans: tracing.SpanMaker | None = None,
        instance: Instance | None = None,
    ) -> None:
        """At most `max_calls` calls run at once, watches included; more are RESOURCE_EXHAUSTED at once. A part of them
        is kept for operators, so that no number of watches keeps a mutation out. `instance`: the process that this
        server is, see `late_calls`; None draws one.
        """
        self.instance: Final = instance or Instance.new()
        self._authorizer = authorizer
        self._span = spans or _no_span
        self._max_calls = max_calls
        self._calls = 0
        self._probes = 0
        self._under_way: set[asyncio.Task[object]] = set()
        self._stopping = False
        self._over = False

    async def end(self, grace_s: float) -> None:
        """Take nothing more; calls under way may end within the grace, and the others are then told what is known."""
        self._stopping = True
        if self._under_way:
            await asyncio.wait(tuple(self._under_way), timeout=grace_s)
        self._over = True
        left = tuple(self._under_way)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS_S)

    async def intercept_service(  # type: ignore[override]  # the stubs tie both type variables to the caller
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Message, Message] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Message, Message]:
        """Wrap the handler, or answer for a method that does not exist."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return _taking_bytes(self._refusing(_method_not_served(method)))
        if handler.request_streaming:
            # Only reflection streams requests; it is registered on loopback only and sees no certificates.
            try:
                self._authorizer.authorize(method, handler_call_details.invocation_metadata or (), {})
            except Failure as error:
                return _taking_bytes(self._refusing(error))
            return handler
        read = cast("Deserializer", handler.request_deserializer)
        if not handler.response_streaming:
            unary = cast("UnaryHandler", handler.unary_unary)
            return _taking_bytes(self._serving(method, read, unary), handler.response_serializer)
        writing = cast("WritingHandler", handler.unary_stream)
        if inspect.isasyncgenfunction(handler.unary_stream):
            writing = _writing(cast("StreamHandler", handler.unary_stream))
        serving = self._serving(method, read, writing, streaming=True)
        return _taking_bytes(serving, handler.response_serializer, streaming=True)

    def _serving(self, method: str, read: Deserializer, inner: Handler, *, streaming: bool = False) -> RawHandler:
        async def call(sent: AsyncIterator[bytes], context: Context) -> Message | None:
            began = time.monotonic()
            counted = probing = begun = False
            task = asyncio.current_task()
            assert task is not None
            try:
                self._admit(method, context)
                counted = method not in OPEN_METHODS  # whoever needs no credential takes nobody's room
                probing = not counted
                self._calls += counted
                self._probes += probing
                self._under_way.add(task)
                self._make_room(counted=counted, watch=streaming)
                raw = await _message(method, sent)  # after: while it does not come it takes room too
                request = _read(method, read, raw)
                begun = not getattr(request, "validate_only", False)  # what is only checked changes nothing
                with self._span(method):
                    answer = await inner(request, context)
                context.set_trailing_metadata(self.instance.trailing())
            except BaseException as raised:  # noqa: BLE001 - nothing may escape a handler, see the module's docstring
                self._under_way.discard(task)  # what is being told its end must not be cut short in that
                self._calls -= counted  # and takes nobody's room while it is told
                counted = False
                if self._over and isinstance(raised, asyncio.CancelledError):
                    raised = self._cut_short(method, begun=begun)
                await self._end(method, context, began, raised)
            finally:
                self._under_way.discard(task)
                self._calls -= counted
                self._probes -= probing
            _log_call(method, context, began, None)
            return answer

        return call

    def _admit(self, method: str, context: Context) -> None:
        if self._stopping:
            raise _server_stopping(method)
        metadata = context.invocation_metadata() or ()
        size = sum(len(key) + len(value) + 32 for key, value in metadata)
        if size > MAX_METADATA_BYTES:
            raise _too_large(method, "metadata", size, MAX_METADATA_BYTES)
        CALLER.set(self._authorizer.authorize(method, metadata, context.auth_context()))
        tracing.TRACE_PARENT.set(tracing.read(metadata))
        NOT_AFTER_NS.set(self.instance.check(method, metadata))

    def _make_room(self, *, counted: bool, watch: bool) -> None:
        if not counted and watch and self._probes > MOST_PROBES:
            raise _no_room(f"{MOST_PROBES} health watches are open here, the most this server takes")
        if not counted:
            return
        kept = self._max_calls // KEPT_SHARE if watch or CALLER.get().role is Role.VIEWER else 0
        if self._calls <= self._max_calls - kept:
            return
        most = f"and {kept} of the {self._max_calls} it takes are kept for operators" if kept else "the most it takes"
        raise _no_room(f"this server has {self._calls - 1} calls under way, {most}")

    def _cut_short(self, method: str, *, begun: bool) -> Failure:
        """What the caller of a call is told that had not ended when the server did."""
        if not begun or not self._authorizer.changes(method):
            return _server_stopping(method)
        return failure(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "OUTCOME_UNKNOWN",
            f"this server was shut down before {method} had ended; whether it was carried out is not known, ask again "
            "by its id",
            metadata={"method": method, "execution": "UNKNOWN"},
        )

    def _refusing(self, error: Failure) -> RawHandler:
        async def refuse(_sent: AsyncIterator[bytes], context: Context) -> NoReturn:
            await abort(context, error, self.instance.trailing())

        return refuse

    async def _end(self, method: str, context: Context, began: float, raised: BaseException) -> NoReturn:
        error = _as_failure(method, raised)
        left = isinstance(raised, asyncio.CancelledError) and not self._authorizer.changes(method)
        # Whoever watched or asked has gone, and nothing was to change: no news.
        _log_call(method, context, began, error, logging.DEBUG if left else logging.INFO)
        # Raises; when the caller has gone meanwhile, it raises what gRPC itself takes as the end of the call.
        await abort(context, error, self.instance.trailing())


def _taking_bytes(
    handler: RawHandler, serializer: Callable[[Message], bytes] | None = None, *, streaming: bool = False
) -> grpc.RpcMethodHandler[Message, Message]:
    """A method that is given what was sent, unread. As a stream: a unary call without a message has no answer."""
    if streaming:
        return grpc.stream_stream_rpc_method_handler(cast("Any", handler), None, serializer)
    return grpc.stream_unary_rpc_method_handler(cast("Any", handler), None, serializer)


def _writing(inner: StreamHandler) -> WritingHandler:
    """An asynchronous generator as a handler that writes to the context itself."""

    async def write_all(request: Message, context: Context) -> None:
        async with contextlib.aclosing(cast("AsyncGenerator[Message, None]", inner(request, context))) as messages:
            async for message in messages:
                await context.write(message)

    return write_all


async def _message(method: str, sent: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(MESSAGE_S):
            return await anext(aiter(sent), None)
    except TimeoutError:
        raise _unreadable(method, f"no message came within {MESSAGE_S:g} s") from None


def _read(method: str, read: Deserializer, raw: bytes | None) -> Message:
    if raw is None:
        raise _unreadable(method, "the call ended without a message")
    if len(raw) > MAX_MESSAGE_BYTES:
        raise _too_large(method, "request", len(raw), MAX_MESSAGE_BYTES)
    try:
        return read(raw)
    except DecodeError as error:
        raise _unreadable(method, f"its {len(raw)} bytes are not a message of this method") from error


def _unreadable(method: str, why: str) -> Failure:
    return failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNREADABLE_MESSAGE",
        f"the request of {method} cannot be read: {why}; nothing was done",
        metadata={"method": method},
    )


def _too_large(method: str, what: str, size: int, limit: int) -> Failure:
    return failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE",
        f"the {what} of {method} is {size} bytes long; this server takes {limit}. Nothing was done",
        metadata={"method": method, "limit": str(limit)},
    )


def _no_span(_name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _method_not_served(method: str) -> Failure:
    return failure(
        grpc.StatusCode.UNIMPLEMENTED,
        "METHOD_NOT_SERVED",
        f"{method} is not served here; check that the address is the one meant and that both ends have one version",
        metadata={"method": method},
    )


def _no_room(why: str) -> Failure:
    return failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_OPERATIONS", f"{why}; try again shortly", retry_after=1.0
    )


def _server_stopping(method: str) -> Failure:
    return failure(
        grpc.StatusCode.UNAVAILABLE,
        "SERVER_STOPPING",
        f"this server is shutting down, and {method} has changed nothing",
        metadata={"method": method, "execution": "NOT_EXECUTED"},
        retry_after=5.0,
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


def _log_call(method: str, context: Context, began: float, error: Failure | None, level: int = logging.INFO) -> None:
    took_ms = (time.monotonic() - began) * 1e3
    if error is None:
        LOG.debug("call method=%s peer=%s code=OK took_ms=%.1f", method, context.peer(), took_ms)
        return
    LOG.log(
        level,
        "call method=%s peer=%s code=%s reason=%s request_id=%s took_ms=%.1f trace=%s message=%r",
        method,
        context.peer(),
        error.code.name,
        error.reason,
        error.metadata.get("request_id", "-"),
        took_ms,
        tracing.trace_id() or "-",
        error.message,
    )
