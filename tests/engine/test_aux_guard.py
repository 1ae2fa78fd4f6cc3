"""The auxiliary output generation: a keep reset must not change it while output is in flight.

vLLM's own worker connector asserts that no output is pending when the generation changes, because its own reset runs
only when nothing is. Present since 0.31; before, there is nothing to guard.
"""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge import protocol
from engine_bridge.engine import core, pools
from engine_bridge.operations import Context
from engine_bridge.operations.reset import reset
from tests.engine.scheduler_world import BLOCK, World

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(2 * BLOCK)]


def scheduler_connector() -> Any:
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

    return AuxOutputSchedulerConnector


def present() -> bool:
    try:
        scheduler_connector()
    except ImportError:
        return False
    return True


class Worker:
    """vLLM's worker connector, with a model's part of it left out: what it captured, and its store."""

    def __init__(self) -> None:
        from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

        self.connector = AuxOutputWorkerConnector.__new__(AuxOutputWorkerConnector)
        self.connector.__dict__.update(
            _buffer=SimpleNamespace(reset=lambda: None, discard=lambda name: None, block_size=BLOCK),
            _store=None,
            _requests={},
            _generation=0,
            _step_metadata=None,
            _pending_outputs=[],
            _lock=Lock(),
            _publish_blocks=lambda *args, **kwargs: None,
        )

    def take(self, scheduler_output: Any) -> None:
        """A step arrives, and its output stays in flight."""
        self.connector.begin_step(scheduler_output.aux_output_connector_metadata)
        names = list(scheduler_output.num_scheduled_tokens)
        self.connector._pending_outputs.append(names)
        for name in names:
            self.connector._requests[name].pending_outputs += 1

    def hand_over(self) -> None:
        """The oldest output in flight is consumed, with all that its requests said."""
        for name in self.connector._pending_outputs.pop(0):
            state = self.connector._requests[name]
            state.pending_outputs -= 1
            state.emit_cursor = 1 << 30


def world_with_aux_output() -> tuple[World, Worker]:
    world = World(blocks=64, asynchronous=True)
    aux = scheduler_connector()
    try:
        world.scheduler.aux_output_connector = aux()
    except TypeError:
        world.scheduler.aux_output_connector = aux(world.scheduler.kv_cache_manager, None)
    world.scheduler.aux_output_connector.take_output = lambda request, output: None
    return world, Worker()


class Engine:
    """As much of an engine core as the port looks at here."""

    def __init__(self, world: World) -> None:
        self.scheduler = world.scheduler
        self._world = world

    @property
    def batch_queue(self) -> list[tuple[None, Any, None]]:
        return [(None, scheduled, None) for scheduled in self._world.in_flight]


if present():

    def running() -> tuple[World, Worker, Any]:
        """A request decodes, and one step's output is in flight. Also the port on it."""
        world, worker = world_with_aux_output()
        world.add("a", PROMPT, max_tokens=20)
        worker.take(world.schedule())
        port = core.VllmEngine.__new__(core.VllmEngine)
        port._engine, port._scheduler = Engine(world), world.scheduler
        return world, worker, port

    def test_changing_it_while_output_is_in_flight_fails_the_worker() -> None:
        world, worker, _ = running()
        pools.drop_prefix_cache(world.scheduler)
        world.scheduler.aux_output_connector.reset()
        with pytest.raises(AssertionError, match="generation changed with output in flight"):
            worker.take(world.schedule())

    def test_the_port_does_not_change_it_while_output_is_in_flight() -> None:
        world, worker, port = running()
        pools.drop_prefix_cache(world.scheduler)
        port.bump_aux_generation()
        assert world.scheduler.aux_output_connector._generation == 0
        for _ in range(5):
            worker.take(world.schedule())
            worker.hand_over()
            world.process()

    def test_the_port_changes_it_once_nothing_is() -> None:
        world, worker, port = running()
        worker.hand_over()
        world.process()
        port.bump_aux_generation()
        assert world.scheduler.aux_output_connector._generation == 1
        worker.take(world.schedule())

else:

    def test_this_vllm_has_no_auxiliary_output_and_there_is_nothing_to_guard() -> None:
        assert not hasattr(World(blocks=64).scheduler, "aux_output_connector")


def test_a_keep_reset_never_asks_for_another_generation() -> None:
    asked = []

    class Port:
        """Answers every question of the operation with "nothing there"."""

        identity = SimpleNamespace(prefix_caching=True)

        def __getattr__(self, name: str) -> Any:
            answers: dict[str, Any] = {
                "capabilities": dict.fromkeys(protocol.CAPABILITIES, ""),
                "holders": protocol.Holders(),
                "publish_cleared": (False, []),
            }

            def answer(*_: Any) -> Any:
                asked.append(name)
                return answers.get(name, 0)

            return answer

    for mode in ("keep", "fail"):
        asked.clear()
        request = protocol.Reset(call=1, request_id="", deadline_ns=1 << 62, running=mode)
        for _ in reset(Port(), request, Context(clock=lambda: 0, deadline_ns=1 << 62)):
            pass
        assert ("bump_aux_generation" in asked) is (mode == "fail")
        assert "drop_prefix_cache" in asked
