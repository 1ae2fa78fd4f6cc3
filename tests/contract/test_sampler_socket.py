"""The sampler over the real socket and the real page of an engine process: what a stall, a stop and a death look like.

Short thresholds, so that the waits are short; the rules are the same.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvctl.v1 import types_pb2 as types

from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.replica.history import SECOND, Verdict
from sidecar.replica.judgement import Thresholds
from sidecar.replica.sampler import Sampler
from tests.fake_engine.process import EngineProcess, spawn_engine

SHORT = Thresholds(stall_ns=2 * SECOND, hung_ns=2 * SECOND, silent_ns=2 * SECOND)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "engines"
    made.mkdir(mode=0o700)
    return made


@asynccontextmanager
async def watching(directory: Path) -> AsyncIterator[Sampler]:
    engines = EngineDirectory(directory)
    await engines.start()
    sampler = Sampler(engines, thresholds=SHORT, period_s=0.1)
    await sampler.start()
    try:
        yield sampler
    finally:
        await sampler.close()
        await engines.close()


async def until(sampler: Sampler, verdict: Verdict, seconds: float = 60) -> None:
    """Wait for a verdict, by being told and not by asking."""
    changed = asyncio.Event()
    end = sampler.on_change(changed.set)
    try:
        async with asyncio.timeout(seconds):
            while not any(watched.judgement.verdict is verdict for watched in sampler.watched):
                changed.clear()
                await changed.wait()
    except TimeoutError:
        seen = [(str(w.judgement.verdict), w.judgement.explanation) for w in sampler.watched]
        pytest.fail(f"{verdict} never came; last {seen}")
    finally:
        end()


async def do(engine: EngineProcess, name: str, **arguments: object) -> None:
    await asyncio.to_thread(engine.do, name, **arguments)


async def test_serving_is_flowing_and_its_end_is_idle(directory: Path):
    with spawn_engine(directory) as engine:
        async with watching(directory) as sampler:
            await until(sampler, Verdict.IDLE)
            await do(engine, "hold", requests=2)
            await until(sampler, Verdict.FLOWING)
            assert sampler.watched[0].asked_ns == 0, "nothing was wrong, so nothing was asked"
            await do(engine, "release")
            await until(sampler, Verdict.IDLE)


async def test_waiting_holders_that_deadlock_the_head_are_named_in_time_and_cleared_at_once(directory: Path):
    with spawn_engine(directory) as engine:
        async with watching(directory) as sampler:
            await until(sampler, Verdict.IDLE)
            await do(engine, "deadlock")
            await do(engine, "hold_waiting", state="loaded", blocks=20)
            await until(sampler, Verdict.HELD_BLOCKS_DEADLOCK)
            status = await sampler.status()
            assert status.stalled
            assert "kvctl relieve" in status.engines[0].explanation
            assert status.engines[0].holders[0].blocks_held == 20
            await do(engine, "deadlock", on=False)
            await do(engine, "release")
            await until(sampler, Verdict.IDLE)


async def test_a_stopped_a_hung_and_a_killed_engine_are_told_apart(directory: Path):
    with spawn_engine(directory) as engine:
        async with watching(directory) as sampler:
            await until(sampler, Verdict.IDLE)
            engine.freeze()
            await until(sampler, Verdict.ENGINE_STOPPED)
            engine.thaw()
            await until(sampler, Verdict.IDLE)
            await do(engine, "hang", seconds=30)
            await until(sampler, Verdict.ENGINE_HUNG)
            status = await sampler.status(0.2)
            assert status.engines[0].from_page
            assert status.engines[0].phase == "step"
            await do(engine, "unhang")
            await until(sampler, Verdict.IDLE)
            engine.kill()
            await until(sampler, Verdict.ENGINE_DEAD)


async def test_status_of_a_frozen_engine_answers_in_time_from_its_page(directory: Path):
    with spawn_engine(directory) as engine:
        async with watching(directory) as sampler:
            await do(engine, "hold", requests=3)
            await until(sampler, Verdict.FLOWING)
            engine.freeze()
            began = time.monotonic()
            status = await sampler.status(0.3)
            assert time.monotonic() - began < 8
            assert status.engines[0].verdict == types.VERDICT_ENGINE_STOPPED
            assert status.engines[0].requests.running == 3
            engine.thaw()


async def test_sleeping_and_paused_engines_say_so_and_are_not_asked(directory: Path):
    with spawn_engine(directory) as engine:
        async with watching(directory) as sampler:
            await do(engine, "hold")
            await do(engine, "pause")
            await until(sampler, Verdict.PAUSED)
            await do(engine, "unpause")
            await do(engine, "release")
            await do(engine, "sleep")
            await until(sampler, Verdict.SLEEPING)
            assert sampler.watched[0].asked_ns == 0


async def test_a_damaged_page_of_an_engine_that_answers_is_told_with_its_path_and_not_as_silence(directory: Path):
    with spawn_engine(directory):
        (page,) = directory.glob("*.page")  # noqa: ASYNC240 - one small directory
        with os.fdopen(os.open(page, os.O_WRONLY), "wb") as file:
            file.write(b"\xa5" * 64)
        async with watching(directory) as sampler:
            await until(sampler, Verdict.IDLE)
            found = sampler.snapshot().engines[0]
            assert any(str(page) in text and "answers on its socket" in text for text in found.warnings)
            assert found.blocks.total > 0
