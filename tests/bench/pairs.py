"""Comparing two things on a machine that is never quiet.

Measured one after the other, whatever else the machine did meanwhile passes for a difference. So they take turns, A B A
B ... A, and each B is set against the two As around it, which a slow drift leaves alone. The same As against each other
say how much of a difference the machine makes out of nothing: a ratio within that is none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of ratios."""

    median: float
    low: float
    high: float

    @property
    def text(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(values: Sequence[float]) -> Ratio:
    if len(values) == 1:
        return Ratio(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)


@dataclass(frozen=True)
class Turns:
    """What came of taking turns: the baseline has one sample more than the others."""

    baseline: list[float]
    others: dict[str, list[float]]

    def ratio(self, name: str) -> Ratio:
        """The other over the baseline, round by round."""
        around = [(before + after) / 2 for before, after in pairwise(self.baseline)]
        return ratio_of([value / base for value, base in zip(self.others[name], around, strict=True)])

    def noise(self) -> Ratio:
        """The baseline over itself, one round later."""
        return ratio_of([after / before for before, after in pairwise(self.baseline)])

    def median(self, name: str) -> float:
        return statistics.median(self.others[name])

    @property
    def median_baseline(self) -> float:
        return statistics.median(self.baseline)


def take_turns(
    baseline: Callable[[], float], others: Mapping[str, Callable[[], float]], rounds: int, bound_s: float = 3600
) -> Turns:
    """Each callable measures once and says how much. After `bound_s` the round under way is the last."""
    found = Turns([], {name: [] for name in others})
    until = time.monotonic() + bound_s
    for _ in range(rounds):
        if found.baseline and time.monotonic() > until:
            break
        found.baseline.append(baseline())
        for name, measure in others.items():
            found.others[name].append(measure())
    found.baseline.append(baseline())
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
