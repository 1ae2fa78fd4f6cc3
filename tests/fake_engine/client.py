"""A plain blocking client of the engine socket, for tests: no retries, no interpretation."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from engine_bridge import protocol

ReplyT = TypeVar("ReplyT")


def new_id() -> str:
    return str(uuid.uuid4())


def deadline(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


class BridgeClient:
    """One connection. `ask` sends a request and waits for the reply with its call number; others are kept."""

    def __init__(self, path: Path, *, hello: bool = True, timeout: float = 20) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(timeout)
        self.sock.connect(str(path))
        self._calls = 0
        self._kept: dict[int, protocol.Reply] = {}
        self.welcome: protocol.Welcome | None = None
        if hello:
            version = protocol.PROTOCOL_VERSION
            self.send(protocol.Hello(version, version, "kvctl-tests"))
            reply = self.read()
            assert isinstance(reply, protocol.Welcome), reply
            self.welcome = reply

    def send(self, request: protocol.Request) -> None:
        self.sock.send(protocol.encoder.encode(request))

    def read(self) -> protocol.Reply:
        frame = self.sock.recv(protocol.MAX_FRAME_BYTES)
        if not frame:
            raise EOFError("the engine closed the connection")
        return protocol.reply_decoder.decode(frame)

    def post(self, make: Callable[[int], protocol.Request]) -> int:
        """Send without waiting; returns the call number."""
        self._calls += 1
        self.send(make(self._calls))
        return self._calls

    def answer(self, call: int) -> protocol.Reply:
        """Wait for the reply to a call."""
        while call not in self._kept:
            reply = self.read()
            self._kept[getattr(reply, "call", -1)] = reply
        return self._kept.pop(call)

    def ask(self, make: Callable[[int], protocol.Request]) -> protocol.Reply:
        return self.answer(self.post(make))

    def mutate(self, make: Callable[[int], protocol.Request]) -> protocol.Outcome:
        reply = self.ask(make)
        assert isinstance(reply, protocol.Outcome), reply
        return reply

    def reset(
        self, running: protocol.RunningMode = "fail", *, seconds: float = 10, request_id: str = "", **options: bool
    ) -> protocol.Outcome:
        request_id = request_id or new_id()
        return self.mutate(lambda call: protocol.Reset(call, request_id, deadline(seconds), running, **options))

    def reorder(self, scope: protocol.Scope, *, seconds: float = 10, request_id: str = "") -> protocol.Outcome:
        request_id = request_id or new_id()
        return self.mutate(lambda call: protocol.Reorder(call, request_id, deadline(seconds), scope))

    def admission(self, contiguity_blocks: int = 4096) -> protocol.Evidence:
        reply = self.ask(lambda call: protocol.Admission(call, contiguity_blocks))
        assert isinstance(reply, protocol.Evidence), reply
        return reply

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> BridgeClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
