"""The record that verdicts are judged on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_bridge.page import Counters
from sidecar.replica.history import BUCKETS, MARKS, SAMPLES, SECOND, History, Sample, Standing, Verdict
from tests.unit.histories.tape import START_NS, Tape, evidence


def sample(at_s: float, **page: int) -> Sample:
    return Sample(at_ns=START_NS + int(at_s * SECOND), counters=Counters(**page))


def test_a_history_is_bounded_however_long_it_runs():
    tape = Tape(period_s=10.0)
    for level in range(2500):
        tape.play(10, tokens=10, outputs=10, running=level % 2, waiting=0, blocks_free=level % 160)
    assert len(tape.history.samples) == SAMPLES
    assert len(tape.history.buckets) <= BUCKETS
    assert len(tape.history.marks) <= MARKS


def test_another_incarnation_starts_a_new_history():
    history = History()
    history.append(sample(0, pid=1, steps=500, running=3))
    history.settle(Standing(Verdict.FLOWING, START_NS, False))
    history.append(replace(sample(1), counters=Counters(incarnation=b"x" * 16, pid=1, steps=900)))
    assert len(history.samples) == 1
    assert history.standing is None
    assert history.work_since_ns == 0


def test_counters_that_go_backwards_are_a_restart():
    """Over HTTP nothing else shows it."""
    history = History()
    history.append(sample(0, steps=500, tokens_scheduled=1000))
    history.append(sample(1, steps=10, tokens_scheduled=20))
    assert len(history.samples) == 1


def test_a_sample_older_than_the_last_is_refused():
    history = History()
    history.append(sample(1))
    with pytest.raises(ValueError, match="after one at"):
        history.append(sample(0))


def test_counters_survive_a_look_that_finds_none():
    history = History()
    history.append(sample(0, running=7))
    history.append(Sample(at_ns=START_NS + SECOND, note="page torn"))
    assert history.counters is not None
    assert history.counters.running == 7


def test_work_is_dated_from_the_first_look_that_saw_it_without_a_break():
    history = History()
    for at, running in ((0, 1), (1, 1), (2, 0), (3, 2), (4, 2)):
        history.append(sample(at, running=running))
    assert history.work_since_ns == START_NS + 3 * SECOND


def test_deferred_requests_do_not_count_as_a_queue():
    history = History()
    history.append(sample(0, waiting=3, deferred=3))
    assert history.queue_since_ns == 0
    history.append(sample(1, waiting=4, deferred=3))
    assert history.queue_since_ns == START_NS + SECOND


def test_throughput_is_remembered_in_buckets():
    tape = Tape()
    tape.play(41, tokens=100, outputs=50, running=4, waiting=1)
    assert len(tape.history.buckets) == 4
    assert tape.history.buckets[-1].tokens_per_second == pytest.approx(100)
    assert tape.history.buckets[-1].outputs_per_second == pytest.approx(50)
    assert tape.history.buckets[-1].demand == 5


def test_a_gap_in_the_looks_makes_no_bucket():
    """A sidecar that was itself stopped would otherwise remember an average over the gap."""
    history = History()
    history.append(sample(0, tokens_scheduled=0))
    history.append(sample(500, tokens_scheduled=100))
    assert history.buckets == ()


def test_blocks_that_all_come_back_clear_the_marks():
    history = History()
    for at, free in ((0, 90), (1, 80), (2, 100)):
        history.append(sample(at, blocks_total=100, blocks_free=free))
    assert history.marks == ()


def test_a_lower_level_forgets_the_higher_ones():
    history = History()
    for at, free in ((0, 90), (1, 70), (2, 85)):
        history.append(sample(at, blocks_total=100, blocks_free=free))
    assert [mark.blocks for mark in history.marks] == [10, 15]


def test_blocks_of_running_requests_are_not_marked_unless_the_engine_counted_orphans():
    history = History()
    history.append(sample(0, running=2, blocks_total=100, blocks_free=50))
    assert history.marks == ()
    told = evidence(monotonic_ns=START_NS + SECOND, running=2, blocks_orphaned=9)
    history.append(replace(sample(1, running=2, blocks_total=100, blocks_free=50), evidence=told))
    assert [mark.blocks for mark in history.marks] == [9]
