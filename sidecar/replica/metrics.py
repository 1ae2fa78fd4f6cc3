"""What Prometheus sees of one replica. A scrape reads the sampler's last look and never touches an engine.

sglang#28157: a scrape that waits on the engine starves the health check beside it. vllm#21257: gauges that only the
last engine sets. So every sample here comes from memory, and every engine has its series all the time: one that is
gone shows ENGINE_DEAD, and its numbers are NaN, neither 0 (which reads as "no load") nor absent (which reads as "never
was"). Labels are bounded: ranks, names of enums, gRPC codes. Never a request id.

Beyond the design's list, and why:
- `kvctl_abandoned_update{engine}`: weights may be half written; the one state that must page somebody.
- `kvctl_preemptions_total`, `kvctl_tokens_scheduled_total{engine}`: what THRASHING and DEGRADED are judged on.
- `kvctl_engine_up{engine}`: whether the engine can be asked, apart from what it is doing.
- `kvctl_engine_phase_seconds{engine,phase}`: time in the present phase, the figure behind ENGINE_HUNG.
- `kvctl_watchers`: open admission streams.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine_bridge.page import FLAG_ABANDONED_UPDATE, Counters, Phase
from sidecar.replica.admission import phase_name
from sidecar.replica.history import SECOND, Process, Verdict
from sidecar.replica.sampler import Sampler, Watched

OPERATIONS: Final = frozenset({"reset", "reorder", "relieve", "pause", "renew", "resume", "cancel"})
MODES: Final = frozenset({"", "fail", "preempt", "keep", "idle", "uncached", "all_free"})
CODES: Final = frozenset(
    {
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    }
)
OTHER: Final = "other"
"""Stands for a label value outside these sets, so that no caller can make up series."""

_RESET_MODES: Final = {1: "fail", 2: "preempt", 3: "keep", 4: "other"}
_DURATION_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PAUSE_BUCKETS: Final = (1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1)
_STEP_PHASES: Final = (Phase.STARTING, Phase.IDLE, Phase.STEP, Phase.OPERATION, Phase.STOPPING, Phase.STOPPED)


class ReplicaMetrics:
    """The registry of one sidecar, with what operations report into it."""

    def __init__(
        self,
        sampler: Sampler,
        version: str,
        watchers: Callable[[], int] = lambda: 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`watchers` counts open streams; `wall_clock` (seconds since 1970) only dates the last reset for people."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(sampler, version, watchers, wall_clock))
        self._operations = Counter(
            "kvctl_operations",
            "Operations finished, by canonical gRPC code of the whole replica.",
            ("operation", "mode", "code"),
            registry=self.registry,
        )
        self._durations = Histogram(
            "kvctl_operation_duration_seconds",
            "Time from request to answer of an operation.",
            ("operation",),
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._pauses = Histogram(
            "kvctl_engine_pause_seconds",
            "Longest uninterrupted hold of one engine's thread by an operation.",
            ("operation",),
            buckets=_PAUSE_BUCKETS,
            registry=self.registry,
        )

    def operation(self, operation: str, mode: str, code: str, seconds: float) -> None:
        """Count a finished operation. `mode` is empty for operations without one; `code` e.g. "OK"."""
        operation = _bounded(operation, OPERATIONS)
        self._operations.labels(operation, _bounded(mode, MODES), _bounded(code, CODES)).inc()
        self._durations.labels(operation).observe(max(seconds, 0.0))

    def engine_pause(self, operation: str, longest_us: int) -> None:
        """Record what one engine's thread paid for an operation, in microseconds."""
        self._pauses.labels(_bounded(operation, OPERATIONS)).observe(max(longest_us, 0) / 1e6)


def _bounded(value: str, known: frozenset[str]) -> str:
    return value if value in known else OTHER


class _EngineCollector(Collector):
    """One series an engine, made at the scrape from what the sampler remembers."""

    def __init__(
        self, sampler: Sampler, version: str, watchers: Callable[[], int], wall_clock: Callable[[], float]
    ) -> None:
        self._sampler = sampler
        self._version = version
        self._watchers = watchers
        self._wall_clock = wall_clock

    def describe(self) -> Iterable[Metric]:
        """Names, without reading anything (registration would otherwise collect)."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything, from memory."""
        # A gauge, not an Info: that would be a family of another name in the OpenMetrics format.
        build = GaugeMetricFamily("kvctl_build_info", "What runs here; always 1.", labels=("version", "python"))
        build.add_metric((self._version, platform.python_version()), 1)
        yield build
        yield GaugeMetricFamily("kvctl_watchers", "Open admission streams.", value=self._watchers())
        now = self._sampler.now_ns()
        engines = _one_a_rank(self._sampler.watched)
        yield from _verdicts(engines, now)
        yield from _requests_and_blocks(engines, now)
        yield from _engine_thread(engines, now)
        yield _last_resets(engines, now, self._wall_clock())


def _one_a_rank(watched: tuple[Watched, ...]) -> dict[str, Watched]:
    """By label. While a dead engine and its successor are both listed, the one that can be asked speaks for the rank:
    two series with equal labels would make the whole scrape invalid.
    """
    engines: dict[str, Watched] = {}
    for one in watched:
        rank = str(one.engine.rank)
        if rank not in engines or one.engine.connected or not engines[rank].engine.connected:
            engines[rank] = one
    return engines


_NOTHING: Final = Counters(
    phase=-1,
    steps=-1,
    tokens_scheduled=-1,
    preemptions=-1,
    running=-1,
    waiting=-1,
    deferred=-1,
    holding=-1,
    blocks_total=-1,
    blocks_free=-1,
    blocks_cached=-1,
    flags=-1,
)


def _counters(watched: Watched) -> Counters:
    """The numbers that still describe this engine; all unknown for one that is gone or cannot be read."""
    last = watched.history.latest
    if last is None or last.process is Process.GONE or watched.judgement.verdict is Verdict.ENGINE_DEAD:
        return _NOTHING
    return last.counters or _NOTHING


def _number(value: int) -> float:
    """NaN for what is not known."""
    return math.nan if value < 0 else float(value)


def _verdicts(engines: dict[str, Watched], now: int) -> Iterator[Metric]:
    verdict = GaugeMetricFamily(
        "kvctl_admission_verdict", "1 for the verdict that holds, 0 for the others.", labels=("engine", "verdict")
    )
    stalled = GaugeMetricFamily(
        "kvctl_admission_stalled", "1 while no waiting request can start until someone acts.", labels=("engine",)
    )
    stalled_for = GaugeMetricFamily(
        "kvctl_admission_stalled_seconds", "How long the stall has lasted, 0 without one.", labels=("engine",)
    )
    abandoned = GaugeMetricFamily(
        "kvctl_abandoned_update",
        "1 while the scheduler stays paused because a weight update was abandoned half way.",
        labels=("engine",),
    )
    up = GaugeMetricFamily("kvctl_engine_up", "1 while the engine can be asked.", labels=("engine",))
    for rank, one in engines.items():
        for name in Verdict:
            verdict.add_metric((rank, name.value), float(one.judgement.verdict is name))
        stalled.add_metric((rank,), float(one.judgement.stalled))
        seconds = max(now - one.judgement.since_ns, 0) / SECOND if one.judgement.stalled else 0.0
        stalled_for.add_metric((rank,), seconds)
        counters = _counters(one)
        abandoned.add_metric((rank,), math.nan if counters.flags < 0 else counters.flags & FLAG_ABANDONED_UPDATE)
        up.add_metric((rank,), float(one.engine.connected))
    yield from (verdict, stalled, stalled_for, abandoned, up)


def _requests_and_blocks(engines: dict[str, Watched], now: int) -> Iterator[Metric]:
    requests = GaugeMetricFamily(
        "kvctl_requests",
        "Requests by state: running; waiting (all kinds); deferred and holding_blocks are kinds of waiting.",
        labels=("engine", "state"),
    )
    oldest = GaugeMetricFamily(
        "kvctl_oldest_waiting_seconds",
        "Age of the longest waiting request, as the engine last told; 0 when none waits, NaN when it has not told.",
        labels=("engine",),
    )
    blocks = GaugeMetricFamily(
        "kvctl_kv_blocks", "KV cache blocks by state: total, free, held, cached.", labels=("engine", "state")
    )
    contiguity = GaugeMetricFamily(
        "kvctl_free_queue_contiguity_ratio",
        "Share of neighbours in the free queue with adjacent ids, as the engine last told; NaN when it has not told.",
        labels=("engine",),
    )
    for rank, one in engines.items():
        c = _counters(one)
        requests.add_metric((rank, "running"), _number(c.running))
        requests.add_metric((rank, "waiting"), _number(c.waiting))
        requests.add_metric((rank, "deferred"), _number(c.deferred))
        requests.add_metric((rank, "holding_blocks"), _number(c.holding))
        oldest.add_metric((rank,), _oldest_waiting_s(one, c, now))
        held = c.blocks_total - c.blocks_free if min(c.blocks_total, c.blocks_free) >= 0 else -1
        blocks.add_metric((rank, "total"), _number(c.blocks_total))
        blocks.add_metric((rank, "free"), _number(c.blocks_free))
        blocks.add_metric((rank, "held"), _number(held))
        blocks.add_metric((rank, "cached"), _number(c.blocks_cached))
        contiguity.add_metric((rank,), _contiguity_ratio(one, c))
    yield from (requests, oldest, blocks, contiguity)


def _oldest_waiting_s(one: Watched, counters: Counters, now: int) -> float:
    if counters.waiting < 0:
        return math.nan
    if counters.waiting == 0:
        return 0.0
    evidence = one.history.latest_evidence
    if evidence is None or evidence.oldest_waiting_ns < 0 or evidence.waiting <= 0:
        return math.nan
    # Only while the queue has not been empty since: otherwise that request may be long gone.
    if not 0 < one.history.work_since_ns <= evidence.monotonic_ns:
        return math.nan
    return (evidence.oldest_waiting_ns + max(now - evidence.monotonic_ns, 0)) / SECOND


def _contiguity_ratio(one: Watched, counters: Counters) -> float:
    found = one.history.contiguity
    if counters is _NOTHING or found is None:
        return math.nan
    pairs = found.free_blocks - 1
    return found.adjacent_pairs / pairs if pairs > 0 else 1.0


def _engine_thread(engines: dict[str, Watched], now: int) -> Iterator[Metric]:
    steps = CounterMetricFamily("kvctl_engine_steps", "Engine steps since start.", labels=("engine",))
    tokens = CounterMetricFamily("kvctl_tokens_scheduled", "Tokens scheduled since start.", labels=("engine",))
    preemptions = CounterMetricFamily("kvctl_preemptions", "Requests preempted since start.", labels=("engine",))
    step_age = GaugeMetricFamily(
        "kvctl_engine_step_age_seconds",
        "Time since the last step ended; grows on an idle engine too, so read it with kvctl_engine_phase_seconds.",
        labels=("engine",),
    )
    phase = GaugeMetricFamily(
        "kvctl_engine_phase_seconds",
        "Time the engine thread has been in its present phase; 0 for the other phases.",
        labels=("engine", "phase"),
    )
    for rank, one in engines.items():
        c = _counters(one)
        steps.add_metric((rank,), _number(c.steps))
        tokens.add_metric((rank,), _number(c.tokens_scheduled))
        preemptions.add_metric((rank,), _number(c.preemptions))
        ended = c.last_step_ns
        step_age.add_metric((rank,), max(now - ended, 0) / SECOND if ended > 0 else math.nan)
        present = phase_name(c.phase)
        for name in map(phase_name, _STEP_PHASES):
            seconds = 0.0 if present else math.nan
            if name == present:
                seconds = max(now - c.phase_since_ns, 0) / SECOND
            phase.add_metric((rank, name), seconds)
    yield from (steps, tokens, preemptions, step_age, phase)


def _last_resets(engines: dict[str, Watched], now: int, wall_now: float) -> Metric:
    family = GaugeMetricFamily(
        "kvctl_last_reset_timestamp_seconds",
        "Unix time of the last reset that dropped the prefix cache, under its mode; NaN when none was seen.",
        labels=("engine", "mode"),
    )
    for rank, one in engines.items():
        c = _counters(one)
        for number, mode in _RESET_MODES.items():
            at = math.nan
            if c.last_reset_ns > 0 and c.last_reset_mode == number:
                at = wall_now - max(now - c.last_reset_ns, 0) / SECOND
            family.add_metric((rank, mode), at)
    return family
