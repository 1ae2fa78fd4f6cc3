"""A real engine that is reset, reordered and polled all the time while it streams: nothing of what it streams changes.

Stretches in which the engine is left alone take turns with such in which it is not, so that the time between tokens can
be compared on a machine that is never quiet; it is written to build/robustness/inference.json and not asserted.
KVCTL_INFERENCE_SECONDS is the length of all stretches together (40; `make soak`: 300).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sidecar.client.aio import Fleet as Client
from sidecar.local.counters import read_counters
from sidecar.local.load import Load, finish
from tests.bench.pairs import percentile, ratio_of
from tests.contract.sidecar_process import ROOT

SECONDS = float(os.environ.get("KVCTL_INFERENCE_SECONDS", "40"))
PAIRS = max(2, round(SECONDS / 20))
STRETCH_S = SECONDS / (2 * PAIRS + 1)
STREAM_TOKENS = 200
POLL_S = 0.1
WRITTEN = ROOT / "build" / "robustness" / "inference.json"

pytestmark = pytest.mark.timeout(SECONDS + 1200)


@dataclass
class Stretch:
    """One stretch of time, and what was done to the engine in it."""

    busy: bool
    since: float
    until: float = 0.0
    done: dict[str, int] = field(default_factory=dict)

    def gaps_ms(self, load: Load) -> list[float]:
        """Times between two tokens of a stream that ended within it."""
        streams = [stream for lane in load.lanes for stream in lane.generations]
        return [
            (later - earlier) * 1000
            for stream in streams
            for earlier, later in itertools.pairwise(stream.times)
            if self.since <= earlier and later <= self.until
        ]


async def one_round(client: Client, done: dict[str, int]) -> None:
    """Everything there is that leaves running requests alone."""

    def count(name: str) -> None:
        done[name] = done.get(name, 0) + 1

    (await client.reset_prefix_cache(running_requests="keep", timeout_s=60)).raise_for_failures()
    count("keep")
    (await client.reorder_free_queue(scope="uncached", timeout_s=60)).raise_for_failures()
    count("reorder uncached")
    (await client.reorder_free_queue(scope="all_free", timeout_s=60)).raise_for_failures()
    count("reorder all_free")
    (
        await client.reset_prefix_cache(running_requests="keep", reorder_free_queue=True, timeout_s=60)
    ).raise_for_failures()
    count("keep and reorder")
    for _ in range(3):
        (row,) = await client.admission(timeout_s=60)
        assert row.engines, row
        count("admission")
        await asyncio.sleep(POLL_S)


async def stretch(client: Client, *, busy: bool) -> Stretch:
    made = Stretch(busy, time.monotonic())
    if busy:
        while not made.done or time.monotonic() < made.since + STRETCH_S:
            await one_round(client, made.done)
    else:
        await asyncio.sleep(STRETCH_S)
    made.until = time.monotonic()
    return made


def written(stretches: list[Stretch], load: Load) -> dict[str, object]:
    """The time between tokens with and without, for whoever wants to see it."""
    alone, busy = ([each.gaps_ms(load) for each in stretches if each.busy is kind] for kind in (False, True))
    quiet = [statistics.median(gaps) for gaps in alone]
    around = [(before + after) / 2 for before, after in itertools.pairwise(quiet)]

    def percentiles(kind: list[list[float]]) -> list[float]:
        gaps = [gap for each in kind for gap in each]
        return [percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps)]

    return {
        "stretches": len(stretches),
        "stretch_s": STRETCH_S,
        "operations": {name: sum(each.done.get(name, 0) for each in stretches) for name in stretches[1].done},
        "ms_between_tokens_alone_p50_p99_longest": percentiles(alone),
        "ms_between_tokens_busy_p50_p99_longest": percentiles(busy),
        "busy_over_alone": ratio_of([statistics.median(b) / a for b, a in zip(busy, around, strict=True)]).text,
        "alone_over_alone": ratio_of([after / before for before, after in itertools.pairwise(quiet)]).text,
    }


async def test_resets_reorders_and_polling_drop_no_stream_and_change_no_token(fleet):
    replica = fleet.fleet.replicas[0]
    folder = Path(fleet.fleet.directory, replica.name)
    loaded = os.getloadavg()[0]
    load = Load(replica.api, tokens=STREAM_TOKENS)
    load.start()
    try:
        await load.wait_rounds(1, within_seconds=300)
        preempted = read_counters(folder).preemptions
        stretches = []
        async with Client([f"{replica.name}={replica.sidecar}"]) as client:
            for number in range(2 * PAIRS + 1):
                stretches.append(await stretch(client, busy=number % 2 == 1))
        load.close_gate()
        await finish(load.under_way(), within_seconds=600)
    finally:
        await load.stop()
    streams = [stream for lane in load.lanes for stream in lane.generations]
    assert [stream.error for stream in streams if stream.error] == []
    assert all(stream.finished for stream in streams)
    assert [stream.tokens for stream in streams] == [load.reference(stream).tokens for stream in streams]
    assert read_counters(folder).preemptions == preempted
    assert all(each.done.keys() == stretches[1].done.keys() for each in stretches if each.busy)
    assert all(each.gaps_ms(load) for each in stretches), "a stretch in which no token came"
    WRITTEN.parent.mkdir(parents=True, exist_ok=True)
    WRITTEN.write_text(json.dumps({**written(stretches, load), "load": [loaded, os.getloadavg()[0]]}, indent=1) + "\n")
