"""Rounds of random faults from fixed seeds, and for as long as one likes from any: no promise is broken.

    KVCTL_FAULT_SECONDS=600 [KVCTL_FAULT_SEED=1] pytest -m slow -s tests/robustness/test_random_faults.py

A history that breaks one is kept in build/robustness; the output has the seed and what was broken in each round.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.robustness.random_faults import RandomFaults
from tests.robustness.recorded_fleet import RecordedFleet

ROUNDS = 5
SOAK_S = float(os.environ.get("KVCTL_FAULT_SECONDS", "600"))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_faults_of_this_seed_break_no_promise(loaded_fleet: RecordedFleet, seed: int) -> None:
    RandomFaults(loaded_fleet, seed).play(ROUNDS)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_random_faults_for_as_long_as_asked_break_no_promise(loaded_fleet: RecordedFleet) -> None:
    seed = int(os.environ.get("KVCTL_FAULT_SEED", "") or random.SystemRandom().randrange(1_000_000))
    print(f"KVCTL_FAULT_SEED={seed}")
    RandomFaults(loaded_fleet, seed).play_for(SOAK_S)
