"""Bytes that are no messages, at both ends of the engine's socket: nothing crashes, nothing hangs, work goes on."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
import uuid
from pathlib import Path

import msgspec
import pytest

from engine_bridge import page, protocol
from sidecar.backends.bridge.connection import Connection, ConnectionGone, NoAnswer, Refused
from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.backends.bridge.ownership import Peer
from sidecar.backends.engine import Answered, Lost, Unreachable
from tests.fake_engine.process import EngineProcess

FRAMES = 10_000
SEED = 20260729

ID = str(uuid.uuid4())
TIER = protocol.Tier("done", "R", "m")
RESULT = protocol.ResetResult(
    TIER, TIER, TIER, TIER, 1, 2, 3, 4, 5, protocol.Holders(1, 2, 3), True, True, ["GPU"], protocol.PauseCost(1, 2, 3)
)
REQUESTS = [
    protocol.Hello(1, 1, "fuzz"),
    protocol.Reset(1, ID, 10**18, "keep", connector=True),
    protocol.Reorder(2, ID, 10**18, "uncached"),
    protocol.Relieve(3, ID, 10**18),
    protocol.Pause(4, ID, 10**18, 10**9),
    protocol.Renew(5, ID, 10**9, True),
    protocol.Resume(6, ID, 10**18, ID, "v"),
    protocol.Admission(7),
    protocol.Lookup(8, ID),
    protocol.Cancel(9, ID),
    protocol.Ping(10),
]
REPLIES = [
    protocol.Welcome(1, "ab" * 16, 1, 2, 0, 1, "0.32", "0.1", "m", 16, 100, True, {"reset.keep": ""}, 5),
    protocol.Goodbye("bye"),
    protocol.Outcome(1, ID, "reset", "done", "", "", RESULT),
    protocol.Outcome(1, ID, "pause", "done", result=protocol.SchedulingResult("paused", "v")),
    protocol.Found(1, ID, True),
    protocol.Cancelled(1, ID, True),
    protocol.Pong(1, 5),
    protocol.Fault(1, "no"),
]


def mutate(chance: random.Random, frame: bytes) -> bytes:
    """One to four changes of the kinds that break parsers."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        kind = chance.randrange(7)
        at = chance.randrange(len(data) + 1)
        if kind == 0 and data:
            data[at % len(data)] = chance.randrange(256)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 40))
        elif kind == 3 and data:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 4:
            data[at:at] = data[: chance.randint(0, 60)]
        elif kind == 5:
            data[at:at] = bytes([chance.choice([0x90, 0x91, 0xDC, 0xDD, 0xDF, 0xC1, 0xD9, 0xDB])]) * chance.randint(
                1, 9
            )
        else:
            data[at:at] = b"\x91" * chance.randint(1, 3000)
    return bytes(data[:60_000]) or b"\x00"


def frames(messages: list[msgspec.Struct], count: int) -> list[bytes]:
    chance = random.Random(SEED)
    whole = [protocol.encoder.encode(message) for message in messages]
    return [mutate(chance, chance.choice(whole)) for _ in range(count)]


class Client:
    """A blocking client of an engine's socket that reconnects when it is thrown out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock: socket.socket | None = None

    def connected(self) -> socket.socket:
        if self.sock is None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.sock.settimeout(5)
            self.sock.connect(str(self.path))
            self.sock.send(protocol.encoder.encode(protocol.Hello(1, 1, "fuzz")))
            assert isinstance(self.receive(), protocol.Welcome)
        return self.sock

    def receive(self) -> object:
        assert self.sock is not None
        return protocol.reply_decoder.decode(self.sock.recv(protocol.MAX_FRAME_BYTES))

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def test_the_engine_survives_ten_thousand_mutated_frames_and_goes_on_answering(tmp_path):
    engine = EngineProcess(tmp_path)
    client = Client(engine.socket_path)
    try:
        for number, frame in enumerate(frames(REQUESTS, FRAMES)):
            try:
                client.connected().send(frame)
                _read_away(client.connected())
            except (BrokenPipeError, ConnectionResetError):
                client.close()
            if number % 500 == 0:
                _assert_answers(engine)
        client.close()
        _assert_answers(engine)
        assert engine.process.poll() is None
    finally:
        client.close()
        engine.end()


def _read_away(sock: socket.socket) -> None:
    """Take what is there, so that a client that does not read is not what is tested."""
    sock.setblocking(False)
    try:
        while sock.recv(protocol.MAX_FRAME_BYTES):
            pass
        raise ConnectionResetError
    except BlockingIOError:
        sock.settimeout(5)


def _assert_answers(engine: EngineProcess) -> None:
    began = time.monotonic()
    client = Client(engine.socket_path)
    client.connected().send(protocol.encoder.encode(protocol.Ping(77)))
    answer = client.receive()
    client.close()
    assert isinstance(answer, protocol.Pong)
    assert answer.call == 77
    assert time.monotonic() - began < 30


async def test_the_sidecars_end_turns_ten_thousand_mutated_replies_into_answers_or_errors():
    endings = {"answered": 0, "ended": 0, "unanswered": 0}
    for frame in frames(REPLIES, FRAMES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        connection = Connection(ours, Path("fuzz"), Peer(os.getpid(), os.getuid(), os.getgid()))
        try:
            theirs.send(frame)
            request = protocol.Lookup(1, ID)
            await connection.call(request, 1, time.monotonic_ns() + 3_000_000)
            endings["answered"] += 1
        except ConnectionGone:
            endings["ended"] += 1
        except NoAnswer:
            endings["unanswered"] += 1
        finally:
            connection.close()
            theirs.close()
    assert sum(endings.values()) == FRAMES
    assert endings["ended"] > FRAMES // 4, endings


async def test_a_mutated_handshake_is_refused_or_ends_and_never_hangs():
    for frame in frames(REPLIES[:2], 2000):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        connection = Connection(ours, Path("fuzz"), Peer(os.getpid(), os.getuid(), os.getgid()))
        try:
            theirs.send(frame)
            theirs.close()
            async with asyncio.timeout(2):
                await connection.handshake("fuzz")
        except (ConnectionGone, Refused, NoAnswer):
            pass
        finally:
            connection.close()


async def test_an_engine_that_speaks_nonsense_leaves_the_sidecar_standing(tmp_path):
    """Whole backend: handshake done properly, every answer mutated."""
    tmp_path.chmod(0o700)
    key = "engine-0-abababab"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / f"{key}.sock"))
    listener.listen(16)
    listener.setblocking(False)
    counters = page.Counters(incarnation=bytes.fromhex("ab" * 16), phase=page.Phase.IDLE, phase_since_ns=1)
    writer = page.PageWriter(tmp_path / f"{key}.page", counters)
    replies = iter(frames(REPLIES[2:], 400))

    async def serve(loop: asyncio.AbstractEventLoop) -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            try:
                await loop.sock_recv(sock, 65536)
                await loop.sock_sendall(sock, protocol.encoder.encode(REPLIES[0]))
                while await loop.sock_recv(sock, 65536):
                    await loop.sock_sendall(sock, next(replies))
            except OSError:
                continue
            finally:
                sock.close()

    server = asyncio.create_task(serve(asyncio.get_running_loop()))
    engines = EngineDirectory(tmp_path)
    await engines.start()
    try:
        for _ in range(60):
            engine = engines.engines()[0]
            began = time.monotonic()
            mutation = protocol.Reset(0, str(uuid.uuid4()), 0, "keep")
            answer = await engine.submit(mutation, time.monotonic_ns() + 200_000_000)
            assert isinstance(answer, Answered | Lost | Unreachable)
            assert time.monotonic() - began < 10
            assert isinstance(await engine.evidence(0.1), protocol.Evidence | Lost | Unreachable)
            assert engine.liveness() is not None
    finally:
        await engines.close()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        listener.close()
        writer.close()


def test_a_mutated_page_is_read_or_refused(tmp_path):
    path = tmp_path / "page"
    writer = page.PageWriter(path, page.Counters(incarnation=bytes(16), pid=1))
    writer.note_started(ID, 5)
    writer.close()
    whole = path.read_bytes()
    chance = random.Random(SEED)
    refused = 0
    for number in range(2000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 30)):
            data[chance.randrange(1500)] = chance.randrange(256)
        size = page.PAGE_BYTES if number % 10 else chance.randrange(page.PAGE_BYTES)
        path.write_bytes(data[:size])
        try:
            reader = page.PageReader(path)
        except page.PageError:
            refused += 1
            continue
        try:
            reader.read().has_started(ID)
        except page.PageError:
            refused += 1
        finally:
            reader.close()
    assert 0 < refused < 2000


@pytest.mark.parametrize("size", [protocol.MAX_FRAME_BYTES + 1, 100_000])
async def test_a_frame_over_the_limit_ends_the_connection(size):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    connection = Connection(ours, Path("fuzz"), Peer(0, 0, 0))
    theirs.send(b"\x00" * size)
    with pytest.raises(ConnectionGone, match="over 65536"):
        await connection.call(protocol.Ping(1), 1, time.monotonic_ns() + 2_000_000_000)
    theirs.close()
