"""A bad network between two programs of ours: TCP on loopback that can be made silent, slow or broken while it is used.

All proxies of a fleet live on one event loop in one thread. A proxy keeps its port for as long as it lives, so what
listens behind it may be killed and come back elsewhere without anybody else being given that port meanwhile.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from typing import Any, Final, Literal, TypeVar

T = TypeVar("T")

Direction = Literal["forth", "back"]
"""From the one who connected to the one who listens, and back."""
BOTH: Final[tuple[Direction, ...]] = ("forth", "back")

_CALL_S: Final = 60.0
_TICK_S: Final = 0.02
"""Throttled bytes go in portions, one a tick."""


class Network:
    """The thread and its loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def proxy(self, upstream: str = "") -> TcpProxy:
        """A proxy that is up. `upstream` is HOST:PORT and may be set later."""
        made = TcpProxy(self, upstream)
        self.do(made._listen())
        return made

    def close(self) -> None:
        self.do(_end_all_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_S)
        self._loop.close()


async def _end_all_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TcpProxy:
    """See the module. Methods are for any thread but the network's own."""

    def __init__(self, network: Network, upstream: str) -> None:
        self.upstream = upstream
        self.address = ""
        self._network = network
        self._connections: set[_Connection] = set()
        self._refusing = False
        self._resets = 0
        # What arrives waits for the gate that is the last one then.
        self._gates = {direction: [asyncio.Event()] for direction in BOTH}
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        for gates in self._gates.values():
            gates[0].set()

    # --- faults --------------------------------------------------------------------------------------------------

    def black_hole(self, *directions: Direction) -> None:
        """Nothing comes through any more, and nobody is told; without arguments in neither direction. What is sent
        meanwhile is kept until `mend`. Called again, it begins a second lot: see `release_first_lot`.
        """
        self._network.do(self._close(directions or BOTH))

    def release_first_lot(self) -> None:
        """What was kept before the last `black_hole` goes on its way, and nothing that came after it."""
        self._network.do(self._release_first_lot())

    def reset(self, *, refuse: bool = False) -> None:
        """Every connection is reset and what was under way in it is lost. `refuse`: new ones too, until `mend`."""
        self._network.do(self._reset(refuse))

    def delay(self, seconds: float) -> None:
        """Everything arrives so much later, in both directions."""
        self._network.do(self._set(delay_s=seconds))

    def throttle(self, bytes_per_s: float) -> None:
        """Each direction of each connection carries so much."""
        self._network.do(self._set(bytes_per_s=bytes_per_s))

    def half_close(self, direction: Direction) -> None:
        """Every connection ends in one direction, and stays open in the other."""
        self._network.do(self._half_close(direction))

    def mend(self) -> None:
        """As before; what was kept goes on its way."""
        self._network.do(self._set())

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def kept_bytes(self) -> int:
        """Bytes that have arrived here and have not gone on."""
        return self.kept("forth") + self.kept("back")

    def wait_kept(self, direction: Direction, seconds: float) -> bool:
        """Wait for anything to be kept; whether something is. Nobody need have anything to say."""
        until = time.monotonic() + seconds
        while not self.kept(direction) and time.monotonic() < until:
            time.sleep(0.01)
        return self.kept(direction) > 0

    def kept(self, direction: Direction) -> int:
        """The same of one direction."""
        return sum(connection.kept_bytes[direction] for connection in self._connections)

    # --- on the network's loop -----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        self._server = server

    async def _set(self, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        self._refusing, self._delay_s, self._bytes_per_s = False, delay_s, bytes_per_s
        for gates in self._gates.values():
            for gate in gates:
                gate.set()

    async def _close(self, directions: tuple[Direction, ...]) -> None:
        for direction in directions:
            self._gates[direction].append(asyncio.Event())

    async def _release_first_lot(self) -> None:
        for gates in self._gates.values():
            for gate in gates[:-1]:
                gate.set()

    async def _reset(self, refuse: bool) -> None:
        await self._set()
        self._refusing = refuse
        self._resets += 1
        for connection in list(self._connections):
            connection.abort()

    async def _half_close(self, direction: Direction) -> None:
        for connection in self._connections:
            connection.end(direction)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _abort(writer)
            return
        host, _, port = self.upstream.rpartition(":")
        resets = self._resets
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _abort(writer)
            return
        if resets != self._resets:
            _abort(writer)
            _abort(far_writer)
            return
        connection = _Connection(self, (reader, writer), (far_reader, far_writer))
        self._connections.add(connection)
        try:
            await connection.run()
        except asyncio.CancelledError:
            connection.abort()  # the network closes; asyncio's server takes a cancelled handler for a defect
        finally:
            self._connections.discard(connection)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


_Queue = asyncio.Queue[tuple[float, asyncio.Event, bytes]]
"""When it may go on at the earliest, the gate that it waits for, and the bytes; without bytes: the end."""


class _Connection:
    """Two streams and what flows between them."""

    def __init__(self, proxy: TcpProxy, near: Stream, far: Stream) -> None:
        self.kept_bytes = dict.fromkeys(BOTH, 0)
        self._proxy = proxy
        self._near, self._far = near, far
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Carry until both directions have ended or it is aborted."""
        self._tasks = [
            asyncio.create_task(self._carry("forth", self._near[0], self._far[1])),
            asyncio.create_task(self._carry("back", self._far[0], self._near[1])),
        ]
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, writer in (self._near, self._far):
            writer.close()

    def abort(self) -> None:
        for _, writer in (self._near, self._far):
            _abort(writer)
        for task in self._tasks:
            task.cancel()

    def end(self, direction: Direction) -> None:
        """What the writer of this direction has sent so far is all that comes."""
        writer = self._far[1] if direction == "forth" else self._near[1]
        if not writer.is_closing():
            writer.write_eof()
        self._tasks[direction == "back"].cancel()

    async def _carry(self, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: _Queue = asyncio.Queue()
        sending = asyncio.create_task(self._send(direction, queue, sink))
        proxy = self._proxy
        try:
            while True:
                chunk = await source.read(65536)
                self.kept_bytes[direction] += len(chunk)
                queue.put_nowait((loop.time() + proxy._delay_s, proxy._gates[direction][-1], chunk))
                if not chunk:
                    break
            await sending
        except OSError:
            await proxy._gates[direction][-1].wait()
            self.abort()  # one side has reset it, so the other hears the same
        finally:
            sending.cancel()

    async def _send(self, direction: Direction, queue: _Queue, sink: asyncio.StreamWriter) -> None:
        proxy, loop = self._proxy, asyncio.get_running_loop()
        while True:
            due, gate, chunk = await queue.get()
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            await gate.wait()
            if not chunk:
                sink.write_eof()
                return
            while chunk:
                rate = proxy._bytes_per_s
                portion = max(1, int(rate * _TICK_S)) if rate else len(chunk)
                sink.write(chunk[:portion])
                await sink.drain()
                self.kept_bytes[direction] -= len(chunk[:portion])
                chunk = chunk[portion:]
                if rate and chunk:
                    await asyncio.sleep(_TICK_S)


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    sock: socket.socket = writer.get_extra_info("socket")
    if not writer.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
