"""What must hold for every history, however odd: generated, not chosen."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_bridge.page import Counters, Phase
from sidecar.replica.history import SECOND, History, Link, Process, Sample, Verdict
from sidecar.replica.judgement import ALWAYS_STALLED, NEVER_STALLED, Judgement, Thresholds
from sidecar.replica.verdict import judge
from tests.unit.histories.tape import START_NS, Tape, evidence, head, holder

counts = st.integers(-1, 300)
times = st.integers(0, 400 * SECOND).map(lambda ago: max(START_NS - ago, 0))


@st.composite
def told(draw: st.DrawFn) -> Any:
    heads = st.none() | st.builds(
        lambda needed, held: head(needed, draw(st.sampled_from(["WAITING", "WAITING_FOR_REMOTE_KVS", "é\n"])), held),
        st.integers(0, 400),
        st.integers(0, 200),
    )
    return evidence(
        monotonic_ns=draw(times),
        running=draw(counts),
        waiting=draw(counts),
        waiting_remote_kv=draw(counts),
        waiting_other=draw(counts),
        waiting_holding_blocks=draw(counts),
        blocks_total=draw(counts),
        blocks_free=draw(counts),
        blocks_orphaned=draw(counts),
        head=draw(heads),
        holders=draw(st.lists(st.integers(0, 100).map(holder), max_size=3)),
        oldest_waiting_ns=draw(st.integers(-1, 900 * SECOND)),
        verdict=draw(st.sampled_from(["", "HELD_BLOCKS_DEADLOCK", "SOMETHING_NEW"])),
    )


pages = st.builds(
    Counters,
    pid=st.integers(0, 5),
    phase=st.integers(-1, 9),
    phase_since_ns=times,
    steps=st.integers(-1, 10_000),
    last_progress_ns=times | st.just(0),
    tokens_scheduled=st.integers(-1, 100_000),
    outputs=st.integers(-1, 100_000),
    preemptions=st.integers(-1, 1000),
    running=counts,
    waiting=counts,
    deferred=counts,
    holding=counts,
    paused=st.integers(-1, 2),
    sleeping=st.integers(-1, 1),
    blocks_total=counts,
    blocks_free=counts,
    flags=st.integers(-1, 3),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[History, int]:
    history, now = History(), START_NS
    for _ in range(draw(st.integers(0, 12))):
        now += draw(st.integers(0, 30 * SECOND))
        history.append(
            Sample(
                at_ns=now,
                link=draw(st.sampled_from(Link)),
                process=draw(st.sampled_from(Process)),
                counters=draw(st.none() | pages),
                evidence=draw(st.none() | told()),
                unanswered_since_ns=draw(st.just(0) | times),
                note=draw(st.sampled_from(["", "the page cannot be read"])),
            )
        )
        if draw(st.booleans()):
            history.settle(judge(history, now, Thresholds()).standing)
    return history, now + draw(st.integers(0, 120 * SECOND))


many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(histories())
def test_no_history_makes_the_judge_raise_or_say_nothing(given_history: tuple[History, int]):
    history, now = given_history
    judgement = judge(history, now, Thresholds())
    assert judgement.explanation
    assert "\n" not in judgement.explanation.replace("é\n", "")
    assert 0 < judgement.since_ns <= now


@many
@given(histories())
def test_stalled_agrees_with_the_verdict(given_history: tuple[History, int]):
    judgement = judge(*given_history, Thresholds())
    if judgement.verdict in ALWAYS_STALLED:
        assert judgement.stalled
    if judgement.verdict in NEVER_STALLED:
        assert not judgement.stalled


@many
@given(histories())
def test_judging_twice_gives_the_same_and_changes_nothing(given_history: tuple[History, int]):
    history, now = given_history
    before = (history.samples, history.buckets, history.marks, history.standing)
    assert judge(history, now, Thresholds()) == judge(history, now, Thresholds())
    assert before == (history.samples, history.buckets, history.marks, history.standing)


@many
@given(histories(), st.integers(1, 10**6))
def test_only_differences_of_time_matter(given_history: tuple[History, int], shift_s: int):
    """Another boot, another origin of the monotonic clock: the same verdict."""
    history, now = given_history
    moved, shift = History(), shift_s * SECOND
    for sample in history.samples:
        moved.append(_later(sample, shift))
    still = History()
    for sample in history.samples:
        still.append(sample)
    here, there = judge(still, now, Thresholds()), judge(moved, now + shift, Thresholds())
    assert (here.verdict, here.stalled, here.explanation) == (there.verdict, there.stalled, there.explanation)
    assert now - here.since_ns == now + shift - there.since_ns


def _later(sample: Sample, shift: int) -> Sample:
    page, seen = sample.counters, sample.evidence
    moved = lambda at: at + shift if at > 0 else at  # noqa: E731
    if page is not None:
        page = replace(page, phase_since_ns=page.phase_since_ns + shift, last_progress_ns=moved(page.last_progress_ns))
    if seen is not None:
        seen = evidence(**{**_fields(seen), "monotonic_ns": seen.monotonic_ns + shift})
    return replace(
        sample,
        at_ns=sample.at_ns + shift,
        counters=page,
        evidence=seen,
        unanswered_since_ns=moved(sample.unanswered_since_ns),
    )


def _fields(told: Any) -> dict[str, Any]:
    return {name: getattr(told, name) for name in told.__struct_fields__}


def test_wall_clock_time_plays_no_part(monkeypatch: pytest.MonkeyPatch):
    """copr#4311: the wall clock stepped by an hour made false stalls."""

    def forbidden(*_: object) -> float:
        raise AssertionError("a clock was read")

    for clock in ("time", "time_ns", "monotonic", "monotonic_ns", "localtime", "gmtime"):
        monkeypatch.setattr(time, clock, forbidden)
    tape = Tape()
    tape.play(20, tokens=1500, outputs=1500, running=29, waiting=4)
    tape.play(20, running=0, waiting=4)
    assert tape.last.stalled


@many
@given(st.floats(6, 600), st.integers(1, 50), st.integers(0, 160))
def test_a_standstill_stays_stalled_for_as_long_as_nothing_moves(seconds: float, waiting: int, free: int):
    tape = Tape(period_s=2.0)
    tape.play(10, tokens=1500, outputs=1500, running=5, waiting=waiting, blocks_free=free)
    verdicts: list[Judgement] = []
    tape.play(8, running=0, waiting=waiting)
    start = len(tape.judgements)
    tape.play(max(seconds, 2), running=0, waiting=waiting)
    verdicts = [judgement for _, judgement in tape.judgements[start:]]
    assert all(judgement.stalled for judgement in verdicts)
    assert len({judgement.since_ns for judgement in verdicts}) == 1, "it began once"


@many
@given(st.lists(st.sampled_from(["tokens", "nothing", "step"]), min_size=1, max_size=60))
def test_an_engine_that_moves_within_every_threshold_is_never_stalled(looks: list[str]):
    tape = Tape()
    tape.play(5, tokens=100, outputs=100, running=3, waiting=2, blocks_free=100)
    still = 0.0
    for what in looks:
        if what == "tokens" or still >= 4:
            tape.play(0.5, tokens=100, outputs=100)
            still = 0
        elif what == "nothing":
            tape.play(0.5)
            still += 0.5
        else:
            tape.play(0.5, phase=Phase.STEP, turning=False)
            still += 0.5
    assert not any(judgement.stalled for _, judgement in tape.judgements)
    assert {str(v) for v in tape.verdicts} <= {Verdict.FLOWING, Verdict.IDLE, Verdict.DEGRADED}
