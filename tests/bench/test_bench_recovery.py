"""The recovery benchmark over replicas that only take their time: a reset meets requests, whatever the machine does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidecar.local.streams import Generation
from tests.bench import bench_recovery as bench


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Every answer takes 0.2 s, half of it to the first token."""

    async def asked(_api: str, tokens: tuple[int, ...]) -> Generation:
        made = Generation(tokens, 1)
        await asyncio.sleep(0.1)
        made.times.append(time.monotonic())
        await asyncio.sleep(0.1)
        made.cached_tokens = 768
        return made

    monkeypatch.setattr(bench, "asked", asked)
    monkeypatch.setattr(bench, "read_counters", lambda folder: SimpleNamespace(preemptions=0))
    monkeypatch.setattr(bench, "BEFORE_S", 0.4)
    monkeypatch.setattr(bench, "AFTER_S", 1.5)
    monkeypatch.setattr(bench, "CAPACITY_S", 0.3)
    return SimpleNamespace(directory="", replicas=[SimpleNamespace(api=name, name=name) for name in ("r0", "r1")])


async def test_a_reset_strikes_when_requests_are_under_way_on_every_replica(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck: list[str] = []

    async def reset(way: str, client: object) -> None:
        struck.append(way)

    monkeypatch.setattr(bench, "reset", reset)
    run = await bench.one_run("keep at once", replicas, None, bench.arrivals(60.0, 0))  # type: ignore[arg-type]
    assert struck == ["keep at once"]
    assert run.under_way >= bench.UNDER_WAY * bench.REPLICAS
    assert any(each.at_s < 0 for each in run.seen)
    assert any(each.at_s >= 0 for each in run.seen)
    assert all(each.first_token_ms >= 100 for each in run.seen)


async def test_a_load_that_is_too_low_is_told_instead_of_measured(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PATIENCE_S", 0.1)
    with pytest.raises(RuntimeError, match="never 1 request under way on every replica"):
        await bench.one_run("keep at once", replicas, None, [])  # type: ignore[arg-type]


async def test_what_a_cold_fleet_takes_is_measured_with_prompts_that_nothing_has_cached(replicas: Any) -> None:
    taken = await bench.cold_capacity(replicas)
    assert 0 < taken <= bench.REPLICAS * bench.LANES / 0.2


def test_a_way_tells_hit_rate_and_first_token_by_seconds_from_the_reset() -> None:
    late = bench.BIN_S + 1.0
    seen = [bench.Seen(-1.0, 50.0, 100, 100), bench.Seen(1.0, 200.0, 0, 100), bench.Seen(late, 60.0, 95, 100)]
    seen.append(bench.Seen(-1.0, 50.0, 0, 100, met=True))
    way = bench.Way(seen, preempted=1, under_way=4)
    name, usual, lowest, back, before, worst, p99, under_way, preempted = way.row("keep at once")
    assert (name, usual, lowest, back) == ("keep at once", 1.0, 0.0, bench.BIN_S)
    assert (before, worst, p99, under_way, preempted) == (50.0, 200.0, 200.0, 4, 1)
    assert Path(bench.DOCS).is_dir()
