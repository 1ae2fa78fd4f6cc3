"""Steady streaming load on one replica, and what became of each stream.

A few lanes each send the same prompt over and over: a prefix that all share, then a few tokens of their own. Because
a lane repeats itself, every stream can be held to the lane's first, which nothing disturbed. A gate keeps finished
lanes from starting again while something is measured that a new request would spoil (who fills the prefix cache
first); streams under way go on.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sidecar.local.programs import BLOCK_TOKENS, VOCABULARY
from sidecar.local.streams import Generation, generate

PREFIX_TOKENS: Final = 16 * BLOCK_TOKENS
OWN_TOKENS: Final = 24
LANES: Final = 4
STREAM_TOKENS: Final = 400

_LATEST_SHARE: Final = 0.6
"""A stream this far along may end before what is about to be measured does."""


class LoadError(Exception):
    """The load itself did not do what it should."""


def prompt(lane: int, shared: int = 0) -> tuple[int, ...]:
    """A prompt: prefix number `shared`, then tokens of the lane's own. The same on every call."""
    prefix = random.Random(f"prefix {shared}")  # noqa: S311 - reproducible, not secret
    own = random.Random(f"lane {lane}")  # noqa: S311
    # The first ids are left out: they are the model's special tokens.
    tokens = [prefix.randrange(8, VOCABULARY) for _ in range(PREFIX_TOKENS)]
    return tuple(tokens + [own.randrange(8, VOCABULARY) for _ in range(OWN_TOKENS)])


@dataclass(slots=True)
class Lane:
    """One client that asks again as soon as it has its answer."""

    prompt: tuple[int, ...]
    generations: list[Generation] = field(default_factory=list)

    @property
    def current(self) -> Generation | None:
        """The stream under way."""
        return self.generations[-1] if self.generations and _under_way(self.generations[-1]) else None


def _under_way(generation: Generation) -> bool:
    return not generation.finished and not generation.error


class Load:
    """The lanes of one replica."""

    def __init__(self, api: str, lanes: int = LANES, tokens: int = STREAM_TOKENS) -> None:
        """`api`: host:port of vLLM; `tokens`: length of each stream."""
        self._api = api
        self._tokens = tokens
        self._gate = asyncio.Event()
        self._gate.set()
        self._tasks: list[asyncio.Task[None]] = []
        self.lanes = [Lane(prompt(index)) for index in range(lanes)]

    def start(self) -> None:
        """Start every lane."""
        self._tasks = [asyncio.create_task(self._drive(lane)) for lane in self.lanes]

    async def stop(self) -> None:
        """End every lane where it is; vLLM aborts the requests whose clients are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close_gate(self) -> None:
        """Start no further streams."""
        self._gate.clear()

    def open_gate(self) -> None:
        """Start streams again."""
        self._gate.set()

    def under_way(self) -> list[Generation]:
        """Streams that run now."""
        return [lane.current for lane in self.lanes if lane.current is not None]

    def reference(self, generation: Generation) -> Generation | None:
        """The first stream of the same lane, which ran before anything was done to the replica."""
        first = next(lane.generations[0] for lane in self.lanes if lane.prompt == generation.prompt)
        return first if first.finished else None

    async def wait_midstream(self, within_seconds: float = 90.0) -> None:
        """Wait until every lane streams, and none is near its end. LoadError when that does not come."""
        await self._until(lambda: self.all_midstream(_LATEST_SHARE), "every stream being under way", within_seconds)

    async def wait_rounds(self, rounds: int, within_seconds: float = 180.0) -> None:
        """Wait until every lane has finished this many streams."""
        await self._until(
            lambda: all(sum(g.finished for g in lane.generations) >= rounds for lane in self.lanes),
            f"{rounds} finished streams a lane",
            within_seconds,
        )

    def all_midstream(self, latest_share: float) -> bool:
        """Whether every lane streams, and none is further along than this share of its tokens."""
        current = self.under_way()
        latest = int(self._tokens * latest_share)
        return len(current) == len(self.lanes) and all(8 <= len(g.tokens) <= latest for g in current)

    async def _until(self, reached: Callable[[], bool], what: str, within_seconds: float) -> None:
        deadline = time.monotonic() + within_seconds
        while not reached():
            broken = next((task for task in self._tasks if task.done()), None)
            if broken is not None:
                await broken
                raise LoadError("a lane ended by itself")
            if time.monotonic() > deadline:
                raise LoadError(f"waited {within_seconds:.0f} s in vain for {what}")
            await asyncio.sleep(0.01)

    async def _drive(self, lane: Lane) -> None:
        while True:
            await self._gate.wait()
            generation = Generation(lane.prompt, self._tokens)
            lane.generations.append(generation)
            await generate(self._api, generation)
            if generation.error and not lane.generations[:-1]:
                raise LoadError(f"the first stream of a lane failed: {generation.error}")
            if generation.error:
                await asyncio.sleep(0.2)  # do not hammer a replica that is down


async def finish(generations: Sequence[Generation], within_seconds: float = 120.0) -> None:
    """Wait until these streams have ended, well or badly. LoadError when they do not."""
    deadline = time.monotonic() + within_seconds
    while any(_under_way(generation) for generation in generations):
        if time.monotonic() > deadline:
            raise LoadError(f"streams still under way after {within_seconds:.0f} s")
        await asyncio.sleep(0.01)


def longest_gap(generation: Generation, since: float, until: float) -> float:
    """Longest time between two tokens that overlaps [since, until] (monotonic), in seconds."""
    pairs = itertools.pairwise(generation.times)
    gaps = [later - earlier for earlier, later in pairs if later >= since and earlier <= until]
    return max(gaps, default=0.0)


def usual_gap(generations: Sequence[Generation]) -> float:
    """Median time between two tokens over finished streams, in seconds."""
    gaps = [b - a for g in generations for a, b in itertools.pairwise(g.times)]
    return statistics.median(gaps) if gaps else 0.0
