"""Replicas that are pods: none is spoken to in the name of another one.

A pod that goes gives its address back, and the next pod may get it while an operation still has the address in its
plan: in a later wave, or when it goes on after whoever runs it was away. The plan has the uid of each pod, so before
each call the pod is looked up among those that discovery has now, which costs nothing while its watch is current; one
that is on its way out is not called any more than one that is gone. A sidecar that tells the uid of its pod (the
manifests have it do so) is told apart also when the watch is a moment behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import outcomes, resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery, DiscoveryError
from sidecar.coordinator.discovery.kube_rows import TERMINATING
from sidecar.coordinator.fanout import GrpcReplicas
from sidecar.coordinator.outcomes import Failure
from sidecar.coordinator.port import Aim, Answer, Asked, Health
from sidecar.coordinator.targets import Target


@dataclass(frozen=True, slots=True)
class Pods:
    """Which pod is where, by one look at discovery."""

    uids: frozenset[str]
    owners: Mapping[str, Target]
    """Address -> the ready pod that has it now."""
    terminating: frozenset[str] = frozenset()
    """Uids of pods that are being deleted."""

    @classmethod
    def of(cls, targets: Iterable[Target]) -> Pods:
        """Of all targets there are."""
        found = tuple(targets)
        return cls(
            frozenset(target.identity for target in found),
            {target.address: target for target in found if not target.not_ready},
            frozenset(target.identity for target in found if target.not_ready == TERMINATING),
        )

    def replaced(self, aim: Aim) -> str:
        """Why the pod that is meant is not at its address any more; empty when it is, or has no uid."""
        if not aim.identity:
            return ""
        who = f"the pod {aim.name} (uid {aim.identity[:8]})"
        if aim.identity not in self.uids:
            return f"{who} is gone, or no longer one of the replicas; its address {aim.address} may be another pod's"
        owner = self.owners.get(aim.address)
        if owner is not None and owner.identity not in ("", aim.identity):
            return f"{who} has left its address {aim.address}, which the pod {owner.name} has now"
        return ""

    def leaving(self, aim: Aim) -> str:
        """Why a call that has not begun is not begun any more; empty when nothing speaks against it."""
        return self.replaced(aim) or (TERMINATING if aim.identity and aim.identity in self.terminating else "")


class PodReplicas(GrpcReplicas):
    """Replicas reached through channels, each looked up by its pod's uid before it is called or asked."""

    def __init__(
        self,
        channels: Channels,
        discovery: Discovery,
        identities: Mapping[str, types_pb2.ReplicaInfo] | None = None,
        unnamed: Mapping[str, Failure] | None = None,
        named_in_s: float = 0.0,
    ) -> None:
        """As GrpcReplicas. `discovery`: asked before each call to a pod, so it should be kept current."""
        super().__init__(channels, identities, unnamed, named_in_s)
        self._discovery = discovery
        self._seen: tuple[Target, ...] | None = None
        self._pods = Pods.of(())

    async def identify(self, aim: Aim, timeout_s: float) -> str | Answer:
        """As GrpcReplicas; a pod that is gone, or has become another one, is not called."""
        started = time.monotonic()
        try:
            why = (await self._look(aim, timeout_s)).leaving(aim)
        except DiscoveryError as error:
            text = f"not called, because it cannot be told whether its pod is still there: {error}"
            return Answer(outcomes.of_failure(Failure("UNAVAILABLE", outcomes.REPLICA_UNREACHABLE, text), sent=False))
        if why:
            return Answer(resolution.skipped(aim.name, aim.address, outcomes.TARGET_NOT_READY, f"not called: {why}"))
        return await super().identify(aim, _left_s(started, timeout_s))

    async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
        """As GrpcReplicas; a pod that is gone cannot be asked, and another one has nothing to say for it."""
        started = time.monotonic()
        why = await self._doubt(aim, timeout_s)
        if not why:
            return await super().ask(aim, request_id, _left_s(started, timeout_s))
        lost = fleet_pb2.TargetResult(
            outcome=fleet_pb2.TARGET_OUTCOME_UNKNOWN,
            code="UNAVAILABLE",
            reason=outcomes.OUTCOME_UNKNOWN,
            message=f"it cannot be asked whether the call was executed: {why}",
            execution=types_pb2.EXECUTION_UNKNOWN,
        )
        return Asked(None, Answer(lost))

    async def health(self, aim: Aim, spec: fleet_pb2.OperationSpec, timeout_s: float) -> Health:
        """As GrpcReplicas; how another pod is says nothing."""
        started = time.monotonic()
        why = await self._doubt(aim, timeout_s)
        return Health(False, why) if why else await super().health(aim, spec, _left_s(started, timeout_s))

    async def _doubt(self, aim: Aim, timeout_s: float) -> str:
        """Why it may not be the pod that is meant that would answer; empty when it is."""
        try:
            return (await self._look(aim, timeout_s)).replaced(aim)
        except DiscoveryError as error:
            return f"it cannot be told whether its pod is still there: {error}"

    async def _look(self, aim: Aim, timeout_s: float) -> Pods:
        """The pods there are now, as far as this target needs them. DiscoveryError when nothing can be said."""
        if not aim.identity:
            return self._pods
        try:
            async with asyncio.timeout(timeout_s):
                discovered = await self._discovery.targets()
        except TimeoutError as error:
            raise DiscoveryError(f"{self._discovery.describe()}: no answer within {timeout_s:.1f} s") from error
        found = discovered.targets
        if found is not self._seen:
            self._seen, self._pods = found, Pods.of(found)
        if discovered.incomplete and aim.identity not in self._pods.uids:
            # It may be among those that could not be seen.
            raise DiscoveryError("; ".join(discovered.warnings) or f"{self._discovery.describe()}: incomplete")
        return self._pods


def _left_s(started: float, timeout_s: float) -> float:
    return max(timeout_s - (time.monotonic() - started), 0.001)
