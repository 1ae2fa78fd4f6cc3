"""How a fleet comes back after its caches are gone: time to first token and hit rate, bit by bit (vLLM's #64853).

Two real replicas on the CPU under open-loop load: requests come at random instants at a steady rate, whether or not
earlier ones are done, each with one of a few long prefixes. Then the whole fleet is reset, in one of three ways:

- `keep at once`: KEEP, all replicas at the same moment;
- `keep rolling`: KEEP, one replica after the other, PAUSE_S in between;
- `preempt at once`: PREEMPT, which throws running requests back and has them computed again.

The ways take turns, each from a warm cache; the arrivals are the same for all. How much is offered follows from
what the fleet can take cold, which is measured first, and a reset strikes at the first moment at which requests are
under way on every replica: a reset of an idle fleet would show nothing. The model is a toy on two cores: the shape of a
recovery carries over to other machines, its seconds do not.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from kvctl.v1 import fleet_pb2

from sidecar.client.aio import Fleet as Client
from sidecar.local.counters import read_counters
from sidecar.local.fleet import booted
from sidecar.local.layout import Fleet
from sidecar.local.programs import VOCABULARY, Settings
from sidecar.local.streams import Generation, generate
from tests.bench.figures import Cell, Report, Table, main, progress
from tests.bench.pairs import percentile
from tests.bench.plot import Line, line_plot

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPLICAS = 2
PREFIXES = 2
"""Few, as each replica has to meet every prefix again before it is warm: with N of both together that takes
N (1 + 1/2 + ... + 1/N) requests on average."""
PREFIX_TOKENS = 768
OWN_TOKENS = 24
ANSWER_TOKENS = 64
"""Enough beside the prefill of a prompt that a load a cold fleet can take keeps a warm one at work too."""
BEFORE_S, AFTER_S = 8.0, 32.0
PAUSE_S = 6.0
BIN_S = 4.0
BUSY_SHARE = 0.6
"""Part of what a cold fleet can take that is offered: above 1 it could never warm up."""
LANES = 4
"""Requests at once on each replica while that is measured."""
CAPACITY_S = 10.0
UNDER_WAY = 1
"""Requests that each replica must be at when it is reset."""
PATIENCE_S = 60.0

WAYS = ("keep at once", "keep rolling", "preempt at once")


@dataclass(frozen=True)
class Arrival:
    at_s: float
    """From the beginning."""
    replica: int
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    at_s: float
    """From the reset; negative before it."""
    first_token_ms: float
    cached: int
    prompt: int
    met: bool = False
    """Under way at the reset. Computed again, it tells the second computation's hits, so no hit rate counts it."""


@dataclass(frozen=True)
class Run:
    """One reset."""

    seen: list[Seen]
    preempted: int
    under_way: int
    """Requests that the reset met."""


def prompt(prefix: int, own: int) -> tuple[int, ...]:
    first, last = random.Random(f"prefix {prefix}"), random.Random(f"own {own}")
    tokens = [first.randrange(8, VOCABULARY) for _ in range(PREFIX_TOKENS)]
    return tuple(tokens + [last.randrange(8, VOCABULARY) for _ in range(OWN_TOKENS)])


def arrivals(rate: float, run: int) -> list[Arrival]:
    """Requests a second for the fleet; Poisson, the same for the same run."""
    chance = random.Random(run)
    made: list[Arrival] = []
    at = 0.0
    while at < BEFORE_S + PATIENCE_S + AFTER_S:
        number = run * 10_000 + len(made)
        made.append(Arrival(at, len(made) % REPLICAS, prompt(chance.randrange(PREFIXES), number)))
        at += chance.expovariate(rate)
    return made


async def asked(api: str, tokens: tuple[int, ...]) -> Generation:
    found = await generate(api, Generation(tokens, ANSWER_TOKENS))
    if found.error:
        raise RuntimeError(f"a request failed: {found.error}")
    return found


async def cold_capacity(fleet: Fleet) -> float:
    """Requests a second that the fleet takes when none finds its prefix in the cache."""
    numbers = itertools.count(1_000_000)
    ends: list[float] = []
    began = time.monotonic()

    async def lane(api: str) -> None:
        while time.monotonic() < began + CAPACITY_S:
            number = next(numbers)
            await asked(api, prompt(number, number))
            ends.append(time.monotonic())

    await asyncio.gather(*(lane(each.api) for each in fleet.replicas for _ in range(LANES)))
    return len(ends) / (max(ends) - began)


async def warm(fleet: Fleet) -> None:
    for index in range(PREFIXES):
        await asyncio.gather(*(asked(each.api, prompt(index, index)) for each in fleet.replicas))


async def reset(way: str, client: Client) -> None:
    mode: Literal["keep", "preempt"] = "preempt" if way.startswith("preempt") else "keep"
    rollout = None
    if way.endswith("rolling"):
        rollout = fleet_pb2.Rollout(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING, max_unavailable="1")
        rollout.min_healthy_time.FromTimedelta(timedelta(seconds=PAUSE_S))
    result = await client.reset_prefix_cache(running_requests=mode, rollout=rollout, timeout_s=30)
    result.raise_for_failures()


async def one_run(way: str, fleet: Fleet, client: Client, plan: list[Arrival]) -> Run:
    await warm(fleet)
    folders = [Path(fleet.directory, each.name) for each in fleet.replicas]
    preempted = sum(read_counters(folder).preemptions for folder in folders)
    under_way = [0] * REPLICAS
    began = time.monotonic()
    struck: list[float] = []

    async def arrive(arrival: Arrival) -> Generation:
        under_way[arrival.replica] += 1
        try:
            return await asked(fleet.replicas[arrival.replica].api, arrival.prompt)
        finally:
            under_way[arrival.replica] -= 1

    async def arrive_all() -> list[Generation]:
        async with asyncio.TaskGroup() as tasks:
            under_load = []
            for arrival in plan:
                await asyncio.sleep(began + arrival.at_s - time.monotonic())
                if struck and time.monotonic() > struck[0] + AFTER_S:
                    break
                under_load.append(tasks.create_task(arrive(arrival)))
        return [task.result() for task in under_load]

    async def strike() -> int:
        await asyncio.sleep(began + BEFORE_S - time.monotonic())
        while min(under_way) < UNDER_WAY:
            if time.monotonic() > began + BEFORE_S + PATIENCE_S:
                raise RuntimeError(f"never {UNDER_WAY} request under way on every replica at once, last {under_way}")
            await asyncio.sleep(0.002)
        struck.append(time.monotonic())
        met = sum(under_way)
        await reset(way, client)
        return met

    found, met = await asyncio.gather(arrive_all(), strike())
    seen = [
        Seen(
            each.started - struck[0],
            (each.times[0] - each.started) * 1000,
            each.cached_tokens,
            len(each.prompt),
            met=each.started < struck[0] < each.times[-1],
        )
        for each in found
    ]
    return Run(seen, sum(read_counters(folder).preemptions for folder in folders) - preempted, met)


@dataclass
class Way:
    """All runs of one way, by seconds from the reset."""

    seen: list[Seen]
    preempted: int = 0
    under_way: int = 0

    def bins(self) -> list[float]:
        count = round((BEFORE_S + AFTER_S) / BIN_S)
        starts = [index * BIN_S - BEFORE_S for index in range(count)]
        return [start for start in starts if any(not each.met for each in self.within(start, start + BIN_S))]

    def within(self, start: float, end: float) -> list[Seen]:
        return [each for each in self.seen if start <= each.at_s < end]

    def hit_rate(self, start: float, end: float) -> float:
        found = [each for each in self.within(start, end) if not each.met]
        return sum(each.cached for each in found) / sum(each.prompt for each in found)

    def first_token_ms(self, start: float, end: float) -> float:
        return statistics.median(each.first_token_ms for each in self.within(start, end))

    def row(self, name: str) -> list[Cell]:
        usual = self.hit_rate(-BEFORE_S, 0)
        after = [(start, self.hit_rate(start, start + BIN_S)) for start in self.bins() if start >= 0]
        low = [start for start, rate in after if rate < usual * 0.9]
        back: Cell = (max(low) + BIN_S) if low else 0.0
        if back == AFTER_S:
            back = f"not in {AFTER_S:.0f}"
        waits = [each.first_token_ms for each in self.within(0, AFTER_S)]
        peak = max(self.first_token_ms(start, start + BIN_S) for start in self.bins() if start >= 0)
        return [
            name,
            usual,
            min(rate for _, rate in after),
            back,
            self.first_token_ms(-BEFORE_S, 0),
            peak,
            percentile(waits, 0.99),
            self.under_way,
            self.preempted,
        ]


async def all_runs(fleet: Fleet, rounds: int, report: Report) -> dict[str, Way]:
    async with Client([f"{each.name}={each.sidecar}" for each in fleet.replicas]) as client:
        progress("what a cold fleet can take")
        capacity = await cold_capacity(fleet)
        rate = BUSY_SHARE * capacity
        progress(f"{capacity:.2f} requests a second; offered are {rate:.2f}")
        report.notes.append(
            f"Cold, the fleet takes {capacity:.1f} requests a second; offered were {rate:.1f} ({BUSY_SHARE:.0%} of it)."
        )
        ways = {way: Way([]) for way in WAYS}
        for number in range(rounds):
            for way, collected in ways.items():
                progress(f"{way}, run {number + 1} of {rounds}")
                run = await one_run(way, fleet, client, arrivals(rate, number))
                collected.seen += run.seen
                collected.preempted += run.preempted
                collected.under_way += run.under_way
    return ways


def plots(ways: dict[str, Way]) -> None:
    def lines(value: str) -> list[Line]:
        return [
            Line(name, [getattr(way, value)(start, start + BIN_S) for start in way.bins()], way.bins())
            for name, way in ways.items()
        ]

    mark = [(0.0, "reset")]
    rates, waits = lines("hit_rate"), lines("first_token_ms")
    across = "seconds from the reset"
    text = line_plot("Prefix cache hit rate", across, "cached share of prompt tokens", rates, top=1.0, marks=mark)
    (DOCS / "recovery-hits.svg").write_text(text)
    highest = max(max(line.values) for line in waits)
    step = 10 ** (len(str(int(highest))) - 1)
    top = (int(highest / step) + 1) * step
    text = line_plot("Time to first token", across, f"ms (median of {BIN_S:.0f} s)", waits, top=top, marks=mark)
    (DOCS / "recovery-ttft.svg").write_text(text)


def measure(quick: bool) -> Report:
    logging.disable(logging.CRITICAL)
    report = Report("recovery")
    with tempfile.TemporaryDirectory(prefix="kvctl-bench-") as state:
        os.environ["XDG_STATE_HOME"] = state
        progress(f"booting {REPLICAS} real replicas")
        with booted(Settings(replicas=REPLICAS)) as booting:
            ways = asyncio.run(all_runs(booting.fleet, 1 if quick else 4, report))
    table = Table(
        f"{REPLICAS} replicas, open-loop load, the whole fleet reset; times in ms unless said otherwise",
        (
            "reset",
            "hit rate before",
            f"lowest {BIN_S:.0f} s",
            "seconds until 90% of it again",
            "first token before (p50)",
            f"worst {BIN_S:.0f} s (p50)",
            "p99 after",
            "requests met by the resets",
            "preemptions",
        ),
    )
    table.rows = [way.row(name) for name, way in ways.items()]
    report.tables.append(table)
    if not quick:
        plots(ways)
        report.notes.append("Plots: docs/recovery-hits.svg, docs/recovery-ttft.svg.")
    return report


if __name__ == "__main__":
    sys.exit(main(measure))
