"""How far back an engine's records reach decides between "never happened" and "unknown": no clock may stretch it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.replica.operations import Operations
from tests.fake_engine.process import spawn_engine

NOTHING: Any = None


def age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(next(directory.glob("*.sock")), (then, then))


async def test_a_stepped_wall_clock_does_not_make_records_reach_back_further(tmp_path: Path, monkeypatch):
    with spawn_engine(tmp_path):
        age(tmp_path, 1000)
        engines = EngineDirectory(tmp_path)
        news = asyncio.Event()
        engines.on_change(news.set)
        await engines.start()
        operations = Operations(engines, NOTHING, NOTHING)
        try:
            while not engines.engines()[0].connected:
                news.clear()
                await asyncio.wait_for(news.wait(), 30)
            assert 1000 <= operations.records_reach_back_s() < 1300
            now = time.time
            monkeypatch.setattr(time, "time", lambda: now() + 3600)
            assert operations.records_reach_back_s() < 1300
        finally:
            await engines.close()
