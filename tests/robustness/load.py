"""A steady load of fleet operations on one coordinator, and what it grows by meanwhile.

    python -m tests.robustness.load [--seconds 60] [--rate 1] [--write-docs]

Of 64 replicas, 62 answer at once from two processes, and two are real sidecars over fake engines, so that the memory of
every program of ours is watched. One KEEP reset of the whole fleet follows another at a steady rate; what comes late is
not left out, so an overloaded machine shows as a lower rate, not as fewer operations.

Memory and descriptors are compared between the first and the last quarter of the time after a warm-up, as medians. The
warm-up fills what every sidecar remembers for those who ask again: it grows up to a limit, and no further.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sidecar.client.aio import Fleet as Client
from sidecar.replica.operations import RECORDS
from tests.bench.bench_fanout import Fleet as Fakes
from tests.bench.bench_fanout import fleet as answering_replicas
from tests.bench.machine import describe
from tests.bench.pairs import percentile
from tests.contract.sidecar_process import ROOT, SidecarProcess
from tests.fake_engine.process import EngineProcess
from tests.robustness.coordinator_process import CoordinatorProcess
from tests.robustness.reliability_page import write_between

REPLICAS = 64
REAL = 2
RATE = 1.0
"""Fleet operations a second: 64 calls, each recorded before and after."""
WARM_UP = 40
"""Operations before anything is compared, as fast as they come: connections are made, and the coordinator keeps the
last few operations in memory."""
BOUND = 6
"""How much slower than its rate a run may become before it is given up."""
WRITTEN = ROOT / "build" / "robustness" / "load.json"


@dataclass
class Watched:
    """What one process used, sampled once an operation."""

    pid: int
    rss_mb: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.rss_mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        self.fds.append(len(os.listdir(f"/proc/{self.pid}/fd")))

    def figures(self) -> Grown:
        """The first quarter of the samples beside the last."""
        quarter = max(1, len(self.fds) // 4)
        return Grown(
            statistics.median(self.rss_mb[:quarter]),
            statistics.median(self.rss_mb[-quarter:]),
            statistics.median_low(self.fds[:quarter]),
            statistics.median_low(self.fds[-quarter:]),
        )


@dataclass(frozen=True)
class Grown:
    """One process, at the beginning and at the end."""

    rss_mb_before: float
    rss_mb_after: float
    fds_before: int
    fds_after: int

    @property
    def rss_growth(self) -> float:
        """0.01 is one percent more."""
        return self.rss_mb_after / self.rss_mb_before - 1


@dataclass(frozen=True)
class Held:
    """What came of it."""

    machine: str
    seconds: float
    rate: float
    operations: int
    failed: list[str]
    calls: int
    """Replicas asked, the warm-up included."""
    effects: int
    """At all replicas together, the warm-up included; one a call is right."""
    rate_held: float
    """Share of the rate that was asked for."""
    p50_ms: float
    p99_ms: float
    """Of one operation, from the start to the last replica's result."""
    processes: dict[str, Grown]


@dataclass
class WatchedFleet:
    """The replicas, and what there is to see of them."""

    fakes: Fakes
    targets: list[str]
    processes: dict[str, Watched] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    """Where the engines behind the real sidecars write their effects."""

    def effects(self) -> int:
        """Every effect at any replica so far; call it once."""
        written = sum(len(file.read_text().splitlines()) for file in self.files if file.exists())
        return written + len(self.fakes.effects())


@contextmanager
def watched_fleet(folder: Path) -> Iterator[WatchedFleet]:
    with ExitStack() as stack:
        fakes = stack.enter_context(answering_replicas("grpc", REPLICAS - REAL))
        made = WatchedFleet(fakes, list(fakes.targets))
        for index in range(REAL):
            work = folder / f"s{index}"
            (work / "e").mkdir(parents=True)
            made.files.append(work / "effects.jsonl")
            words = ["--effects", str(made.files[-1]), "--requests", "2", "--steps-per-second", "50"]
            engine = EngineProcess(work / "e", *words)
            stack.callback(engine.end)
            sidecar = SidecarProcess(work / "e", work, "--log-level", "warning")
            stack.callback(sidecar.end)
            sidecar.wait_ready(60)
            made.targets.append(f"real{index}={sidecar.address}")
            made.processes[f"sidecar {index}"] = Watched(sidecar.pid)
            made.processes[f"engine {index}"] = Watched(engine.pid)
        yield made


async def reset_all(client: Client, called: str) -> list[str]:
    """One operation; what was wrong with it."""
    result = await client.reset_prefix_cache(running_requests="keep", timeout_s=60)
    if result.ok and len(result.replicas) == REPLICAS:
        return []
    return [f"{called}: {len(result.replicas)} results, {[str(each) for each in result.failures]}"[:500]]


async def fill_records(targets: Sequence[str]) -> list[str]:
    """As many operations as a sidecar remembers; what was wrong with them."""
    failed = []
    async with Client(targets=targets) as client:
        for number in range(RECORDS):
            result = await client.reset_prefix_cache(running_requests="keep", timeout_s=60)
            if not result.ok:
                failed.append(f"record {number}: {[str(each) for each in result.failures]}"[:500])
    return failed


async def hold(folder: Path, seconds: float, rate: float = RATE) -> Held:
    """Run the load. TimeoutError when `BOUND` times `seconds`, and a minute, were not enough."""
    with ExitStack() as stack:
        fleet = stack.enter_context(watched_fleet(folder))
        coordinator = CoordinatorProcess(folder, fleet.targets, "--log-level", "warning")
        stack.callback(coordinator.end)
        await asyncio.to_thread(coordinator.serve)
        stack.callback(coordinator.channel.close)
        fleet.processes["coordinator"] = Watched(coordinator.process.pid)
        failed: list[str] = []
        took_ms: list[float] = []
        count = max(8, round(seconds * rate))
        async with Client(coordinator=coordinator.address) as client:
            failed += await fill_records(fleet.targets[-REAL:])
            for number in range(WARM_UP):
                failed += await reset_all(client, f"warm-up {number}")
            began = time.monotonic()
            async with asyncio.timeout(BOUND * seconds + 60):
                for number in range(count):
                    await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
                    sent = time.monotonic()
                    failed += await reset_all(client, f"operation {number}")
                    took_ms.append((time.monotonic() - sent) * 1000)
                    for each in fleet.processes.values():
                        each.sample()
            spent = time.monotonic() - began
        return Held(
            machine=describe(),
            seconds=spent,
            rate=rate,
            operations=count,
            failed=failed,
            calls=(WARM_UP + count) * REPLICAS + RECORDS * REAL,
            effects=fleet.effects(),
            rate_held=count / rate / max(spent, count / rate),
            p50_ms=statistics.median(took_ms),
            p99_ms=percentile(took_ms, 0.99),
            processes={name: each.figures() for name, each in fleet.processes.items()},
        )


def write(held: Held, to: Path = WRITTEN) -> None:
    """Leave the figures where the page's writer finds them."""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(asdict(held), indent=1) + "\n")


def as_markdown(stored: dict[str, Any]) -> str:
    """The figures of a run, from its file."""
    head = (
        f"{stored['operations']} operations over {REPLICAS} replicas in {stored['seconds']:.0f} s, "
        f"{stored['rate']:g} a second asked for, {stored['rate_held']:.1%} of it held; {len(stored['failed'])} failed; "
        f""
        f"{stored['effects']:,} effects at {stored['calls']:,} calls, warm-up and all. "
        f"One operation took {stored['p50_ms']:.0f} ms (p50), {stored['p99_ms']:.0f} ms (p99)."
    )
    rows = ["| process | MB before | MB after | growth | descriptors before | after |", "| --- " * 6 + "|"]
    for name, each in stored["processes"].items():
        grown = Grown(**each)
        rows.append(
            f"| {name} | {grown.rss_mb_before:.1f} | {grown.rss_mb_after:.1f} | {grown.rss_growth:+.1%} "
            f"| {grown.fds_before} | {grown.fds_after} |"
        )
    return "\n".join([head, "", *rows, "", f"{stored['machine']}."])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=RATE, help="fleet operations a second")
    parser.add_argument("--no-run", action="store_true", help="with --write-docs: use the figures that are there")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/reliability.md")
    options = parser.parse_args()
    if not options.no_run:
        with tempfile.TemporaryDirectory(prefix="kvctl-") as folder:
            write(asyncio.run(hold(Path(folder), options.seconds, options.rate)))
    if not WRITTEN.exists():
        print(f"no figures at {WRITTEN}: run without --no-run", file=sys.stderr)
        return 2
    stored = json.loads(WRITTEN.read_text())
    print(as_markdown(stored))
    if options.write_docs:
        write_between("load", as_markdown(stored))
    return 1 if stored["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
