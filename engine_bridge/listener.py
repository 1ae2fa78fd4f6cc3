"""The Unix SEQPACKET socket, drained by the engine's own thread.

The engine thread must never wait here and never pay for a client's manners. So everything is non-blocking and bounded:
connections, time spent in one turn, the size of a frame, bad frames a client may send. A client that does not read
its replies is dropped. One epoll holds the listening socket and all connections: asking it with timeout 0 is the only
thing a busy engine does for us between two steps, and another thread can wait on it while the engine is idle.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from engine_bridge import protocol
from engine_bridge.places import group_id

MAX_CONNECTIONS: Final = 16
TURN_NS: Final = 1_500_000
"""Time for reading and answering between two steps, nanoseconds."""
MAX_BAD_FRAMES: Final = 16
"""Unreadable frames after which a connection is closed."""
_SO_PEERGROUPS: Final = 59
_MAX_GROUPS: Final = 256
"""Python reads socket options of at most 1,024 bytes, four a group."""

logger = logging.getLogger("vllm.kvctl")

Handler = Callable[[protocol.Request, Callable[[protocol.Reply], None]], None]


@dataclass(slots=True, eq=False)
class _Connection:
    """One client."""

    sock: socket.socket
    greeted: bool = False
    bad_frames: int = 0


class _CallOnly(msgspec.Struct):
    """As much of a request as is needed to say which one could not be read."""

    call: int = -1


_call_decoder: Final = msgspec.msgpack.Decoder(_CallOnly)


class Listener:
    """The engine's end of the socket. Every method is called on one thread, or under one lock."""

    def __init__(
        self,
        path: Path,
        welcome: Callable[[], protocol.Welcome],
        handler: Handler,
        *,
        group: str = "",
    ) -> None:
        """Bind `path` (0600, or 0660 and owned by `group`). OSError says why that cannot be done."""
        self._welcome = welcome
        self._handler = handler
        self._group_id = group_id(group) if group else None
        self._connections: dict[int, _Connection] = {}
        self.path = path
        with ExitStack() as undo:
            kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, kind))
            # No umask here: it belongs to the whole process, and vLLM has other threads. Until the chmod the directory
            # protects the socket, and every peer's uid is checked anyway.
            self._socket.bind(os.fspath(path))
            undo.callback(path.unlink, missing_ok=True)
            if self._group_id is not None:
                os.chown(path, -1, self._group_id)
            os.chmod(path, 0o600 if self._group_id is None else 0o660)
            self._socket.listen(MAX_CONNECTIONS)
            self._epoll = undo.enter_context(select.epoll(flags=select.EPOLL_CLOEXEC))
            self._epoll.register(self._socket.fileno(), select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        """The epoll's descriptor: readable while there is something to drain."""
        return self._epoll.fileno()

    def drain(self) -> None:
        """Take what has arrived: one frame a client, until TURN_NS have gone by. The rest keeps the epoll ready."""
        events = self._epoll.poll(0)
        if not events:
            return
        until = time.monotonic_ns() + TURN_NS
        for fd, _ in events:
            if fd == self._socket.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                self._receive(connection)
            if time.monotonic_ns() >= until:
                return

    def close(self, reason: str) -> None:
        """Say goodbye, close everything and remove the socket file."""
        for connection in list(self._connections.values()):
            self._send(connection, protocol.Goodbye(reason))
            self._drop(connection)
        self.close_inherited()
        self.path.unlink(missing_ok=True)

    def close_inherited(self) -> None:
        """Close descriptors only: what a forked child does, whose parent goes on using the socket."""
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._epoll.close()
        self._socket.close()

    # --- connections ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                logger.warning("kvctl: a client could not be accepted: %s", error.strerror)
                return
            raise
        sock.setblocking(False)
        connection = _Connection(sock)
        stranger = self._stranger(sock)
        if stranger:
            self._refuse(connection, stranger)
            return
        if len(self._connections) >= MAX_CONNECTIONS and not self._evict():
            self._refuse(connection, f"{MAX_CONNECTIONS} clients are connected already")
            return
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self._send(connection, protocol.Goodbye(reason))
        connection.sock.close()

    def _stranger(self, sock: socket.socket) -> str:
        """Why this peer may not talk to us; empty when it may. The file mode already says so; a mode can be changed."""
        _, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid in (0, os.geteuid()):
            return ""
        if self._group_id is not None and (self._group_id == gid or self._group_id in _groups_of(sock)):
            return ""
        return (
            f"uid {uid} may not use this engine: it belongs to uid {os.geteuid()}; set KVCTL_ENGINE_GROUP to share it"
        )

    def _evict(self) -> bool:
        """Make room at the cost of the oldest client that never said hello."""
        for connection in self._connections.values():
            if not connection.greeted:
                self._send(connection, protocol.Goodbye("no hello came, and the place was needed"))
                self._drop(connection)
                return True
        return False

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._epoll.unregister(connection.sock.fileno())
        connection.sock.close()

    # --- frames --------------------------------------------------------------------------------------------------

    def _receive(self, connection: _Connection) -> None:
        try:
            frame, _, flags, _ = connection.sock.recvmsg(protocol.MAX_FRAME_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(connection)
            return
        if not frame:
            self._drop(connection)
            return
        if flags & socket.MSG_TRUNC:
            self._bad(connection, -1, f"a frame was longer than {protocol.MAX_FRAME_BYTES} bytes")
            return
        try:
            request = protocol.request_decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._bad(connection, _call_of(frame), f"not a request: {error}"[:500])
            return
        if isinstance(request, protocol.Hello):
            self._greet(connection, request)
        elif not connection.greeted:
            self._send(connection, protocol.Goodbye("the first frame must be a hello"))
            self._drop(connection)
        else:
            self._handler(request, lambda reply: self._send(connection, reply))

    def _greet(self, connection: _Connection, hello: protocol.Hello) -> None:
        ours = protocol.PROTOCOL_VERSION
        if not hello.min_version <= ours <= hello.max_version:
            reason = (
                f"this engine's bridge speaks protocol {ours}, {hello.client[:100] or 'the client'} speaks "
                f"{hello.min_version} to {hello.max_version}; install the same kvctl on both ends"
            )
            self._send(connection, protocol.Goodbye(reason))
            self._drop(connection)
            return
        connection.greeted = True
        self._send(connection, self._welcome())

    def _bad(self, connection: _Connection, call: int, message: str) -> None:
        connection.bad_frames += 1
        self._send(connection, protocol.Fault(call, message))
        if connection.bad_frames >= MAX_BAD_FRAMES:
            self._send(connection, protocol.Goodbye(f"{MAX_BAD_FRAMES} frames could not be read"))
            self._drop(connection)

    def _send(self, connection: _Connection, reply: protocol.Reply) -> None:
        """Send, or drop a client that is gone or does not read."""
        if connection.sock.fileno() < 0:
            return
        frame = _encode(reply)
        try:
            connection.sock.send(frame, socket.MSG_NOSIGNAL)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                logger.warning("kvctl: a client does not read its replies and was dropped")
            self._drop(connection)


def _encode(reply: protocol.Reply) -> bytes:
    """One frame, or a fault that says why the reply does not make one."""
    try:
        frame = protocol.encoder.encode(reply)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        # A request id or an exception's text may hold anything, lone surrogates among it.
        problem = f"the reply cannot be encoded: {type(error).__name__}"
    else:
        if len(frame) <= protocol.MAX_FRAME_BYTES:
            return frame
        problem = f"the reply is {len(frame)} bytes, more than the {protocol.MAX_FRAME_BYTES} a frame may have"
    return protocol.encoder.encode(protocol.Fault(getattr(reply, "call", -1), problem))


def _call_of(frame: bytes) -> int:
    """The call number of a request that cannot be read otherwise, -1 when not even that can."""
    try:
        return _call_decoder.decode(frame).call
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return -1


def _groups_of(sock: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the peer; none when it has more than can be read."""
    try:
        groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError as error:
        if error.errno in (errno.ERANGE, errno.ENOPROTOOPT, errno.EOPNOTSUPP):
            return ()
        raise
    return struct.unpack(f"{len(groups) // 4}I", groups)
