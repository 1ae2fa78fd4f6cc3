"""What was seen of one engine lately: the input of every verdict.

A verdict from a single reading is a guess: a queue may have arrived a millisecond ago, a counter may stand still
because there is nothing to do. So a verdict is judged over a history: samples taken by the sampler (the page, the state
of the process and of the connection, now and then evidence from the engine thread), a longer memory of throughput in
10-second buckets, and the verdict last given, for hysteresis.

Bounded in every direction: SAMPLES samples, BUCKETS buckets, MARKS marks. All times are CLOCK_MONOTONIC nanoseconds;
nothing here reads a clock, and wall-clock time has no way in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engine_bridge.page import Counters
from engine_bridge.protocol import Contiguity, Evidence

SECOND: Final = 1_000_000_000
SAMPLES: Final = 240
"""Two minutes at the sampler's default of two samples a second."""
BUCKET_NS: Final = 10 * SECOND
BUCKETS: Final = 180
"""Half an hour: how long "what this engine did before" is remembered."""
MARKS: Final = 32
UNKNOWN_COUNT: Final = -1
"""In any counter: this backend cannot know."""


class Link(StrEnum):
    """How the engine's address behaves."""

    OPEN = "open"
    REFUSED = "refused"
    """Nothing listens any more: for a Unix socket left behind, its process is gone."""
    NOT_YET = "not_yet"
    """Nothing has listened so far."""
    UNKNOWN = "unknown"


class Process(StrEnum):
    """State of the engine's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """State T or t: SIGSTOP, or a debugger."""
    GONE = "gone"
    """No such pid, another start time, a zombie; over HTTP: the API server says that its engine died."""
    UNREADABLE = "unreadable"
    """/proc does not show it: another pid namespace, or an HTTP backend."""


class Verdict(StrEnum):
    """The verdicts of kvctl.v1.Verdict, by their names without the prefix."""

    IDLE = "IDLE"
    FLOWING = "FLOWING"
    SATURATED = "SATURATED"
    WAITING_REMOTE_KV = "WAITING_REMOTE_KV"
    HELD_BLOCKS_DEADLOCK = "HELD_BLOCKS_DEADLOCK"
    HEAD_CANNOT_FIT = "HEAD_CANNOT_FIT"
    DEGRADED = "DEGRADED"
    THRASHING = "THRASHING"
    BLOCKS_LEAKED = "BLOCKS_LEAKED"
    PAUSED = "PAUSED"
    SLEEPING = "SLEEPING"
    ENGINE_HUNG = "ENGINE_HUNG"
    ENGINE_STOPPED = "ENGINE_STOPPED"
    ENGINE_DEAD = "ENGINE_DEAD"
    STARTING = "STARTING"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Standing:
    """The verdict last given, and since when it has held."""

    verdict: Verdict
    since_ns: int
    stalled: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at an engine."""

    at_ns: int
    link: Link = Link.UNKNOWN
    process: Process = Process.UNREADABLE
    counters: Counters | None = None
    """The page, or what /metrics tells; -1 in a field that cannot be known. None: there was nothing to read."""
    evidence: Evidence | None = None
    """Set on the sample with which it arrived."""
    unanswered_since_ns: int = 0
    """When the oldest question was sent that the engine has not answered yet; 0 when none is open."""
    note: str = ""
    """Why something is missing, for a person: a failed attach, an HTTP error."""
    page_problem: str = ""
    """Why the page could not be read; empty when it was, or when there is none."""

    @property
    def demand(self) -> int:
        """Requests running or waiting; 0 when unknown."""
        if self.counters is None:
            return 0
        return max(self.counters.running, 0) + max(self.counters.waiting, 0)

    @property
    def admissible(self) -> int:
        """Requests waiting for nothing but admission."""
        if self.counters is None:
            return 0
        return max(max(self.counters.waiting, 0) - max(self.counters.deferred, 0), 0)

    @property
    def held_blocks(self) -> int:
        """Blocks not free; 0 when unknown."""
        if self.counters is None or self.counters.blocks_total < 0 or self.counters.blocks_free < 0:
            return 0
        return max(self.counters.blocks_total - self.counters.blocks_free, 0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Throughput over about BUCKET_NS."""

    ends_ns: int
    tokens_per_second: float
    outputs_per_second: float
    demand: int
    """Requests running or waiting when it ended."""
    running: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A level at which blocks stayed held while no request could hold them."""

    first_ns: int
    last_ns: int
    blocks: int


class History:
    """A bounded record of one engine incarnation. `append` in time order; the rest is reading."""

    def __init__(self, samples: int = SAMPLES) -> None:
        """Keep at most this many samples."""
        self._samples: deque[Sample] = deque(maxlen=samples)
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS)
        self._marks: deque[Mark] = deque(maxlen=MARKS)
        self._bucket_start: Sample | None = None
        self._evidence: Evidence | None = None
        self.work_since_ns = 0
        """First sample of the present unbroken run of samples with a request; 0 when the last one had none."""
        self.queue_since_ns = 0
        """The same for requests that wait for admission."""
        self.first_ns = 0
        """The first sample."""
        self.standing: Standing | None = None
        self.contiguity: Contiguity | None = None
        """Order of the free queue as last told; not every evidence looks at it."""

    def append(self, sample: Sample) -> None:
        """Take a sample. One of another incarnation, or with counters that went backwards, starts a new history.

        ValueError when it is older than the last one.
        """
        last = self.latest
        if last is not None and sample.at_ns < last.at_ns:
            raise ValueError(f"a sample at {sample.at_ns} ns after one at {last.at_ns} ns")
        if self._is_another_engine(sample):
            self._forget()
        self.first_ns = self.first_ns or sample.at_ns
        if sample.evidence is not None:
            self._evidence = sample.evidence
            self.contiguity = sample.evidence.contiguity or self.contiguity
        self._samples.append(sample)
        if sample.counters is None:
            return
        self.work_since_ns = (self.work_since_ns or sample.at_ns) if sample.demand else 0
        self.queue_since_ns = (self.queue_since_ns or sample.at_ns) if sample.admissible else 0
        self._fill_bucket(sample)
        self._mark(sample)

    def settle(self, standing: Standing) -> None:
        """Remember the verdict given on what is here now."""
        self.standing = standing

    @property
    def latest(self) -> Sample | None:
        """The newest sample."""
        return self._samples[-1] if self._samples else None

    @property
    def latest_evidence(self) -> Evidence | None:
        """The newest evidence, however old."""
        return self._evidence

    @property
    def counters(self) -> Counters | None:
        """The newest counters, also when the last look found none."""
        return next((s.counters for s in reversed(self._samples) if s.counters is not None), None)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Throughput before now, oldest first."""
        return tuple(self._buckets)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Levels of blocks held by nobody, oldest first; empty since the last time that all came back."""
        return tuple(self._marks)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All samples, oldest first."""
        return tuple(self._samples)

    def within(self, from_ns: int) -> list[Sample]:
        """Samples with counters from this instant on, oldest first, led by the last one before it, if any."""
        found: list[Sample] = []
        for sample in reversed(self._samples):
            if sample.counters is None:
                continue
            found.append(sample)
            if sample.at_ns <= from_ns:
                break
        found.reverse()
        return found

    def _is_another_engine(self, sample: Sample) -> bool:
        known, new = self.counters, sample.counters
        if known is None or new is None:
            return False
        if known.incarnation != new.incarnation or known.pid != new.pid:
            return True
        # Over HTTP a restart shows only as counters that start again.
        return new.steps < known.steps or new.tokens_scheduled < known.tokens_scheduled

    def _forget(self) -> None:
        self._samples.clear()
        self._buckets.clear()
        self._marks.clear()
        self._bucket_start = None
        self._evidence = None
        self.work_since_ns = self.queue_since_ns = self.first_ns = 0
        self.standing = None
        self.contiguity = None

    def _fill_bucket(self, sample: Sample) -> None:
        start = self._bucket_start
        if start is None or start.counters is None:
            self._bucket_start = sample
            return
        elapsed = sample.at_ns - start.at_ns
        if elapsed < BUCKET_NS or sample.counters is None:
            return
        self._bucket_start = sample
        if elapsed > 3 * BUCKET_NS:  # the sidecar itself was stopped: an average over that says nothing
            return
        seconds = elapsed / SECOND
        self._buckets.append(
            Bucket(
                sample.at_ns,
                (sample.counters.tokens_scheduled - start.counters.tokens_scheduled) / seconds,
                (sample.counters.outputs - start.counters.outputs) / seconds,
                sample.demand,
                max(sample.counters.running, 0),
            )
        )

    def _mark(self, sample: Sample) -> None:
        """Note blocks that no request can hold: known when there is no request, or when evidence counted them."""
        if sample.evidence is not None and sample.evidence.blocks_orphaned >= 0:
            blocks = sample.evidence.blocks_orphaned
        elif sample.demand == 0:
            blocks = sample.held_blocks
        else:
            return
        if blocks == 0:
            self._marks.clear()
            return
        last = self._marks[-1] if self._marks else None
        if last is not None and last.blocks == blocks:
            self._marks[-1] = Mark(last.first_ns, sample.at_ns, blocks)
            return
        # A level below an earlier one proves that those blocks were in flight, not lost.
        while self._marks and self._marks[-1].blocks > blocks:
            self._marks.pop()
        if self._marks and self._marks[-1].blocks == blocks:
            self._marks[-1] = Mark(self._marks[-1].first_ns, sample.at_ns, blocks)
            return
        self._marks.append(Mark(sample.at_ns, sample.at_ns, blocks))
