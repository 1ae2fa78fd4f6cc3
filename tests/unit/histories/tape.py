"""Histories as the sampler would have recorded them: two looks a second, judged at each look."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from engine_bridge import protocol
from engine_bridge.page import Counters, Phase
from sidecar.replica.history import SECOND, History, Link, Process, Sample
from sidecar.replica.judgement import Judgement, Thresholds
from sidecar.replica.verdict import judge

HERE = Path(__file__).parent
START_NS = 1_000 * SECOND
"""Far from 0, which means "never" in a page."""


def evidence(**changes: Any) -> protocol.Evidence:
    """Evidence of an engine with nothing in it."""
    empty = protocol.Evidence(
        call=1,
        monotonic_ns=0,
        running=0,
        waiting=0,
        waiting_remote_kv=0,
        load_finished=0,
        waiting_other=0,
        waiting_holding_blocks=0,
        blocks_total=160,
        blocks_free=160,
        blocks_cached=0,
        blocks_orphaned=0,
        head=None,
        holders=[],
        oldest_waiting_ns=0,
        paused="",
        sleeping=False,
        woke_without_reset=False,
        scheduling="running",
        weight_version="",
        contiguity=None,
        quarantined_requests=0,
        truncated=False,
    )
    return msgspec.structs.replace(empty, **changes)


def head(needed: int, status: str = "WAITING", held: int = 0, waiting_s: float = 10.0) -> protocol.HeadOfQueue:
    """A head of the queue."""
    return protocol.HeadOfQueue("cmpl-7", status, needed, needed * 16, held, int(waiting_s * SECOND))


def holder(blocks: int, name: str = "cmpl-7") -> protocol.Holder:
    """A waiting request that holds blocks after its load has finished."""
    return protocol.Holder(name, "WAITING_FOR_REMOTE_KVS", blocks, True)


@dataclass
class Tape:
    """Plays segments into a history. Rates are a second."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    period_s: float = 0.5
    now_ns: int = START_NS
    history: History = field(default_factory=History)
    page: Counters = field(
        default_factory=lambda: Counters(
            incarnation=bytes(range(16)),
            pid=4711,
            phase=Phase.IDLE,
            phase_since_ns=START_NS - 60 * SECOND,
            blocks_total=160,
            blocks_free=160,
        )
    )
    judgements: list[tuple[float, Judgement]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Since the tape began."""
        return (self.now_ns - START_NS) / SECOND

    @property
    def last(self) -> Judgement:
        """The verdict at the end."""
        return self.judgements[-1][1]

    @property
    def verdicts(self) -> list[str]:
        """Verdicts in order, repetitions left out."""
        out: list[str] = []
        for _, judgement in self.judgements:
            if not out or out[-1] != judgement.verdict:
                out.append(str(judgement.verdict))
        return out

    def since(self, verdict: str) -> float:
        """When the verdict was first given, seconds from the start."""
        return next(at for at, judgement in self.judgements if judgement.verdict == verdict)

    def play(
        self,
        seconds: float,
        *,
        tokens: float = 0,
        outputs: float = 0,
        preemptions: float = 0,
        turning: bool | None = None,
        phase: Phase | None = None,
        evidence: protocol.Evidence | None = None,
        link: Link = Link.OPEN,
        process: Process = Process.RUNNING,
        unanswered_since_ns: int = 0,
        note: str = "",
        no_page: bool = False,
        **page: int,
    ) -> Judgement:
        """Look every period for so long. `turning`: steps go on (unset: whenever there is work). `evidence` is given
        once a second from the second one on, as the sampler would ask while something looks wrong.
        """
        for name, value in page.items():
            setattr(self.page, name, value)
        carry = {"tokens_scheduled": 0.0, "outputs": 0.0, "preemptions": 0.0}
        looks = round(seconds / self.period_s)
        for look in range(looks):
            self.now_ns += int(self.period_s * SECOND)
            busy = self.page.running > 0 or self.page.waiting > 0
            if tokens or (turning if turning is not None else busy and phase is None):
                self.page.steps += 10
                self.page.last_step_ns = self.now_ns - 1_000_000
                self.page.phase, self.page.phase_since_ns = Phase.STEP, self.now_ns - 1_000_000
            if tokens:
                self.page.last_progress_ns = self.now_ns - 1_000_000
            for name, rate in (("tokens_scheduled", tokens), ("outputs", outputs), ("preemptions", preemptions)):
                carry[name] += rate * self.period_s
                whole = int(carry[name] + 1e-9)
                carry[name] -= whole
                setattr(self.page, name, getattr(self.page, name) + whole)
            if phase is not None and self.page.phase != phase:
                self.page.phase, self.page.phase_since_ns = phase, self.now_ns
            told = None
            if evidence is not None and look % 2 == 0 and look * self.period_s >= 1.0:
                told = msgspec.structs.replace(evidence, monotonic_ns=self.now_ns)
            self.look(
                Sample(
                    at_ns=self.now_ns,
                    link=link,
                    process=process,
                    counters=None if no_page else replace(self.page),
                    evidence=told,
                    unanswered_since_ns=unanswered_since_ns,
                    note=note,
                )
            )
        return self.last

    def look(self, sample: Sample) -> Judgement:
        """Take one sample and judge, as the sampler does."""
        self.history.append(sample)
        judgement = judge(self.history, sample.at_ns, self.thresholds)
        self.history.settle(judgement.standing)
        self.judgements.append(((sample.at_ns - START_NS) / SECOND, judgement))
        return judgement


def recorded(name: str) -> list[Sample]:
    """A history recorded from a running engine: one JSON sample a line, times in nanoseconds."""
    samples: list[Sample] = []
    for line in (HERE / f"{name}.jsonl").read_text().splitlines():
        raw = json.loads(line)
        counters = raw["counters"]
        if counters is not None:
            counters = Counters(**{**counters, "incarnation": bytes.fromhex(counters["incarnation"])})
        told = raw.get("evidence")
        samples.append(
            Sample(
                at_ns=raw["at_ns"],
                link=Link(raw["link"]),
                process=Process(raw["process"]),
                counters=counters,
                evidence=None if told is None else msgspec.convert(told, protocol.Evidence),
                unanswered_since_ns=raw["unanswered_since_ns"],
                note=raw["note"],
            )
        )
    return samples
