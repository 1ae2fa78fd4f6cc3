"""An EngineSet without processes: the test writes the page, holds back answers, and turns the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_bridge import page, protocol
from engine_bridge.page import Counters, Phase, Snapshot
from sidecar.backends.engine import EngineFacts, Liveness, Lost, Unreachable
from sidecar.replica.history import SECOND
from tests.unit.histories.tape import START_NS, evidence


@dataclass
class MemoryEngine:
    """One EngineBackend."""

    rank: int = 0
    incarnation: str = "00" * 16
    counters: Counters | None = None
    alive: Liveness = Liveness.ALIVE
    trouble: Unreachable | None = None
    told: protocol.Evidence | Lost | Unreachable = field(default_factory=evidence)
    hold: asyncio.Event | None = None
    asked: list[int] = field(default_factory=list)
    looks: int = 0
    torn: bool = False
    backend: str = "bridge"

    @property
    def key(self) -> str:
        return f"engine-{self.rank}-{self.incarnation[:8]}"

    @property
    def connected(self) -> bool:
        return self.trouble is None

    @property
    def facts(self) -> EngineFacts | None:
        return EngineFacts(self.rank, self.incarnation, self.backend)  # type: ignore[arg-type]

    def liveness(self) -> Liveness:
        return self.alive

    def page(self) -> Snapshot | None:
        self.looks += 1
        if self.torn:
            raise page.PageError("engine-0.page: no consistent reading")
        return None if self.counters is None else Snapshot(self.counters, ())

    async def evidence(self, timeout_s: float, contiguity_blocks: int = 4096) -> Any:
        self.asked.append(contiguity_blocks)
        if self.hold is not None:
            await self.hold.wait()
        return self.told


@dataclass
class MemoryEngines:
    """The EngineSet, and the clock that the sampler reads."""

    listed: list[MemoryEngine] = field(default_factory=lambda: [MemoryEngine()])
    now_ns: int = START_NS
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    place: str = "memory"

    def clock(self) -> int:
        return self.now_ns

    def engines(self) -> list[MemoryEngine]:
        return self.listed

    def trouble(self) -> Unreachable | None:
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    def forward(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)

    def write(self, rank: int = 0, *, moved: bool = False, **page_fields: int) -> None:
        """Let an engine write its page now; `moved`: it scheduled tokens."""
        engine = self.listed[rank]
        c = engine.counters or Counters(pid=100 + rank, data_parallel_rank=rank, blocks_total=160, blocks_free=160)
        for name, value in page_fields.items():
            setattr(c, name, value)
        if "phase" not in page_fields:
            c.phase = Phase.STEP if c.running or c.waiting else Phase.IDLE
        c.phase_since_ns = self.now_ns
        c.steps += 1
        c.last_step_ns = self.now_ns
        if moved:
            c.last_progress_ns = self.now_ns
            c.tokens_scheduled += 100
            c.outputs += 100
        engine.counters = c
