"""Whether the bridge costs the engine anything: steps a second without it, with it idle, and with it polled.

vLLM's real engine core and scheduler with the tests' fake executor, so that a step is mostly scheduling and a cost
would show. Three engine processes live side by side, two without the bridge and one with it, and take turns at the same
work; an engine whose turn it is not is blocked on its queue. The two without the bridge, set against each other, are
the noise between processes. Polling asks the engine socket for admission evidence, from a process of its own.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.figures import Report, Table, main, progress
from tests.bench.hooks_alone import measure_hooks
from tests.bench.pairs import take_turns
from tests.engine.conftest import VllmEngineHarness, engine_config
from tests.fake_engine.client import BridgeClient

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 8
PROMPT_TOKENS = 64
STEP_MS = (0.0, 5.0)
POLLS = {
    "bridge polled at 10 Hz": (10, 0),
    "bridge polled at 100 Hz": (100, 0),
    "bridge, AdmissionStatus at 10 Hz": (10, 4096),
    "bridge, AdmissionStatus at 100 Hz": (100, 4096),
}
"""Questions a second, and how many free blocks each has looked at for contiguity: none when the sidecar samples by
itself, as many as in `sampler.STATUS_CONTIGUITY_BLOCKS` when somebody asks for AdmissionStatus."""
NOISE_FLOOR = 0.02
WARM_UP_STEPS = 150
ALSO_BARE = "no bridge, another process"


@dataclass
class Engine:
    """One engine process and what its turns cost it."""

    harness: VllmEngineHarness
    pid: int
    directory: Path

    def processor_s(self) -> float:
        """Time on a processor so far, all threads of the engine core's process."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextmanager
def engine(directory: Path, step_ms: float, bridge: bool) -> Iterator[Engine]:
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.executor.abstract import Executor

    with pytest.MonkeyPatch.context() as patch:
        # A forked engine would inherit this process's plugins, also where it is to have none.
        patch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("KVCTL_BRIDGE", "1" if bridge else "0")
        patch.setenv("KVCTL_ENGINE_DIR", str(directory))
        patch.setenv("KVCTL_FAKE_STEP_MS", str(step_ms))
        patch.setenv("KVCTL_FAKE_BLOCKS", "4096")
        config = engine_config(max_model_len=4096)
        client = SyncMPClient(config, Executor.get_class(config), log_stats=True)
    harness = VllmEngineHarness(client, directory)
    try:
        harness.start_pump()
        if bridge:
            harness.sockets()
        elif list(directory.glob("*.sock")):
            raise RuntimeError("an engine that was to have no bridge has one")
        (process,) = client.resources.engine_manager.processes
        yield Engine(harness, process.pid, directory)
    finally:
        harness.close()


@dataclass
class Pace:
    steps_per_second: float
    processor_us_per_step: float


def pace(engine: Engine, steps: int) -> Pace:
    """All requests run in one batch, so a step gives each a token; their prompts take two steps more."""
    harness = engine.harness
    prompts = [[8 + (7 * lane + index) % 400 for index in range(PROMPT_TOKENS)] for lane in range(REQUESTS)]
    spent, began = engine.processor_s(), time.perf_counter()
    names = [harness.add(prompt, steps) for prompt in prompts]
    harness.wait_finished(*names)
    elapsed, spent = time.perf_counter() - began, engine.processor_s() - spent
    harness.tokens.clear()
    harness.finished.clear()
    return Pace(steps / elapsed, spent / steps * 1e6)


class Poller:
    """Asks the engine socket at a rate while told to."""

    def __init__(self, directory: Path) -> None:
        words = [sys.executable, "-m", "tests.bench.bench_engine_steps", "--as-poller", str(directory)]
        self._process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def polling(self, rate: int, contiguity_blocks: int) -> Iterator[None]:
        self._tell(f"{rate} {contiguity_blocks}")
        try:
            yield
        finally:
            self._tell("0 0")

    def _tell(self, order: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the poller ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def as_poller(directory: Path) -> int:
    """The polling process: a line on stdin has questions a second (0 to rest) and blocks to look at."""
    import select

    (path,) = directory.glob("engine-*.sock")
    rate, contiguity_blocks = 0.0, 0
    with BridgeClient(path) as client:
        due = time.monotonic()
        while True:
            wait = max(0.0, due - time.monotonic()) if rate else None
            if select.select([0], [], [], wait)[0]:
                line = os.read(0, 64).decode()
                if not line:
                    return 0
                rate, contiguity_blocks = float(line.split()[0]), int(line.split()[1])
                due = time.monotonic()
                os.write(1, b"ok\n")
                continue
            client.admission(contiguity_blocks)
            due += 1 / rate


def measure_at(step_ms: float, rounds: int, seconds: float, report: Report) -> None:
    with ExitStack() as stack:
        engines = {}
        for name in ("bare", "bare too", "bridge"):
            progress(f"steps of {step_ms:g} ms: booting the engine '{name}'")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvctl-bench-")))
            engines[name] = stack.enter_context(engine(directory, step_ms, bridge=name == "bridge"))
        poller = Poller(engines["bridge"].directory)
        stack.callback(poller.close)
        # The first work warms an engine up, the second says how many steps fill a turn.
        for each in engines.values():
            pace(each, WARM_UP_STEPS)
        rate = max(pace(each, WARM_UP_STEPS).steps_per_second for each in engines.values())
        steps = max(WARM_UP_STEPS, min(4000 - PROMPT_TOKENS, int(seconds * rate)))
        costs: dict[str, list[float]] = {}

        def turn(name: str, engine: Engine, poll: tuple[int, int] | None = None) -> float:
            with poller.polling(*poll) if poll else nullcontext():
                found = pace(engine, steps)
            costs.setdefault(name, []).append(found.processor_us_per_step)
            return found.steps_per_second

        others: dict[str, Callable[[], float]] = {
            ALSO_BARE: lambda: turn(ALSO_BARE, engines["bare too"]),
            "bridge idle": lambda: turn("bridge idle", engines["bridge"]),
        }
        for name, poll in POLLS.items():
            others[name] = lambda name=name, poll=poll: turn(name, engines["bridge"], poll)
        progress(f"steps of {step_ms:g} ms: {rounds} rounds of {steps} steps")
        turns = take_turns(lambda: turn("no bridge", engines["bare"]), others, rounds)
    table = Table(
        f"{REQUESTS} requests running, a model step of {step_ms:g} ms",
        ("engine", "steps/s (median)", "of no bridge (quartiles)", "engine's processor time, µs a step (median)"),
    )
    processor = {name: statistics.median(values) for name, values in costs.items()}
    row = ["no bridge", turns.median_baseline, f"noise {turns.noise().text}", processor["no bridge"]]
    table.rows.append(row)
    table.rows += [[name, turns.median(name), turns.ratio(name).text, processor[name]] for name in others]
    report.tables.append(table)
    floor = min(turns.ratio(ALSO_BARE).low, turns.noise().low, 1 - NOISE_FLOOR)
    unit = f"of its steps/s (it against itself: {turns.noise().text})"
    for name in list(others)[1:]:
        more = processor[name] - processor["no bridge"]
        why = f"the noise of this run explains no less than {floor:.2f}; the engine spent {more:+.1f} µs more a step"
        text = f"{name}, steps of {step_ms:g} ms: within noise of no bridge"
        report.aim(text, turns.ratio(name).median, floor, unit, why, least=True)


def measure(quick: bool) -> Report:
    logging.disable(logging.CRITICAL)
    report = Report("engine_steps")
    for step_ms in STEP_MS[:1] if quick else STEP_MS:
        measure_at(step_ms, 3 if quick else 9, 0.5 if quick else 1.0, report)
    progress("the hooks alone")
    measure_hooks(quick, report)
    return report


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-poller"]:
        sys.exit(as_poller(Path(sys.argv[2])))
    sys.exit(main(measure))
