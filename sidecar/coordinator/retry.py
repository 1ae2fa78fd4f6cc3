"""When to call a target again, when to ask first, and when to give up: decisions only, no I/O.

Three kinds of failure need three answers. A replica that said no (a typed refusal) is called again only when its
contract says that later may be better. A call whose answer was lost may have had its effect: it is never repeated
before the replica was asked for the request id, because a repeat cannot be told from a second operation once the
replica has forgotten the first. Everything else is final.

Waits grow exponentially and are drawn at random over their whole length ("full jitter", M. Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015): retries of many targets must not meet again at one instant. A
refusal that names a delay is given at least that. The retries of one operation share a budget, so that a fleet that is
down is not kept down by those who ask whether it is up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2

FINAL_UNAVAILABLE: Final = frozenset(
    {
        "NOT_A_SIDECAR",
        "BRIDGE_NOT_ATTACHED",
        "ENGINE_DIED_DURING_OPERATION",
        "ENGINE_RESTARTED",
    }
)
"""UNAVAILABLE that waiting a little does not mend, or that says something already happened."""

WAITABLE_REFUSALS: Final = frozenset({"FAILED_PRECONDITION", "ABORTED"})
"""Refusals that change nothing and may be over later: repeated only when the operation says `wait`."""

FINAL_REFUSALS: Final = frozenset({"REQUEST_ID_REUSED", "NOT_DEADLOCKED", "RELIEF_EXHAUSTED", "WRONG_SCHEDULING_STATE"})
"""Refusals that the same request meets again, however long it waits."""

NEVER_TOLD: Final = frozenset({"UNCONFIRMED"})
"""Unknown for good: the engine took the request and said no more, so that to ask again teaches nothing."""

TRANSPORT_REASONS: Final = frozenset({"", "REPLICA_UNREACHABLE"})
"""UNAVAILABLE with one of these came from the transport, not from a sidecar."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Times in seconds."""

    first_s: float = 0.2
    """Upper end of the first wait."""
    factor: float = 2.0
    longest_s: float = 5.0
    unavailable_attempts: int = 4
    """Calls to a replica that is not available, the first included. With `wait` only the time bounds them."""
    patience_s: float = 2.0
    """Without `wait`, the sum of waits that a target gets: a person watches, and a replica that asks for more time than
    this (no engine yet) is told of at once."""
    smallest_rest_s: float = 0.05
    """A retry that would have less time than this left is not made."""


@dataclass(slots=True)
class RetryBudget:
    """Retries that all targets of one operation share. A success gives some back."""

    tokens: float
    limit: float
    refund: float = 0.5

    @classmethod
    def for_targets(cls, targets: int) -> RetryBudget:
        """Ten retries, and two a target: a single dead replica uses its attempts up, a dead fleet does not."""
        tokens = 10.0 + 2.0 * targets
        return cls(tokens, tokens)

    def take(self) -> bool:
        """One retry, if there is one left."""
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def succeeded(self) -> None:
        """A call has succeeded."""
        self.tokens = min(self.limit, self.tokens + self.refund)


class Next(Enum):
    """What to do after an answer."""

    DONE = "done"
    """The answer is final."""
    REPEAT = "repeat"
    """Call again with the same request id after the wait."""
    ASK = "ask"
    """Ask the replica for the request id after the wait; call again only if it does not know it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and after how many seconds."""

    next: Next
    after_s: float = 0.0
    why: str = ""
    """With DONE: why there is no further try, for a person; empty when there was nothing to try again."""


@dataclass(slots=True)
class Retries:
    """The tries of one target: feed it each answer, do what it says."""

    policy: RetryPolicy
    budget: RetryBudget
    deadline: float
    """On the caller's monotonic clock; no retry starts after it."""
    wait: bool
    """The operation asked to wait for refusals to end."""
    random: random.Random = field(default_factory=random.SystemRandom)
    retries: int = 0
    _unavailable: int = 0
    _waited_s: float = 0.0

    def after(self, result: fleet_pb2.TargetResult, now: float, retry_after_s: float = 0.0) -> Advice:
        """What to do after this answer; `retry_after_s` is the delay the replica named, 0 when it named none."""
        if result.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED:
            self.budget.succeeded()
            return Advice(Next.DONE)
        if outcome_unknown(result):
            return self._again(Next.ASK, now, retry_after_s, limited=True)
        if result.code == "UNAVAILABLE" and result.reason not in FINAL_UNAVAILABLE:
            return self._again(Next.REPEAT, now, retry_after_s, limited=True)
        if result.code in WAITABLE_REFUSALS and result.reason not in FINAL_REFUSALS and self.wait:
            return self._again(Next.REPEAT, now, retry_after_s, limited=False)
        return Advice(Next.DONE)

    def _again(self, what: Next, now: float, retry_after_s: float, *, limited: bool) -> Advice:
        if limited and not self.wait:
            self._unavailable += 1
            if self._unavailable >= self.policy.unavailable_attempts:
                return Advice(Next.DONE, why="gave up")
        after_s = self._backoff(retry_after_s)
        impatient = limited and not self.wait and what is Next.REPEAT
        if impatient and self._waited_s + after_s > self.policy.patience_s:
            return Advice(Next.DONE, why=f"not tried again within {self.policy.patience_s:g} s; --wait goes on trying")
        if now + after_s + self.policy.smallest_rest_s >= self.deadline:
            return Advice(Next.DONE, why="no time is left for another try")
        if limited and not self.budget.take():
            return Advice(Next.DONE, why="the operation has used up its retries")
        self.retries += 1
        self._waited_s += after_s
        return Advice(what, after_s)

    def _backoff(self, retry_after_s: float) -> float:
        top = min(self.policy.longest_s, self.policy.first_s * self.policy.factor ** min(self.retries, 30))
        # Half of a named delay is spread on top of it: those who were told the same number must not return together.
        return max(self.random.uniform(0.0, top), retry_after_s * self.random.uniform(1.0, 1.5))


def outcome_unknown(result: fleet_pb2.TargetResult) -> bool:
    """Whether the call may have had an effect that its answer does not tell, and a later one may."""
    if result.execution == types_pb2.EXECUTION_NOT_EXECUTED or result.reason in NEVER_TOLD:
        return False
    if result.execution == types_pb2.EXECUTION_UNKNOWN or result.outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN:
        return True
    return result.code == "UNAVAILABLE" and result.reason in TRANSPORT_REASONS
