"""Faults drawn from a seed: rounds of operations with one or two things broken at a time, judged as a whole.

A round is drawn from the seed and its number alone, so that a round that failed can be played again; how the processes
meet in time is the machine's. Every round ends with everything mended and its operations at their end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.fake_engine.gate import POINTS
from tests.robustness.recorded_fleet import LONG_S, RecordedFleet
from tests.robustness.recorded_processes import ReplicaUnderTest

Fault = Callable[[RecordedFleet, ReplicaUnderTest], None]

FAULTS: dict[str, Fault] = {
    "kill engine": lambda _, replica: replica.kill_engine(),
    "kill sidecar": lambda _, replica: replica.kill_sidecar(),
    "kill coordinator": lambda fleet, _: fleet.coordinator.kill(),
    "stop engine": lambda _, replica: replica.stop_engine(),
    "stop sidecar": lambda _, replica: replica.stop_sidecar(),
    "stop coordinator": lambda fleet, _: fleet.coordinator.stop(),
    "replace": lambda _, replica: replica.replace(),
    "reset": lambda _, replica: replica.break_network("reset", lambda proxy: proxy.reset()),
    "refuse": lambda _, replica: replica.break_network("refuse", lambda proxy: proxy.reset(refuse=True)),
    "black hole": lambda _, replica: replica.break_network("black hole", lambda proxy: proxy.black_hole()),
    "lost answers": lambda _, replica: replica.break_network("lost answers", lambda proxy: proxy.black_hole("back")),
    "lost calls": lambda _, replica: replica.break_network("lost calls", lambda proxy: proxy.black_hole("forth")),
    "delay": lambda _, replica: replica.break_network("delay", lambda proxy: proxy.delay(0.3)),
    "throttle": lambda _, replica: replica.break_network("throttle", lambda proxy: proxy.throttle(2_000)),
    "half close": lambda _, replica: replica.break_network("half close", lambda proxy: proxy.half_close("back")),
}

_OF_THE_COORDINATOR = frozenset({"kill coordinator", "stop coordinator"})


class RandomFaults:
    """Plays rounds on one fleet."""

    def __init__(self, fleet: RecordedFleet, seed: int) -> None:
        self.rounds = 0
        self._fleet = fleet
        self._seed = seed
        self._operations: list[str] = []

    def play(self, rounds: int) -> None:
        """So many rounds, then the checker."""
        for _ in range(rounds):
            self._round()
        self._judge()

    def play_for(self, seconds: float) -> None:
        """Rounds until the time is over, the checker after each tenth."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._round()
            if self.rounds % 10 == 0:
                self._judge()
        self._judge()

    def _round(self) -> None:
        self.rounds += 1
        drawn = random.Random(f"{self._seed}/{self.rounds}")
        fleet = self._fleet
        held = drawn.choice(list(fleet.replicas.values()))
        held.engine.do("hold_at", point=drawn.choice(POINTS))
        rolling = drawn.random() < 0.4
        limit = drawn.choice((1, len(fleet.replicas)))
        started = [fleet.start(drawn.randint(2, 3), max_unavailable=int(rolling), max_failures=limit)]
        broken = drawn.sample(sorted(FAULTS), drawn.choice((1, 1, 2)))
        if drawn.random() < 0.7:
            held.wait_held(1)
        print(f"seed {self._seed} round {self.rounds}: {', '.join(broken)}", flush=True)
        for name in broken:
            FAULTS[name](fleet, drawn.choice(list(fleet.replicas.values())))
        if not _OF_THE_COORDINATOR & set(broken):
            if drawn.random() < 0.5:
                started.append(fleet.start(drawn.randint(2, 3)))
            if drawn.random() < 0.5:
                held.let_go()
                for operation_id in started:
                    # A rollout waits a minute for the health of a replica that is still broken.
                    fleet.end(operation_id, 2 * LONG_S)
        held.let_go()
        fleet.mend()
        for operation_id in started:
            fleet.end(operation_id)
        self._operations += started

    def _judge(self) -> None:
        self._fleet.load(1)
        for operation_id in self._operations:
            self._fleet.settle(operation_id)
        self._fleet.check()
        self._operations.clear()
