"""Verdicts on samples recorded from real vLLM 0.32 engines by tests/engine/test_verdict_real.py.

Each recording is played back as it was sampled, and the sequence of verdicts must be the one a person would give it.
"""

from __future__ import annotations

import pytest

from sidecar.replica.history import SECOND
from tests.unit.histories.tape import Tape, recorded

SERVED = ["IDLE", "FLOWING", "ENGINE_STOPPED", "FLOWING", "IDLE", "FLOWING", "SATURATED", "FLOWING", "IDLE"]
RECORDINGS = {
    "served-stopped-saturated": SERVED,
    "killed": [*SERVED, "ENGINE_DEAD"],
    "long-step": ["IDLE", "FLOWING"],
    "deadlock-and-relief": ["FLOWING", "IDLE", "FLOWING", "HELD_BLOCKS_DEADLOCK", "FLOWING", "IDLE"],
}


def play(name: str) -> Tape:
    tape = Tape()
    for sample in recorded(name):
        tape.look(sample)
    return tape


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recorded_history_gets_the_verdicts_a_person_would_give_it(name: str):
    assert play(name).verdicts == RECORDINGS[name]


@pytest.mark.parametrize("name", RECORDINGS)
def test_no_recorded_verdict_lasts_less_than_two_samples(name: str):
    """Flapping would show as a verdict for a single sample between two others."""
    verdicts = [judgement.verdict for _, judgement in play(name).judgements]
    lone = [
        index for index in range(1, len(verdicts) - 1) if verdicts[index - 1] == verdicts[index + 1] != verdicts[index]
    ]
    assert lone == []


def test_the_recorded_deadlock_is_raised_in_time_and_cleared_within_two_samples():
    tape = play("deadlock-and-relief")
    moves = [sample.at_ns for sample in recorded("deadlock-and-relief")]
    stalled = [index for index, (_, judgement) in enumerate(tape.judgements) if judgement.stalled]
    began = tape.judgements[stalled[0]][1].since_ns
    assert (moves[stalled[0]] - began) / SECOND <= 7
    assert stalled == list(range(stalled[0], stalled[-1] + 1)), "raised once"
    relieved = next(
        index
        for index, sample in enumerate(recorded("deadlock-and-relief"))
        if sample.counters is not None and sample.counters.last_progress_ns > began
    )
    assert stalled[-1] < relieved + 2
