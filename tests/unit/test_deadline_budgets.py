"""Deadlines shrink a hop and never look at the wall clock."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.rpc import deadlines
from sidecar.rpc.deadlines import Deadline, margin


class Call:
    def __init__(self, remaining):
        self.remaining = remaining

    def time_remaining(self):
        return self.remaining


@pytest.mark.parametrize(("budget", "kept"), [(30, 0.5), (5, 0.25), (1, 0.05), (0.1, 0.05), (0.04, 0.02), (0, 0)])
def test_a_hop_keeps_five_percent_within_bounds(budget, kept):
    assert margin(budget) == pytest.approx(kept)


@given(st.floats(0, 4000))
def test_the_next_hop_always_has_less_and_never_a_negative_budget(budget):
    mine = Deadline.after(budget)
    theirs = mine.for_next_hop()
    assert theirs.at_ns <= mine.at_ns
    assert theirs.remaining() >= 0


def test_a_call_without_a_deadline_gets_the_default():
    assert Deadline.of_call(Call(None)).remaining() == pytest.approx(deadlines.DEFAULT_BUDGET_S, abs=0.1)


def test_an_endless_deadline_is_cut():
    assert Deadline.of_call(Call(1e9)).remaining() <= deadlines.MAX_BUDGET_S


def test_a_stepped_wall_clock_changes_nothing(monkeypatch):
    deadline = Deadline.of_call(Call(10.0))
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert 9 < deadline.remaining() <= 10
    assert not deadline.passed()


def test_a_deadline_in_the_past_has_passed():
    assert Deadline.after(-5).passed()
