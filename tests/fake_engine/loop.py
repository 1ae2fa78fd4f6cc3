"""The loop around the model, shaped like vLLM's: block while idle, drain the queue, step, repeat."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_bridge.attach import Bridge, attach
from engine_bridge.page import Phase
from tests.fake_engine.control import run_command
from tests.fake_engine.gate import AFTER_EFFECT, BEFORE_EFFECT, Gate
from tests.fake_engine.model import FakeEngine, FakeIdentity
from tests.fake_engine.witness import Witness

Job = Callable[[], None]


class FakeLoop:
    """One fake engine core: model, bridge and the thread they live on."""

    def __init__(
        self,
        engine: FakeEngine,
        directory: Path,
        *,
        steps_per_second: float = 0,
        effects_file: Path | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.bridge: Bridge | None = None
        self.effects: list[dict[str, Any]] = []
        self.stopping = False
        self.hung = threading.Event()
        self.unhang = threading.Event()
        self.attached = threading.Event()
        self.ended = threading.Event()
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._pace = threading.Event()
        self._step_seconds = 1 / steps_per_second if steps_per_second else 0.002
        self._effects_file = effects_file
        self._witness = witness
        self._current = ""
        self.gate = Gate()
        engine.note_effect = self._note_effect
        engine.before_effect = lambda: self.gate.pass_by(BEFORE_EFFECT)

    # --- on the engine's thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """The busy loop; returns when told to stop."""
        engine = self.engine
        self.bridge = bridge = attach(
            lambda: engine,
            rank=engine.identity.data_parallel_rank,
            wake=lambda: self._queue.put(None),
            stopping=lambda: self.stopping,
            directory=self.directory,
        )
        if bridge is not None:
            self._watch(bridge)
        self.attached.set()
        try:
            while not self.stopping:
                self._turn(bridge)
        finally:
            if bridge is not None:
                bridge.close()
            self.ended.set()

    def _turn(self, bridge: Bridge | None) -> None:
        engine = self.engine
        if bridge is not None:
            bridge.boundary()
        if not engine.has_work():
            if bridge is not None:
                bridge.observe(engine.read_counters, Phase.IDLE)
                bridge.arm()
            self._do(self._queue.get())
        while not self._queue.empty():
            self._do(self._queue.get_nowait())
        if engine.has_work() and not self.stopping:
            if bridge is not None:
                bridge.step_begins()
            self._pace.wait(self._step_seconds)
            engine.step()
            if bridge is not None:
                bridge.step_ended(engine.read_counters)

    def _do(self, job: Job | None) -> None:
        if job is not None:
            job()

    def hang(self, seconds: float) -> None:
        """Hold the engine thread inside a step."""
        if self.bridge is not None:
            self.bridge.step_begins()
        self.unhang.clear()
        self.hung.set()
        self.unhang.wait(seconds)
        self.hung.clear()
        if self.bridge is not None:
            self.bridge.step_ended(self.engine.read_counters)

    def _watch(self, bridge: Bridge) -> None:
        """Learn which request id the effects that follow belong to."""
        note_started, note_operation = bridge.note_started, bridge.note_operation

        def noting(request_id: str, now_ns: int) -> None:
            self._current = request_id
            if self._witness is not None:
                self._witness.taken(bridge.incarnation, request_id, now_ns)
            note_started(request_id, now_ns)

        def noting_the_end(now_ns: int, longest_us: int) -> None:
            note_operation(now_ns, longest_us)
            if self._witness is not None:
                self._witness.ended(bridge.incarnation)

        bridge.note_started = noting  # type: ignore[method-assign]
        bridge.note_operation = noting_the_end  # type: ignore[method-assign]

    def _note_effect(self, effect: str, count: int) -> None:
        entry = {
            "request_id": self._current,
            "incarnation": self.incarnation,
            "effect": effect,
            "count": count,
            "rank": self.engine.identity.data_parallel_rank,
        }
        self.effects.append(entry)
        if self._effects_file is not None:
            with self._effects_file.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        if self._witness is not None:
            self._witness.effect(self.incarnation, effect)
        self.gate.pass_by(AFTER_EFFECT)

    # --- from any thread -----------------------------------------------------------------------------------------

    def call(self, job: Callable[[], Any], timeout: float = 10) -> Any:
        """Run something on the engine's thread, between two steps."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:
                done.set_exception(error)

        self._queue.put(run)
        return done.result(timeout)

    def post(self, job: Job) -> None:
        """Run something on the engine's thread without waiting for it."""
        self._queue.put(job)

    def do(self, name: str, **arguments: Any) -> dict[str, Any]:
        """Run a command of control.py."""
        return run_command(self, {"do": name, **arguments})

    def stop(self) -> None:
        """End the loop at the next boundary."""
        self.stopping = True
        self.unhang.set()
        self.gate.let_go()
        self._queue.put(None)

    @property
    def incarnation(self) -> str:
        """32 hex digits, empty when not attached."""
        return self.bridge.incarnation if self.bridge is not None else ""

    @property
    def socket_path(self) -> Path:
        assert self.bridge is not None, "the bridge did not attach"
        return self.directory / f"{self.bridge.name}.sock"

    @property
    def page_path(self) -> Path:
        assert self.bridge is not None, "the bridge did not attach"
        return self.directory / f"{self.bridge.name}.page"


def build(
    directory: Path,
    *,
    rank: int = 0,
    dp_size: int = 1,
    requests: int = 0,
    blocks: int = 128,
    cached: int = 8,
    caching: bool = True,
    steps_per_second: float = 0,
    effects_file: Path | None = None,
    witness: Witness | None = None,
    model: str = "fake-model",
    **levers: Any,
) -> FakeLoop:
    """A fake engine, not started. `levers` are fields of FakeEngine."""
    identity = FakeIdentity(rank, dp_size, blocks=blocks, prefix_caching=caching, model=model)
    engine = FakeEngine(identity, **levers)
    engine.cached = set(engine.free[-cached:]) if cached else set()
    for _ in range(requests):
        engine.add("running", 2)
    return FakeLoop(engine, directory, steps_per_second=steps_per_second, effects_file=effects_file, witness=witness)


@contextmanager
def running_engine(directory: Path, **options: Any) -> Iterator[FakeLoop]:
    """A fake engine whose loop runs in a thread of this process; see `build` for the options."""
    loop = build(directory, **options)
    thread = threading.Thread(target=loop.run, name="fake-engine", daemon=True)
    thread.start()
    assert loop.attached.wait(10), "the fake engine did not start"
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(10)
        assert not thread.is_alive(), "the fake engine did not stop"
