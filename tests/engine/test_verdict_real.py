"""Verdicts on what real engines show: vLLM's scheduler in the deadlock, and an engine process in every state.

The second test can record what it saw (KVCTL_RECORD_HISTORIES=DIR): tests/unit/histories/*.jsonl come from there, so
that the verdicts are held to real samples where no engine is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine_bridge.engine import evidence as reading
from engine_bridge.engine import guards, relief
from engine_bridge.engine.in_force import Layer
from engine_bridge.engine.scheduler import Steps
from engine_bridge.page import Counters, Phase
from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.replica.history import SECOND, Link, Process, Sample, Verdict
from sidecar.replica.judgement import Judgement
from sidecar.replica.sampler import Sampler
from tests.engine.conftest import engine_process
from tests.engine.scheduler_world import World, full_attention, sliding_window
from tests.unit.histories.tape import Tape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


class SchedulerTape(Tape):
    """vLLM's real scheduler, looked at as the bridge does: its counts into a page, its evidence once a second."""

    def __init__(self, world: World) -> None:
        super().__init__(now_ns=time.monotonic_ns())
        self.world = world
        self.samples: list[Sample] = []
        engine = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=False))
        self._engine = engine
        self._steps = Steps(engine)
        Layer(world.scheduler, "schedule", self._steps.count_schedule).lay()
        self._guards = guards.install(world.scheduler)
        self.page.blocks_total = world.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def turn(self, seconds: float, *, steps: int = 3, ask: bool = False) -> Judgement:
        """So many steps each half second. Half a second takes none: only the page's clock moves on."""
        for look in range(round(seconds * 2)):
            self.now_ns += SECOND // 2
            for _ in range(steps):
                self.page.steps += 1
                self.world.step(self.world.loading())
                self._steps(self.page, self.now_ns)
            self.page.phase, self.page.phase_since_ns = Phase.LOOP, self.now_ns
            if not self.world.scheduler.requests:
                self.page.phase = Phase.IDLE
            told = None
            if ask and look % 2:
                told = reading.read_evidence(self._engine, self._guards, call=1, contiguity_blocks=0)
                told = msgspec.structs.replace(told, monotonic_ns=self.now_ns)
            self.samples.append(Sample(self.now_ns, Link.OPEN, Process.RUNNING, replace(self.page), told))
            self.look(self.samples[-1])
        return self.last


def test_the_deadlock_of_vllms_own_scheduler_is_raised_explained_relieved_and_cleared():
    """Seed 002, from the first request to the end of the last."""
    world = World(blocks=160, specs=[full_attention(), sliding_window(32)], connector="Remote")
    tape = SchedulerTape(world)
    world.add("before", 200, 40)
    tape.turn(4)
    assert tape.verdicts[-1] == "FLOWING"
    tape.turn(8)
    assert tape.last.verdict is Verdict.IDLE

    for name in ("first", "second"):
        world.remote.hits[name] = 1024
        world.add(name, 1280, arrival_time=time.time() + (name == "second"))
    began = tape.now_ns
    tape.turn(7, ask=True)
    assert tape.last.verdict is Verdict.HELD_BLOCKS_DEADLOCK
    raised = next(sample.at_ns for sample, (_, j) in zip(tape.samples, tape.judgements, strict=True) if j.stalled)
    assert raised - began <= 7 * SECOND
    held = tape.page.blocks_total - 27
    assert tape.last.explanation == (
        f"2 waiting requests hold {held} blocks, the head needs 32 and 27 are free: run `kvctl relieve`"
    )

    relief.relieve_one(world.scheduler)
    tape.turn(1)
    assert not tape.last.stalled, "cleared within two samples"
    tape.turn(15)
    assert tape.last.verdict is Verdict.IDLE
    assert tape.verdicts == ["FLOWING", "IDLE", "FLOWING", "HELD_BLOCKS_DEADLOCK", "FLOWING", "IDLE"]
    write_history("deadlock-and-relief", tape.samples)


class Recorder:
    """A sampler whose samples are kept."""

    def __init__(self, directory: Path) -> None:
        self.engines = EngineDirectory(directory)
        self.sampler = Sampler(self.engines, period_s=0.25)
        self.samples: list[Sample] = []

    async def until(self, verdict: Verdict, seconds: float = 30) -> None:
        """Sample at the sampler's pace until the verdict holds."""

        async def holds() -> bool:
            watched = self.sampler.watched
            return bool(watched) and watched[0].judgement.verdict is verdict

        await self._sample_until(holds, str(verdict), seconds)

    async def for_a_while(self, seconds: float) -> None:
        end = time.monotonic() + seconds

        async def over() -> bool:
            return time.monotonic() >= end

        await self._sample_until(over, "time", seconds + 5)

    async def through(self, wait: Callable[[], None]) -> None:
        """Sample for as long as a blocking wait lasts."""
        waiting = asyncio.create_task(asyncio.to_thread(wait))

        async def over() -> bool:
            return waiting.done()

        await self._sample_until(over, "the end of the requests", 60)
        await waiting

    async def _sample_until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            self.sampler.tick()
            for watched in self.sampler.watched:
                latest = watched.history.latest
                if latest is not None and (not self.samples or self.samples[-1] is not latest):
                    self.samples.append(latest)
            if await condition():
                return
            seen = [(str(w.judgement.verdict), w.judgement.explanation) for w in self.sampler.watched]
            assert time.monotonic() < end, f"never came: {what}; last {seen}"
            await asyncio.sleep(0.25)


def write_history(name: str, samples: list[Sample]) -> None:
    """Leave a recording, if asked to."""
    directory = os.environ.get("KVCTL_RECORD_HISTORIES")
    if not directory:
        return
    lines = []
    for sample in samples:
        counters = None
        if sample.counters is not None:
            counters = {**asdict(sample.counters), "incarnation": sample.counters.incarnation.hex()}
        row = {
            "at_ns": sample.at_ns,
            "link": sample.link,
            "process": sample.process,
            "counters": counters,
            "evidence": None if sample.evidence is None else msgspec.to_builtins(sample.evidence),
            "unanswered_since_ns": sample.unanswered_since_ns,
            "note": "" if sample.counters is not None else sample.note,
        }
        lines.append(json.dumps(row))
    Path(directory, f"{name}.jsonl").write_text("\n".join(lines) + "\n")


async def test_an_engine_process_is_seen_through_all_its_states(engine_dir: Path):
    with engine_process(engine_dir, step_ms=20, blocks=256, max_num_seqs=4) as engine:
        here = Recorder(engine_dir)
        await here.engines.start()
        try:
            await here.until(Verdict.IDLE)
            await here.for_a_while(2)
            asked = here.sampler.watched[0].asked_ns
            names = [engine.add(list(range(8 + n, 72 + n)), 150) for n in range(3)]
            await here.until(Verdict.FLOWING)
            await here.for_a_while(2)
            assert here.sampler.watched[0].asked_ns == asked == 0, "nothing was wrong, so nothing was asked"

            page = here.sampler.watched[0].history.counters
            assert isinstance(page, Counters)
            os.kill(page.pid, signal.SIGSTOP)
            await here.until(Verdict.ENGINE_STOPPED, 5)
            await here.for_a_while(2)
            os.kill(page.pid, signal.SIGCONT)
            await here.until(Verdict.FLOWING, 5)
            await here.through(lambda: engine.wait_finished(*names))
            await here.until(Verdict.IDLE, 10)

            many = [engine.add([9 + n] * 900, 100) for n in range(8)]
            await here.until(Verdict.SATURATED, 20)
            status = await here.sampler.status(2.0)
            assert status.engines[0].requests.running > 0
            assert status.engines[0].head.blocks_needed > 0
            await here.through(lambda: engine.wait_finished(*many))
            await here.until(Verdict.IDLE, 10)
            write_history("served-stopped-saturated", here.samples)

            os.kill(page.pid, signal.SIGKILL)
            await here.until(Verdict.ENGINE_DEAD, 5)
            await here.for_a_while(1)
        finally:
            await here.sampler.close()
            await here.engines.close()
    write_history("killed", here.samples)


async def test_a_long_step_is_flowing_until_it_counts_as_hung(engine_dir: Path):
    with engine_process(engine_dir, step_ms=4000, blocks=256) as engine:
        here = Recorder(engine_dir)
        await here.engines.start()
        try:
            await here.until(Verdict.IDLE)
            name = engine.add(list(range(8, 72)), 3)
            await here.until(Verdict.FLOWING)
            await here.for_a_while(7)
            verdicts = {here.sampler.watched[0].judgement.verdict}
            assert verdicts == {Verdict.FLOWING}
            page = here.sampler.watched[0].history.counters
            assert page is not None
            assert page.phase == Phase.STEP
            assert (time.monotonic_ns() - page.phase_since_ns) / SECOND < 10
            write_history("long-step", here.samples)
            await here.through(lambda: engine.wait_finished(name))
        finally:
            await here.sampler.close()
            await here.engines.close()
