"""A weight update of a whole fleet as one transaction.

Pause every engine, let the caller transfer the weights, say that they are whole, reset every tier, resume. What the
engines do when the caller dies in the middle is decided by how far it came: before the weights are whole they may be
half written, so an engine whose lease ends resets and stays paused (unless the caller chose otherwise); afterwards it
resets and resumes by itself. A replica that is lost on the way is left behind and named; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol

from kvctl.v1 import replica_pb2, types_pb2

from sidecar.client import arguments
from sidecar.client.errors import FleetFailed, KvctlError
from sidecar.client.leases import Lease
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.port import Aim

Abandon = Literal["stay_paused", "resume"]

DEFAULT_LEASE_S: Final = 30.0
DEFAULT_STEP_TIMEOUT_S: Final = 60.0
LONGEST_PAUSE_S: Final = 10.0
"""For the pause, where that is less than the step's own time: a healthy engine needs one step and its transfers, and as
long as one that hangs is waited for, all others stand still.
"""
LEAST_LEASE_S: Final = 1.0
LONGEST_LEASE_S: Final = 600.0
LONGEST_WEIGHT_VERSION: Final = 256
"""Characters. As the sidecars have these: what they would refuse after the transfer is refused before it."""

_POLICIES: Final = {
    "stay_paused": replica_pb2.ABANDON_POLICY_STAY_PAUSED,
    "resume": replica_pb2.ABANDON_POLICY_RESUME,
}
_RUNNING: Final = {
    "keep": types_pb2.RUNNING_REQUESTS_KEEP,
    "preempt": types_pb2.RUNNING_REQUESTS_PREEMPT,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How a weight update goes. Times in seconds."""

    weight_version: str = ""
    """Recorded at every engine that resumes; shown by admission."""
    lease_s: float = DEFAULT_LEASE_S
    """How long an engine waits for a client it no longer hears, 1 s to 600 s."""
    on_abandon: Abandon = "stay_paused"
    running_requests: Literal["keep", "preempt"] = "keep"
    """keep: they go on with KV of the old weights, which never enters the cache. preempt: computed again."""
    require_all: bool = False
    """True: a replica that cannot be paused ends the update before it begins; nothing has changed then."""
    step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S
    """For each of reset and resume, and for the pause up to LONGEST_PAUSE_S."""

    def __post_init__(self) -> None:
        arguments.text("weight_version", self.weight_version, longest=LONGEST_WEIGHT_VERSION)
        arguments.seconds("lease_s", self.lease_s, LEAST_LEASE_S, LONGEST_LEASE_S)
        arguments.one_of("on_abandon", self.on_abandon, _POLICIES)
        arguments.one_of("running_requests", self.running_requests, _RUNNING)
        arguments.flag("require_all", self.require_all)
        arguments.timeout("step_timeout_s", self.step_timeout_s)


class PausableFleet(Protocol):
    """What an update needs to begin: who takes part, and how they are reached."""

    async def taking_part(self) -> tuple[Sequence[Aim], Mapping[str, KvctlError], Channels]:
        """Replicas to pause, those that cannot take part and why, and the open channels."""
        ...


class WeightUpdate:
    """Use as `async with`. Inside the block every engine of `replicas` is paused, and stays so until it ends."""

    def __init__(self, fleet: PausableFleet, plan: UpdatePlan) -> None:
        self._fleet = fleet
        self._plan = plan
        self._leases: list[Lease] = []
        self._absent: dict[str, KvctlError] = {}
        self.update_id = str(uuid.uuid4())

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of replicas that take part and are not lost so far: transfer weights to these."""
        return tuple(lease.aim.name for lease in self._leases if lease.held)

    @property
    def addresses(self) -> Mapping[str, str]:
        """Their sidecars' addresses, by name."""
        return {lease.aim.name: lease.aim.address for lease in self._leases if lease.held}

    @property
    def lost(self) -> Mapping[str, KvctlError]:
        """Replicas that do not take part or were lost on the way, and why."""
        return {**self._absent, **{each.aim.name: each.error for each in self._leases if each.error is not None}}

    def raise_for_failures(self) -> None:
        """FleetFailed when any replica was lost. Call it after the block."""
        if lost := self.lost:
            raise FleetFailed(_sentence(lost, len(self._leases) + len(self._absent)), tuple(lost.values()))

    async def __aenter__(self) -> WeightUpdate:
        aims, absent, channels = await self._fleet.taking_part()
        self._absent = dict(absent)
        self._leases = [Lease(aim, self.update_id, channels, self._plan.lease_s) for aim in aims]
        policy = _POLICIES[self._plan.on_abandon]
        try:
            await self._each(lambda lease: lease.pause(policy, self._pause_timeout_s))
        except BaseException:
            await self._give_back()
            raise
        if not self.replicas or (self._plan.require_all and self.lost):
            await self._give_back()
            failures = dict(self.lost)
            doubtful = any(lease.in_doubt for lease in self._leases)
            others = "every engine that is known not to be paused" if doubtful else "every engine"
            raise FleetFailed(
                f"the weight update did not begin, {others} goes on as before: "
                f"{_sentence(failures, len(self._leases) + len(self._absent))}",
                tuple(failures.values()),
            )
        self._tell_lost("could not be paused and does not take part")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self._abandon()
            return
        known = set(self.lost)
        timeout_s = self._plan.step_timeout_s
        request = self._reset_request()

        async def finish(lease: Lease) -> None:
            # One replica's steps wait for each other and for nobody else's: a lost one keeps no other paused.
            if lease.in_doubt:
                await lease.take_back(self._pause_timeout_s)
            await lease.complete(min(timeout_s, self._plan.lease_s))
            await lease.reset(request, timeout_s)
            await lease.resume(self._plan.weight_version, timeout_s)

        try:
            await self._each(finish)
        finally:
            await self._each(lambda lease: lease.close())
        self._tell_lost("was lost on the way", apart_from=known)
        if not self.replicas:
            self.raise_for_failures()

    async def _abandon(self) -> None:
        """The body raised: the weights may be half written."""
        then = "resume" if self._plan.on_abandon == "resume" else "stay paused (verdict PAUSED, ABANDONED_UPDATE)"
        _log.error("weight update %s was abandoned: %d replicas reset and %s", self.update_id, len(self.replicas), then)
        try:
            # One that cannot be told finds out by itself when its lease runs out.
            await self._each(self._end_or_take_back)
        finally:
            await self._each(lambda lease: lease.close())

    async def _end_or_take_back(self, lease: Lease) -> None:
        if lease.in_doubt:
            await lease.take_back(self._pause_timeout_s)
        await lease.abandon(min(self._plan.step_timeout_s, self._plan.lease_s))

    async def _give_back(self) -> None:
        """Nothing was transferred: resume whoever was paused, and whoever may be."""

        async def resume(lease: Lease) -> None:
            await lease.take_back(self._plan.step_timeout_s if lease.paused else self._pause_timeout_s)

        try:
            await self._each(resume)
        finally:
            await self._each(lambda lease: lease.close())

    async def _each(self, step: Callable[[Lease], Awaitable[None]]) -> None:
        """A step at every replica that still takes part, at once: a slow one delays no other. What one raises comes
        once all have ended, so that none goes on behind the caller's back.
        """
        ended = await asyncio.gather(*(step(lease) for lease in self._leases), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    @property
    def _pause_timeout_s(self) -> float:
        """For a pause, and for taking back one of which is not known whether it holds."""
        return min(self._plan.step_timeout_s, LONGEST_PAUSE_S)

    def _reset_request(self) -> replica_pb2.ResetPrefixCacheRequest:
        keep = self._plan.running_requests == "keep"
        return replica_pb2.ResetPrefixCacheRequest(
            running_requests=_RUNNING[self._plan.running_requests],
            quarantine_running=keep,
            reset_connector=True,
            reset_mm_cache=True,
            reset_encoder_cache=True,
            purpose=types_pb2.PURPOSE_WEIGHT_UPDATE,
        )

    def _tell_lost(self, how: str, apart_from: set[str] | None = None) -> None:
        for name, error in self.lost.items():
            if name not in (apart_from or ()):
                _log.warning("weight update %s: replica %s %s: %s", self.update_id, name, how, error)


def _sentence(lost: Mapping[str, KvctlError], total: int) -> str:
    shown = "; ".join(str(error) for error in list(lost.values())[:3])
    return f"{len(lost)} of {total} replicas were lost: {shown}{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}"
