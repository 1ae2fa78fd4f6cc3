"""The dispatcher over the fake engine's model, under a fake clock: no socket, no thread, no sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_bridge import protocol
from engine_bridge.dispatcher import Dispatcher
from engine_bridge.port import Work
from tests.fake_engine.client import new_id
from tests.fake_engine.model import FakeEngine

SECOND = 10**9


class Log:
    """A Recorder that remembers the order of things."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.abandoned = False

    def note_started(self, request_id: str, now_ns: int) -> None:
        self.events.append(("started", request_id))

    def note_reset(self, mode: protocol.RunningMode, now_ns: int) -> None:
        self.events.append(("reset", mode))

    def note_working(self, working: bool) -> None:
        self.events.append(("working", working))

    def note_operation(self, now_ns: int, longest_us: int) -> None:
        self.events.append(("operation", longest_us))

    def note_abandoned(self, abandoned: bool) -> None:
        self.abandoned = abandoned


class World:
    def __init__(self) -> None:
        self.now = 1000 * SECOND
        self.stopping = False
        self.engine = FakeEngine()
        self.log = Log()
        self.dispatcher = Dispatcher(self.engine, self.log, clock=lambda: self.now, stopping=lambda: self.stopping)
        self.replies: list[Any] = []

    def send(self, request: protocol.Request) -> None:
        self.dispatcher.handle(request, self.replies.append)

    def reset(
        self, running: protocol.RunningMode = "fail", *, request_id: str = "", call: int = 1, **options: Any
    ) -> Any:
        seconds = options.pop("seconds", 10)
        self.send(protocol.Reset(call, request_id or new_id(), self.now + int(seconds * SECOND), running, **options))
        return self.replies[-1] if self.replies else None

    def tick(self, seconds: float = 0) -> None:
        self.now += int(seconds * SECOND)
        self.dispatcher.tick()


def slow_reorder(world: World, slice_ns: int, slices: int, then: Callable[[], None] = lambda: None) -> None:
    """A reorder whose every piece takes `slice_ns` of the clock."""

    def reorder(scope: str) -> Work[int]:
        for _ in range(slices):
            world.now += slice_ns
            yield None
        then()
        return slices

    world.engine.reorder = reorder  # type: ignore[method-assign,assignment]
