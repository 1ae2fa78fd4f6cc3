"""What the bridge's hooks add to one pass of the engine's loop, with nothing else in the loop: microseconds.

Between two engine processes lie tens of microseconds a step that have nothing to do with a bridge, and the hooks cost
less. So here they are laid over a loop that does nothing, over vLLM's real scheduler with requests in it, and the same
loop is timed without them. Warm is the best of many passes in a row. Cold is one pass after a pause in which other
memory was used, as a model does between two passes: processor time of this thread, median.
"""

from __future__ import annotations

import os
import queue
import statistics
import tempfile
import time
import timeit
from types import SimpleNamespace

import pytest

from engine_bridge.engine import hooks
from tests.bench.figures import Report, Table
from tests.engine.scheduler_world import World

REQUESTS = 8
AIM_US = 10.0
PAUSE_S = 0.005
OTHER_MEMORY = 8 << 20
"""Bytes touched between two cold passes, more than a core's own caches hold."""


class Loop:
    """As much of an engine core as the hooks touch. One pass is what `run_busy_loop` does between two model steps."""

    def __init__(self) -> None:
        """With requests that run."""
        world = World(blocks=4096)
        for index in range(REQUESTS):
            world.add(f"r{index}", 64, 4000)
        for _ in range(5):
            world.step()
        scheduled = SimpleNamespace(total_num_scheduled_tokens=REQUESTS, preempted_req_ids=None)
        world.scheduler.schedule = lambda: scheduled  # type: ignore[method-assign,assignment]
        self.scheduler = world.scheduler
        self.vllm_config = world.config
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self.batch_queue = None
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.has_work = self.is_running = lambda: True
        self._process_input_queue = lambda: None
        self._handle_client_request = lambda request_type, request: None
        self.step_fn = self._step
        self._outputs = {0: SimpleNamespace(outputs=[1] * REQUESTS)}

    def _step(self) -> tuple[object, bool]:
        self.scheduler.schedule()
        return self._outputs, True

    def one_pass(self) -> None:
        self._process_input_queue()
        self.step_fn()


def warm_us(loop: Loop, repeats: int) -> float:
    return min(timeit.repeat(loop.one_pass, number=100, repeat=repeats)) / 100 * 1e6


def cold_us(loop: Loop, passes: int) -> float:
    other = bytearray(OTHER_MEMORY)
    found = []
    for turn in range(passes):
        time.sleep(PAUSE_S)
        other[::64] = bytes([turn % 256]) * (OTHER_MEMORY // 64)
        began = time.thread_time_ns()
        loop.one_pass()
        found.append((time.thread_time_ns() - began) / 1000)
    return statistics.median(found)


def measure_hooks(quick: bool, report: Report) -> None:
    """Adds a table and an aim."""
    repeats, passes = (100, 50) if quick else (1000, 500)
    with tempfile.TemporaryDirectory(prefix="kvctl-bench-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCTL_ENGINE_DIR", directory)
        loop = Loop()
        without = warm_us(loop, repeats), cold_us(loop, passes)
        bridge = hooks.attach_to_process(loop)
        if bridge is None:
            raise RuntimeError(f"the bridge did not attach: {os.listdir(directory)}")
        try:
            laid = warm_us(loop, repeats), cold_us(loop, passes)
        finally:
            bridge.close()
    table = Table("One pass of an empty loop, µs", ("the loop", "without hooks", "with hooks", "added"))
    for name, bare, hooked in zip(("warm, at best", "cold caches (median)"), without, laid, strict=True):
        table.rows.append([name, bare, hooked, hooked - bare])
    report.tables.append(table)
    why = f"a pass took {laid[0]:.1f} µs at best, and an empty one {without[0]:.1f} µs"
    report.aim("the hooks of an idle bridge add up to 10 µs to a step", laid[0] - without[0], AIM_US, "µs warm", why)
