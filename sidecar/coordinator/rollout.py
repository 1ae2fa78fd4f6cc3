"""In which order targets are taken, and when to stop: decisions only, no I/O and no clock of its own.

The caller tells what happened (`finish`, `leave_out`, `observe`, `hold`, `release`, `cancel`) with the time in seconds
of any monotonic clock, and asks `decide` what to do now: which targets to start, whose health to look at, which targets
will never be started and why, and when to ask again if nothing happens before.

A rolling operation goes wave by wave. A target is disrupted from its start until it has been found healthy for
`min_healthy_s`; a failed one has spent the failure allowance instead. A wave holds at most as many targets as
`max_unavailable` leaves room for, and the next wave starts only when nothing of the last is still disrupted. A target
that does not become healthy in time counts as a failure *and* keeps its place among the disrupted, so that a fleet is
never taken below the number its operator allowed. Nothing is watched after the last wave: there is nothing left to
hold back.

What is guaranteed, and tested against a model: at most `max_unavailable` disrupted at once; every target is started
once or dropped once; nothing is started after a cancel or after the failure limit; and if every started target
finishes and every look is answered, the rollout ends.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvctl.v1 import fleet_pb2

DEFAULT_CONCURRENCY: Final = 64
MAX_CONCURRENCY: Final = 1024
"""Calls in flight: each holds a few KiB here, and a container's default of 1,024 file descriptors must do."""


class PolicyError(ValueError):
    """A rollout that makes no sense: `field` names it as the API does, the text says what was expected."""

    def __init__(self, field_name: str, message: str, *, combination: bool = False) -> None:
        super().__init__(message)
        self.field = field_name
        self.combination = combination
        """True when each field is fine alone and they exclude each other."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers a rollout obeys, resolved for its number of targets. Times in seconds."""

    rolling: bool = False
    max_unavailable: int = 1
    """ROLLING: targets disrupted at once, at least 1."""
    canary: int = 0
    """ROLLING: targets done and watched before the rest. More than `max_unavailable` take several waves."""
    min_healthy_s: float = 0.0
    """How long each target of a wave must be seen healthy before the next wave. 0: one good look."""
    max_failures: int = 0
    """Failures after which nothing more is started. 0: no limit."""
    concurrency: int = DEFAULT_CONCURRENCY
    settle_s: float = 60.0
    """How long beyond `min_healthy_s` a target may take to become healthy before it counts as a failure."""
    look_every_s: float = 0.5

    @classmethod
    def resolve(cls, rollout: fleet_pb2.Rollout, targets: int) -> Policy:
        """The policy for so many targets; PolicyError names the field that makes no sense."""
        if rollout.strategy not in fleet_pb2.RolloutStrategy.values():
            raise PolicyError("strategy", f"strategy {rollout.strategy} is unknown; expected ALL_AT_ONCE or ROLLING")
        for name in ("canary", "max_failures", "concurrency"):
            if getattr(rollout, name) < 0:
                raise PolicyError(name, f"{name} is {getattr(rollout, name)}; expected 0 or more")
        concurrency = rollout.concurrency or DEFAULT_CONCURRENCY
        if concurrency > MAX_CONCURRENCY:
            raise PolicyError("concurrency", f"concurrency is {concurrency}; at most {MAX_CONCURRENCY} calls fit")
        healthy = rollout.min_healthy_time.seconds + rollout.min_healthy_time.nanos / 1e9
        if healthy < 0:
            raise PolicyError("min_healthy_time", f"min_healthy_time is {healthy:g} s; expected 0 or more")
        if rollout.strategy != fleet_pb2.ROLLOUT_STRATEGY_ROLLING:
            given = [n for n in ("max_unavailable", "canary") if getattr(rollout, n)]
            if given or healthy:
                name = given[0] if given else "min_healthy_time"
                raise PolicyError(name, f"{name} needs strategy ROLLING; ALL_AT_ONCE has no waves", combination=True)
            return cls(max_failures=rollout.max_failures, concurrency=concurrency)
        return cls(
            rolling=True,
            max_unavailable=_share(rollout.max_unavailable or "1", targets),
            canary=rollout.canary,
            min_healthy_s=healthy,
            max_failures=rollout.max_failures or 1,
            concurrency=concurrency,
        )


def _share(text: str, targets: int) -> int:
    """A count ("2") or a share of the targets ("25%", rounded down), at least 1."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(%?)\s*", text, re.ASCII)
    if not match or not int(match[1]) or (match[2] and int(match[1]) > 100):
        what = 'a count of at least 1 ("2") or a share of 1% to 100% ("25%")'
        raise PolicyError("max_unavailable", f"max_unavailable is {text!r}; expected {what}")
    return int(match[1]) if not match[2] else max(1, targets * int(match[1]) // 100)


class Ending(Enum):
    """Why a target was never started."""

    CANCELLED = "cancelled"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Drop:
    """A target that will never be started."""

    target: str
    ending: Ending
    why: str
    """One sentence for a person."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    start: tuple[str, ...] = ()
    wave: int = 0
    """Wave that `start` belongs to."""
    look: tuple[str, ...] = ()
    """Targets whose health to look at; each look must be answered by `observe`."""
    drop: tuple[Drop, ...] = ()
    wake_at: float | None = None
    """Ask again then if nothing happens before. None: only an event changes anything."""
    held: bool = False
    """True when a target would start if the rollout were not held."""
    finished: bool = False
    """Every target has ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is on record of a target that was started before a crash."""

    wave: int
    succeeded: bool | None
    """None: its call may still be under way; the caller finishes it."""
    unhealthy: str = ""
    """Why it did not become healthy in time, when that was found."""


@dataclass(slots=True)
class _Watch:
    """A target that has succeeded and is not known healthy yet."""

    next_look: float
    limit: float | None = None
    """When it counts as not healthy; set when the looking begins, which is when the whole wave has ended."""
    healthy_since: float | None = None
    looked: bool = False
    """Whether a look has been answered."""
    looking: bool = False
    why: str = "its health could not be looked at"


@dataclass(slots=True)
class _Wave:
    number: int = -1
    canary: bool = False
    queue: deque[str] = field(default_factory=deque)
    watched: dict[str, _Watch] = field(default_factory=dict)


class Rollout:
    """One operation's way over its targets. Not thread-safe; names are unique."""

    def __init__(
        self, policy: Policy, targets: Sequence[str], now: float, progress: Mapping[str, Progress] | None = None
    ) -> None:
        """Start afresh, or go on after what `progress` says was started already.

        After a crash the waves that were begun count as formed: the rest of them goes into the next one. What had
        succeeded in the last wave is watched again from `now`.
        """
        progress = progress or {}
        self.policy = policy
        self.stopped: str = ""
        """Why nothing more is started; empty while it goes on."""
        self._ending = Ending.STOPPED
        self.held = False
        self._waiting = deque(name for name in targets if name not in progress)
        self._running = {name for name, at in progress.items() if at.succeeded is None}
        self._canary_left = max(0, policy.canary - len(progress))
        self._failures = 0
        self.unhealthy: dict[str, str] = {name: at.unhealthy for name, at in progress.items() if at.unhealthy}
        """Targets that did not become healthy in time, and what was seen."""
        self._wave = _Wave(number=max((at.wave for at in progress.values()), default=-1))
        for name, at in progress.items():
            if at.succeeded is False or at.unhealthy:
                self._count_failure(name, at.unhealthy or "failed")
            elif at.succeeded and at.wave == self._wave.number:
                self._watch(name, now)

    # --- what happened -------------------------------------------------------------------------------------------

    def finish(self, target: str, *, succeeded: bool, now: float, why: str = "failed") -> None:
        """A started target's call has ended for good."""
        if target not in self._running:
            raise ValueError(f"target {target!r} is not under way")
        self._running.discard(target)
        if succeeded:
            self._watch(target, now)
            return
        self._count_failure(target, why)

    def leave_out(self, target: str) -> None:
        """A started target was not called after all, for it is no replica any more: it counts neither way, and another
        one takes its turn as a canary.
        """
        if target not in self._running:
            raise ValueError(f"target {target!r} is not under way")
        self._running.discard(target)
        if self._wave.canary:
            self._canary_left += 1

    def observe(self, target: str, *, healthy: bool, now: float, why: str = "") -> None:
        """What a look at a target's health has found."""
        watch = self._wave.watched.get(target)
        if watch is None:
            return
        watch.looking, watch.looked = False, True
        watch.next_look = now + self.policy.look_every_s
        if not healthy:
            watch.healthy_since = None
            watch.why = why or watch.why
            return
        if watch.healthy_since is None:
            watch.healthy_since = now
        if now - watch.healthy_since >= self.policy.min_healthy_s:
            del self._wave.watched[target]
            return
        watch.next_look = min(watch.next_look, watch.healthy_since + self.policy.min_healthy_s)

    def hold(self) -> None:
        """Start nothing until `release`."""
        self.held = True

    def release(self) -> None:
        """Go on."""
        self.held = False

    def cancel(self, why: str = "the operation was cancelled before this target's turn") -> None:
        """Start nothing more; what is under way finishes."""
        if not self.stopped:
            self._ending = Ending.CANCELLED
            self.stopped = why

    def stop(self, why: str) -> None:
        """Start nothing more for a reason other than a cancel."""
        if not self.stopped:
            self.stopped = why

    # --- what to do ----------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        """What to do at `now`. Targets in `start` are under way from here on; call again after every event."""
        self._give_up_on_unhealthy(now)
        if self.stopped:
            return self._drain()
        if not self._wave.queue and not self._running and self._waiting:
            look, wake_at = self._looks(now)
            if self._wave.watched:
                return Decision(look=look, wake_at=wake_at, wave=self._wave.number)
            if self.held:
                return Decision(held=True)
            self._next_wave()
            if self.stopped:
                return self._drain()
        if self._wave.queue and self.held:
            return Decision(held=True)
        start = []
        while self._wave.queue and len(self._running) < self.policy.concurrency:
            name = self._wave.queue.popleft()
            self._running.add(name)
            start.append(name)
        finished = not (start or self._wave.queue or self._running or self._waiting)
        return Decision(start=tuple(start), wave=self._wave.number, finished=finished)

    def waits(self) -> dict[str, bool]:
        """Targets whose health the next wave waits for -> whether it is good, and not for long enough yet. One that was
        not looked at yet is left out.
        """
        if self.stopped or self._running or self._wave.queue or not self._waiting:
            return {}
        watched = self._wave.watched.items()
        return {name: watch.healthy_since is not None for name, watch in watched if watch.looked}

    def wait(self, target: str, now: float) -> str:
        """What is seen of one of them, as one sentence for a person."""
        watch = self._wave.watched[target]
        if watch.healthy_since is not None:
            wanted, been = self.policy.min_healthy_s, now - watch.healthy_since
            return f"waiting for it to stay healthy for {wanted:g} s: healthy for {been:.0f} s"
        left = "" if watch.limit is None else f" ({max(0.0, watch.limit - now):.0f} s left)"
        return f"waiting for it to be healthy{left}: {watch.why}"

    @property
    def disrupted(self) -> set[str]:
        """Targets under way, not yet known healthy, or found unhealthy."""
        return self._running | set(self._wave.watched) | set(self.unhealthy)

    # --- inside --------------------------------------------------------------------------------------------------

    def _watch(self, target: str, now: float) -> None:
        if self.policy.rolling:
            self._wave.watched[target] = _Watch(next_look=now)

    def _count_failure(self, target: str, why: str) -> None:
        self._failures += 1
        if self.policy.max_failures and self._failures >= self.policy.max_failures:
            self.stop(f"the rollout stopped after {self._failures} failed target(s), the last one {target}: {why}")

    def _looks(self, now: float) -> tuple[tuple[str, ...], float | None]:
        due = []
        wake_at: float | None = None
        for name, watch in self._wave.watched.items():
            if watch.limit is None:
                watch.limit = now + self.policy.min_healthy_s + self.policy.settle_s
            if watch.looking:
                continue
            if watch.next_look <= now:
                watch.looking = True
                due.append(name)
                continue
            soonest = min(watch.next_look, watch.limit)
            wake_at = soonest if wake_at is None else min(wake_at, soonest)
        return tuple(due), wake_at

    def _give_up_on_unhealthy(self, now: float) -> None:
        if self._running or self._wave.queue or not self._waiting:
            return
        watched = self._wave.watched.items()
        late = [name for name, at in watched if not at.looking and at.limit is not None and at.limit <= now]
        for name in late:
            why = f"not healthy within {self.policy.settle_s:g} s: {self._wave.watched.pop(name).why}"
            self.unhealthy[name] = why
            self._count_failure(name, why)

    def _next_wave(self) -> None:
        if not self.policy.rolling:
            self._wave.number = 0
            self._wave.queue, self._waiting = self._waiting, deque()
            return
        room = self.policy.max_unavailable - len(self.unhealthy)
        if room < 1:
            found = "; ".join(f"{name} {why}" for name, why in sorted(self.unhealthy.items())[:3])
            self.stop(f"the rollout stopped: max_unavailable is {self.policy.max_unavailable}, and {found}")
            return
        self._wave.canary = self._canary_left > 0
        size = min(room, self._canary_left) if self._canary_left else room
        self._canary_left = max(0, self._canary_left - size)
        self._wave.number += 1
        while self._waiting and len(self._wave.queue) < size:
            self._wave.queue.append(self._waiting.popleft())

    def _drain(self) -> Decision:
        names = [*self._wave.queue, *self._waiting]
        self._wave.queue.clear()
        self._waiting.clear()
        drops = tuple(Drop(name, self._ending, self.stopped) for name in names)
        return Decision(drop=drops, wave=max(0, self._wave.number), finished=not self._running)
