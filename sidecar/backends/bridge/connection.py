"""One connection to one engine's socket, on the event loop.

SEQPACKET keeps message borders, so there is no framing; replies carry the number of the call they answer. What the
caller needs to know when a call fails is whether the request can have reached the engine at all: a full socket buffer
(an engine that is stopped) means that it has not.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from engine_bridge import protocol
from sidecar.backends.bridge import ownership

LOG: Final = logging.getLogger(__name__)

Reply = (
    protocol.Welcome
    | protocol.Goodbye
    | protocol.Outcome
    | protocol.Found
    | protocol.Cancelled
    | protocol.Pong
    | protocol.Fault
    | protocol.Evidence
)


class ConnectionGone(Exception):  # noqa: N818 - read as a sentence
    """The connection ended before the answer came."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent
        """Whether the request was handed to the kernel, and so may have reached the engine."""


class NoAnswer(Exception):  # noqa: N818 - read as a sentence
    """No answer in time."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(Exception):  # noqa: N818 - read as a sentence
    """The engine will not speak with us, in its own words; or it speaks nonsense."""


class Connection:
    """Connected, owner checked. Use `open`, then `handshake` once, then `call` as often as wanted."""

    def __init__(self, sock: socket.socket, path: Path, peer: ownership.Peer) -> None:
        self.path = path
        self.peer = peer
        self._sock = sock
        self._calls = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._first: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._sending = asyncio.Lock()
        self._closed_because = ""
        self._on_closed: Callable[[], None] | None = None
        self._reader = asyncio.create_task(self._read(), name=f"read {path.name}")

    @classmethod
    async def open(cls, path: Path) -> Connection:
        """OSError when nobody listens or we may not; NotTrusted when the owner is wrong. Never waits long: a Unix
        connect succeeds at once even when the engine is stopped, and a full backlog is an error.
        """
        owner = ownership.check_socket(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(str(path))
            peer = ownership.check_peer(sock, path, owner)
        except BaseException:
            sock.close()
            raise
        return cls(sock, path, peer)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return bool(self._closed_because)

    @property
    def closed_because(self) -> str:
        """Why it has ended; empty while open."""
        return self._closed_because

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call back once when it ends."""
        self._on_closed = callback

    async def handshake(self, client: str) -> protocol.Welcome:
        """Introduce ourselves. Waits as long as the engine's thread takes: the kernel ends the wait when its process
        dies. Refused when the engine declines; ConnectionGone when it goes away.
        """
        hello = protocol.Hello(protocol.PROTOCOL_VERSION, protocol.PROTOCOL_VERSION, client)
        await self._send(hello, deadline_ns=time.monotonic_ns() + 5_000_000_000)
        reply = await self._first
        if isinstance(reply, protocol.Goodbye):
            self.close(reply.reason)
            raise Refused(reply.reason)
        if not isinstance(reply, protocol.Welcome):
            self.close("no welcome")
            raise Refused(f"it answered the handshake with {type(reply).__name__} instead of Welcome")
        if reply.version != protocol.PROTOCOL_VERSION:
            self.close("version")
            raise Refused(f"it speaks protocol {reply.version}, this sidecar speaks {protocol.PROTOCOL_VERSION}")
        return reply

    def next_call(self) -> int:
        """A number for the next request."""
        return next(self._calls)

    async def call(self, request: protocol.Request, call: int, deadline_ns: int) -> Reply:
        """Send a request that carries the number `call` and wait for its reply until the deadline (CLOCK_MONOTONIC).
        NoAnswer or ConnectionGone say whether it was sent.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call] = answer
        try:
            await self._send(request, deadline_ns)
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)):
                return await answer
        except TimeoutError:
            raise NoAnswer("no answer by the deadline", sent=True) from None
        finally:
            self._waiting.pop(call, None)

    def close(self, because: str = "closed by this sidecar") -> None:
        """End it; every waiting call fails."""
        if self._closed_because:
            return
        self._closed_because = because
        self._reader.cancel()
        self._sock.close()
        for answer in (self._first, *self._waiting.values()):
            if not answer.done():
                answer.set_exception(ConnectionGone(because, sent=True))
                answer.exception()  # retrieved here, so that an answer nobody waits for is not reported
        if self._on_closed is not None:
            self._on_closed()

    async def _send(self, request: protocol.Request, deadline_ns: int) -> None:
        frame = protocol.encoder.encode(request)
        if len(frame) > protocol.MAX_FRAME_BYTES:
            raise ValueError(f"a {type(request).__name__} of {len(frame)} bytes; {protocol.MAX_FRAME_BYTES} at most")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)), self._sending:
                if self._closed_because:
                    raise ConnectionGone(self._closed_because, sent=False)
                # On SEQPACKET a frame goes as a whole or not at all, so a timeout here means: not sent.
                await loop.sock_sendall(self._sock, frame)
        except TimeoutError:
            raise NoAnswer("the engine's socket buffer stayed full", sent=False) from None
        except OSError as error:
            self.close(f"sending failed: {error.strerror or error}")
            raise ConnectionGone(self._closed_because, sent=False) from error

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                frame = await loop.sock_recv(self._sock, protocol.MAX_FRAME_BYTES + 1)
            except OSError as error:
                self._end(f"reading failed: {error.strerror or error}")
                return
            if not frame:
                self._end("the engine closed it")
                return
            if len(frame) > protocol.MAX_FRAME_BYTES:
                self._end(f"a frame over {protocol.MAX_FRAME_BYTES} bytes")
                return
            try:
                reply = protocol.reply_decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                # After one unreadable frame nothing that follows can be trusted to belong to what was asked.
                self._end(f"a frame that is no message: {error}")
                return
            self._deliver(reply)

    def _end(self, because: str) -> None:
        self.close(because)

    def _deliver(self, reply: Reply) -> None:
        if isinstance(reply, protocol.Welcome | protocol.Goodbye):
            if self._first.done() and isinstance(reply, protocol.Goodbye):
                self.close(f"the engine said goodbye: {reply.reason}")
            elif not self._first.done():
                self._first.set_result(reply)
            return
        answer = self._waiting.get(reply.call)
        if answer is None or answer.done():
            LOG.debug("late or unasked reply socket=%s call=%d type=%s", self.path, reply.call, type(reply).__name__)
            if isinstance(reply, protocol.Fault) and reply.call == -1:
                LOG.warning("engine could not read a frame socket=%s message=%r", self.path, reply.message)
            return
        answer.set_result(reply)
