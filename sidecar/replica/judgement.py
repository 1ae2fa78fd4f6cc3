"""The values a verdict is made of and made into.

`Thresholds` says when a number becomes a verdict, `View` is a history seen at one instant, `Finding` what one rule says
and `Judgement` what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from engine_bridge.page import Counters
from engine_bridge.protocol import Evidence
from sidecar.replica.history import SECOND, History, Sample, Standing, Verdict

ALWAYS_STALLED: Final = frozenset(
    {
        Verdict.HELD_BLOCKS_DEADLOCK,
        Verdict.HEAD_CANNOT_FIT,
        Verdict.ENGINE_HUNG,
        Verdict.ENGINE_STOPPED,
        Verdict.ENGINE_DEAD,
    }
)
"""No waiting request can start until someone acts, whatever the numbers."""

NEVER_STALLED: Final = frozenset({Verdict.IDLE, Verdict.FLOWING, Verdict.SATURATED, Verdict.DEGRADED, Verdict.STARTING})
"""Of the others, the rule that gives the verdict says: PAUSED and SLEEPING are planned until they outlast a planned
pause, WAITING_REMOTE_KV ends by itself until it does not, THRASHING still yields tokens or yields none, BLOCKS_LEAKED
leaves room or leaves none, UNKNOWN covers a standstill without a known cause."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a number becomes a verdict. Nanoseconds unless the name says otherwise."""

    stall_ns: int = 5 * SECOND
    """No token for this long, with work there and the loop turning, is a standstill."""
    blind_stall_ns: int = 30 * SECOND
    """The same where the engine's phase is unknown (HTTP): a long step then looks like a standstill."""
    hung_ns: int = 60 * SECOND
    """The engine thread in one step or operation for this long is hung. A long prefill on a slow device may
    need more."""
    silent_ns: int = 10 * SECOND
    """An idle engine thread that leaves a question unanswered for this long is hung: idle threads answer in
    milliseconds."""
    linger_ns: int = 1 * SECOND
    """FLOWING outlives the last token by this."""
    planned_ns: int = 60 * SECOND
    """A pause or a sleep with requests waiting is somebody's plan until it has lasted this long."""
    remote_ns: int = 120 * SECOND
    """No remote load ends for this long: they will not end by themselves."""
    leak_ns: int = 10 * SECOND
    """Blocks held by nobody for this long are not a transfer."""
    parked_ns: int = 60 * SECOND
    """A request waiting this long while others flow is worth a warning."""
    start_ns: int = 900 * SECOND
    """An engine that has not listened for this long since it was first looked for is not starting."""
    rate_ns: int = 10 * SECOND
    """Window of rates."""
    evidence_ns: int = 15 * SECOND
    """Evidence older than this says nothing about now."""
    degraded_below: float = 0.25
    """DEGRADED: share of the former tokens and outputs a second."""
    degraded_above: float = 0.40
    """Share at which DEGRADED ends."""
    thrash_outputs: float = 4.0
    """THRASHING: fewer outputs than this for each preemption. A healthy, overfull engine has hundreds."""
    thrash_spread: int = 3
    """THRASHING: preemptions in at least this many samples of the window; one reset preempts everything once."""


def thresholds(stall_s: float, hung_s: float) -> Thresholds:
    """With the two that operators set, in seconds; what depends on them follows."""
    default = Thresholds()
    stall_ns = int(stall_s * SECOND)
    return replace(
        default,
        stall_ns=stall_ns,
        blind_stall_ns=max(default.blind_stall_ns, stall_ns),
        hung_ns=int(hung_s * SECOND),
        evidence_ns=max(default.evidence_ns, 2 * stall_ns),
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and why."""

    verdict: Verdict
    stalled: bool
    since_ns: int
    """Since when the verdict has held, as far as the evidence reaches."""
    explanation: str
    """One sentence: the numbers, and the remedy where there is one."""
    warnings: tuple[str, ...] = ()
    tokens_per_second: float = -1.0
    """Over the window looked at; -1 when there was none."""

    @property
    def standing(self) -> Standing:
        """What a history keeps of it."""
        return Standing(self.verdict, self.since_ns, self.stalled)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule says. `since_ns` 0: since now, or since the same verdict was first given."""

    verdict: Verdict
    text: str
    stalled: bool = False
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A history, seen at one instant."""

    now_ns: int
    limits: Thresholds
    history: History
    last: Sample
    page: Counters
    evidence: Evidence | None
    """None unless it is recent and nothing has moved since."""
    still_since_ns: int
    """Start of the present standstill, if there is work."""
    turning_ns: int
    """Part of the standstill in which the loop turned and scheduled nothing: without a long step still under way."""
    window: list[Sample]

    @property
    def still_ns(self) -> int:
        """Length of the present standstill."""
        return max(self.now_ns - self.still_since_ns, 0)

    @property
    def stall_ns(self) -> int:
        """How much turning without progress is a standstill here."""
        return self.limits.stall_ns if self.page.phase >= 0 else self.limits.blind_stall_ns

    @property
    def phase_ns(self) -> int:
        """Time in the present phase."""
        return max(self.now_ns - self.page.phase_since_ns, 0)

    @property
    def window_s(self) -> float:
        """Seconds covered by the window, 0 when it holds fewer than two samples."""
        return (self.window[-1].at_ns - self.window[0].at_ns) / SECOND if len(self.window) > 1 else 0.0

    def rate(self, field: str) -> float:
        """A counter's rise a second over the window; -1 when unknown."""
        if self.window_s <= 0:
            return -1.0
        first, last = self.window[0].counters, self.window[-1].counters
        before, after = getattr(first, field), getattr(last, field)
        return -1.0 if before < 0 or after < 0 else max(after - before, 0) / self.window_s

    def was(self, verdict: Verdict) -> bool:
        """Whether this was the verdict before."""
        return self.history.standing is not None and self.history.standing.verdict is verdict
