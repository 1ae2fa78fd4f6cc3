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
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine_bridge.engine import evidence as reading
from engine_bridge.engine import guards
from engine_bridge.page import Counters, Phase
from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.replica.history import SECOND, Sample, Verdict
from sidecar.replica.sampler import Sampler
from tests.engine.conftest import engine_process
from tests.engine.test_deadlock_relief import deadlocked_world
from tests.unit.histories.tape import Tape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_the_deadlock_of_vllms_own_scheduler_is_judged_and_explained_with_its_numbers():
    """Seed 002."""
    world = deadlocked_world()
    engine = SimpleNamespace(scheduler=world.scheduler, model_executor=SimpleNamespace(is_sleeping=False))
    told = reading.read_evidence(engine, guards.install(world.scheduler), call=1, contiguity_blocks=0)
    tape = Tape()
    tape.play(5, tokens=500, outputs=10, running=2, blocks_total=told.blocks_total, blocks_free=told.blocks_free)
    tape.play(8, evidence=told, running=0, waiting=2, deferred=2, holding=2)
    assert tape.last.verdict is Verdict.HELD_BLOCKS_DEADLOCK
    held = told.blocks_total - told.blocks_free
    assert tape.last.explanation == (
        f"2 waiting requests hold {held} blocks, the head needs 32 and 27 are free: run `kvctl relieve`"
    )


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

    def write(self, name: str) -> None:
        """Leave a recording, if asked to."""
        directory = os.environ.get("KVCTL_RECORD_HISTORIES")
        if not directory:
            return
        lines = []
        for sample in self.samples:
            counters = None
            if sample.counters is not None:
                counters = {**asdict(sample.counters), "incarnation": sample.counters.incarnation.hex()}
            told = None if sample.evidence is None else msgspec.to_builtins(sample.evidence)
            row = {
                "at_ns": sample.at_ns,
                "link": sample.link,
                "process": sample.process,
                "counters": counters,
                "evidence": told,
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
            engine.wait_finished(*names)
            await here.until(Verdict.IDLE, 10)

            many = [engine.add([9 + n] * 900, 100) for n in range(8)]
            await here.until(Verdict.SATURATED, 20)
            status = await here.sampler.status(2.0)
            assert status.engines[0].requests.running > 0
            assert status.engines[0].head.blocks_needed > 0
            engine.wait_finished(*many)
            await here.until(Verdict.IDLE, 10)
            here.write("served-stopped-saturated")

            os.kill(page.pid, signal.SIGKILL)
            await here.until(Verdict.ENGINE_DEAD, 5)
            await here.for_a_while(1)
        finally:
            await here.sampler.close()
            await here.engines.close()
    here.write("killed")


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
            here.write("long-step")
            engine.wait_finished(name)
        finally:
            await here.sampler.close()
            await here.engines.close()
