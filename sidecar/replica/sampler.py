"""Looks at every engine twice a second without costing it anything, and asks only when something looks wrong.

A look is a page read and one small read of /proc: nothing reaches the engine. Evidence is asked of the engine thread
in three cases: a caller wants AdmissionStatus; the page looks suspicious (requests wait and nothing has been scheduled
for a second, blocks are held although there is no request); or a queue has not been empty for half a minute, which
deserves one question each half minute, because only the engine can tell one parked request from a moving queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvctl.v1 import replica_pb2 as replica
from kvctl.v1 import types_pb2 as types

from engine_bridge import page as pages
from engine_bridge import protocol
from sidecar.backends.engine import EngineBackend, EngineSet, Liveness, Lost, Unreachable
from sidecar.replica.admission import describe
from sidecar.replica.history import SECOND, History, Link, Process, Sample, Verdict
from sidecar.replica.verdict import Judgement, Thresholds, judge

log = logging.getLogger(__name__)

PERIOD_S: Final = 0.5
ASK_TIMEOUT_S: Final = 2.0
"""How long a question of the sampler's own waits: longer than most steps, shorter than a person's patience."""
SUSPICIOUS_NS: Final = 1 * SECOND
ASK_AGAIN_NS: Final = 1 * SECOND
"""Between two questions while something looks wrong."""
QUEUED_NS: Final = 30 * SECOND
"""A queue this old is looked at, and again after as long."""
STATUS_CONTIGUITY_BLOCKS: Final = 4096

_PROCESS: Final = {
    Liveness.ALIVE: Process.RUNNING,
    Liveness.STOPPED: Process.STOPPED,
    Liveness.DEAD: Process.GONE,
    Liveness.UNKNOWN: Process.UNREADABLE,
}
_NOT_YET: Final = frozenset({"ENGINE_STARTING"})
_REFUSED: Final = frozenset({"ENGINE_DEAD", "ENGINE_DIED_DURING_OPERATION"})


@dataclass(slots=True)
class Watched:
    """One engine with what is remembered of it. Metrics and streams read this and never the engine."""

    engine: EngineBackend
    history: History
    judgement: Judgement
    asked_ns: int = 0
    """When evidence was last asked for."""
    unanswered_since_ns: int = 0
    question: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def ref(self) -> types.EngineRef:
        """As the API names it."""
        return types.EngineRef(data_parallel_rank=self.engine.rank, incarnation=self.engine.incarnation)


class Sampler:
    """Samples all engines of a replica. Belongs to one event loop."""

    def __init__(
        self,
        engines: EngineSet,
        clock: Callable[[], int] = time.monotonic_ns,
        thresholds: Thresholds | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        """`clock` gives CLOCK_MONOTONIC nanoseconds; nothing is read or started before `start` or `tick`."""
        self.thresholds = thresholds or Thresholds()
        self._engines = engines
        self._clock = clock
        self._period_s = period_s
        self._watched: dict[str, Watched] = {}
        self._listeners: list[Callable[[], None]] = []
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def watched(self) -> tuple[Watched, ...]:
        """Every engine, by rank, as of the last look."""
        return tuple(sorted(self._watched.values(), key=lambda watched: (watched.engine.rank, watched.engine.key)))

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        return self._period_s

    def now_ns(self) -> int:
        """The sampler's clock."""
        return self._clock()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call back (on the loop, cheap) whenever a verdict or `stalled` changes, or an engine comes or goes. Returns
        what ends it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def start(self) -> None:
        """Look once, then keep looking in the background."""
        self._engines.on_change(self._wake.set)
        self.tick()
        self._loop_task = asyncio.get_running_loop().create_task(self._run(), name="kvctl-sampler")

    async def close(self) -> None:
        """Stop looking; questions under way are withdrawn."""
        tasks = [w.question for w in self._watched.values() if w.question is not None]
        if self._loop_task is not None:
            tasks.append(self._loop_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop_task = None

    def tick(self) -> None:
        """Look at every engine once: no waiting, nothing sent but a question where something looks wrong."""
        changed = self._follow_engines()
        now = self._clock()  # after: an engine just taken up has a sample already
        for watched in self._watched.values():
            changed |= self._look(watched, now, None)
            if self._is_suspicious(watched, now):
                self._ask(watched, contiguity_blocks=0)
        if changed:
            self._notify()

    async def status(self, timeout_s: float = 0.5) -> replica.AdmissionStatusResponse:
        """The verdict of each engine, with evidence asked for now where the engine answers within `timeout_s`."""
        self._follow_engines()
        questions = [
            task
            for watched in self._watched.values()
            if (task := self._ask(watched, contiguity_blocks=STATUS_CONTIGUITY_BLOCKS)) is not None
        ]
        if questions:
            await asyncio.wait(questions, timeout=timeout_s)
        now = self._clock()
        changed = False
        for watched in self._watched.values():
            if watched.question is not None and not watched.unanswered_since_ns:
                watched.unanswered_since_ns = watched.asked_ns
            changed |= self._look(watched, now, None)
        if changed:
            self._notify()
        return self.snapshot()

    def snapshot(self) -> replica.AdmissionStatusResponse:
        """The verdict of each engine as of the last look. Asks nobody."""
        now = self._clock()
        response = replica.AdmissionStatusResponse(
            engines=[describe(w.ref, w.history, w.judgement, now, self.thresholds.evidence_ns) for w in self.watched]
        )
        response.stalled = any(engine.stalled for engine in response.engines)
        return response

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                self.tick()
            except Exception:  # a defect here must not end the watch over every engine
                log.exception("looking at the engines failed")

    def _follow_engines(self) -> bool:
        """Take up engines that came, drop those that went. A dead one stays listed until its successor appears."""
        present = {engine.key: engine for engine in self._engines.engines()}
        changed = False
        for key in self._watched.keys() - present.keys():
            gone = self._watched.pop(key)
            if gone.question is not None:
                gone.question.cancel()
            changed = True
        for key in present.keys() - self._watched.keys():
            history = History()
            now = self._clock()
            self._watched[key] = Watched(present[key], history, judge(history, now, self.thresholds))
            self._look(self._watched[key], now, None)
            changed = True
        return changed

    def _look(self, watched: Watched, now: int, evidence: protocol.Evidence | None) -> bool:
        """Take a sample and judge. Returns whether the verdict changed."""
        watched.history.append(self._sample(watched, now, evidence))
        before = watched.judgement
        watched.judgement = judge(watched.history, now, self.thresholds)
        watched.history.settle(watched.judgement.standing)
        return (before.verdict, before.stalled) != (watched.judgement.verdict, watched.judgement.stalled)

    def _sample(self, watched: Watched, now: int, evidence: protocol.Evidence | None) -> Sample:
        engine = watched.engine
        trouble = None if engine.connected else engine.trouble
        note = page_problem = ""
        snapshot: pages.Snapshot | None = None
        try:
            snapshot = engine.page()
        except pages.PageError as error:
            page_problem = str(error)
        if trouble is not None:
            note = trouble.message
        link = Link.OPEN if engine.connected else Link.UNKNOWN
        if trouble is not None and trouble.reason in _REFUSED:
            link = Link.REFUSED
        elif trouble is not None and trouble.reason in _NOT_YET:
            link = Link.NOT_YET
        return Sample(
            at_ns=now,
            link=link,
            process=_PROCESS[engine.liveness()],
            counters=snapshot.counters if snapshot is not None else None,
            evidence=evidence,
            unanswered_since_ns=watched.unanswered_since_ns,
            note=note,
            page_problem=page_problem,
        )

    def _is_suspicious(self, watched: Watched, now: int) -> bool:
        if watched.judgement.verdict in (Verdict.ENGINE_DEAD, Verdict.ENGINE_STOPPED) or now < watched.asked_ns:
            return False
        since_asked = now - watched.asked_ns if watched.asked_ns else now
        if since_asked < ASK_AGAIN_NS:
            return False
        history, last = watched.history, watched.history.latest
        if last is None or last.counters is None:
            # A damaged page hides everything: only the engine's own answers are left to judge by.
            return last is not None and bool(last.page_problem)
        if watched.unanswered_since_ns:
            return True
        counters = last.counters
        if counters.sleeping > 0 or counters.paused > 0 or counters.phase == pages.Phase.STARTING:
            return False
        if last.demand:
            still = now - max(counters.last_progress_ns, history.work_since_ns)
            return still > SUSPICIOUS_NS or (_older(now, history.queue_since_ns, QUEUED_NS) and since_asked > QUEUED_NS)
        mark = history.marks[-1] if history.marks else None
        return mark is not None and _older(now, mark.first_ns, self.thresholds.leak_ns) and since_asked > QUEUED_NS

    def _ask(self, watched: Watched, contiguity_blocks: int) -> asyncio.Task[None] | None:
        """Ask for evidence, or join the question under way. None when the engine cannot be asked."""
        if watched.question is not None:
            return watched.question
        if not watched.engine.connected or watched.engine.liveness() in (Liveness.STOPPED, Liveness.DEAD):
            return None
        watched.asked_ns = self._clock()
        watched.question = asyncio.get_running_loop().create_task(self._question(watched, contiguity_blocks))
        return watched.question

    async def _question(self, watched: Watched, contiguity_blocks: int) -> None:
        try:
            answer = await watched.engine.evidence(ASK_TIMEOUT_S, contiguity_blocks)
        except Exception:
            log.exception("asking %s for evidence failed", watched.engine.key)
            answer = Lost("unknown", "the question failed; the log has the trace")
        finally:
            watched.question = None
        if self._watched.get(watched.engine.key) is not watched:
            return
        evidence = None
        if isinstance(answer, protocol.Evidence):
            watched.unanswered_since_ns = 0
            # Over HTTP the same facts are in the counters, and an Evidence full of -1 would pass for knowledge.
            evidence = None if _is_http(watched.engine) else answer
        elif isinstance(answer, Lost):
            watched.unanswered_since_ns = watched.unanswered_since_ns or watched.asked_ns
        elif isinstance(answer, Unreachable):
            watched.unanswered_since_ns = 0
        if self._look(watched, self._clock(), evidence):
            self._notify()

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()


def _older(now: int, since_ns: int, limit_ns: int) -> bool:
    return since_ns > 0 and now - since_ns >= limit_ns


def _is_http(engine: EngineBackend) -> bool:
    return engine.facts is not None and engine.facts.backend == "http"
