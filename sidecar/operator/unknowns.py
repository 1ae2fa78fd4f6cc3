"""CacheOperations that ended without knowing what happened at some pod: asked for again until it is known.

As the coordinator does it (`sidecar.coordinator.unknowns`), with the resource as the record: the pod may be back a
minute later and still have the result, so it is asked by request id now and then for an hour after the end. What it
says becomes the target's row, and the phase follows. The status is enough to go on from: the next leader asks on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from datetime import UTC, datetime
from typing import Final

import msgspec
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.attempt import settled
from sidecar.coordinator.pods import PodReplicas
from sidecar.coordinator.port import Aim, Answer, JournalError, Replicas
from sidecar.coordinator.retry import NEVER_TOLD, outcome_unknown
from sidecar.coordinator.unknowns import ASK_EVERY_S, ASK_FOR_S, ASK_TIMEOUT_S
from sidecar.operator import status
from sidecar.operator.ended import EndedTargets
from sidecar.operator.journal import StatusWriter
from sidecar.operator.resource import Resource
from sidecar.operator.run import Surroundings, now
from sidecar.operator.status import Patch

LOG: Final = logging.getLogger(__name__)


class Unknowns:
    """See the module. Belongs to one loop."""

    def __init__(self, around: Surroundings, replicas: Replicas | None = None) -> None:
        self._around = around
        self._replicas = replicas or PodReplicas(around.channels, around.discovery)
        self._open: dict[str, Resource] = {}

    def seen(self, resource: Resource) -> None:
        """A resource is in this state."""
        if resource.finished and _unknown(resource) and _age_s(resource) < ASK_FOR_S:
            self._open[resource.metadata.uid] = resource
        else:
            self._open.pop(resource.metadata.uid, None)
        self._tell()

    def gone(self, uid: str) -> None:
        """A resource was deleted."""
        self._open.pop(uid, None)
        self._tell()

    async def run(self) -> None:
        """Ask for ever, while this process leads."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await self.ask_all()

    async def ask_all(self) -> None:
        """One round."""
        for uid, resource in list(self._open.items()):
            if not self._around.leads():
                break
            if _age_s(resource) >= ASK_FOR_S:
                self._open.pop(uid, None)
                continue
            try:
                await self._ask_for(resource)
            except JournalError as error:
                LOG.warning("%s: what was learned is not on record: %s", resource.key, error)
        self._tell()

    async def _ask_for(self, resource: Resource) -> None:
        ledger = dict(resource.status.ledger or {})
        results = {
            name: at.result
            for name, at in status.recorded(ledger, resource.status.results or ()).items()
            if at.result is not None
        }
        aims = {aim.name: aim for aim in status.aims(ledger, self._around.server_name)}
        names = _unknown(resource)
        answers = await asyncio.gather(
            *(self._ask(aims[name], results[name], resource.status.start_time) for name in names)
        )
        learned = {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}
        if learned:
            await self._record(resource, {**results, **learned}, list(learned))

    async def _ask(self, aim: Aim, row: fleet_pb2.TargetResult, start_time: str) -> fleet_pb2.TargetResult | None:
        """What became of it; None when that is still not known."""
        asked = await self._replicas.ask(aim, row.request_id, ASK_TIMEOUT_S)
        # Only now: while the question was on its way, a successor's records have grown as old as the call was before.
        answer = settled(asked, Answer(row), _seconds_since(start_time))
        if outcome_unknown(answer.result):
            return None
        known = fleet_pb2.TargetResult()
        known.CopyFrom(answer.result)
        known.replica, known.address, known.request_id = row.replica, row.address, row.request_id
        known.attempts, known.wave = row.attempts, row.wave
        return known

    async def _record(self, resource: Resource, results: dict[str, fleet_pb2.TargetResult], learned: list[str]) -> None:
        was = resource.status
        ledger = dict(was.ledger or {})
        for name in learned:
            entry = status.entry_of(results[name], ledger[name].uid)
            entry.unhealthy = ledger[name].unhealthy
            ledger[name] = entry
        incomplete, generation = was.targets_incomplete, resource.metadata.generation
        phase = status.final_phase(results.values(), incomplete=incomplete)
        message = status.summary(phase, list(results.values()), len(ledger))
        told = f"{', '.join(learned[:3])}{', ...' if len(learned) > 3 else ''}: the outcome became known after the end"
        writer = StatusWriter(self._around.api, resource, self._around.leads)
        patch: Patch = {
            **EndedTargets.of(ledger, results.values()).patch(),
            # A merge patch keeps what it does not name: what is no longer so is named.
            "ledger": {name: {"code": "", "reason": "", **msgspec.to_builtins(ledger[name])} for name in learned},
            "phase": phase,
            "message": message,
            "observedGeneration": generation,
            "conditions": status.conditions(phase, message, now(), generation, incomplete, was.conditions),
            "warnings": [*(was.warnings or [])[: status.MAX_WARNINGS - 1], told[: status.MAX_MESSAGE]],
        }
        await writer.write(patch)
        LOG.info("%s: outcome learned: %s", resource.key, ", ".join(learned))
        kind = "Normal" if phase == "Succeeded" else "Warning"
        await self._around.announce(resource, kind, "OutcomeLearned", f"{told}; {message}")

    def _tell(self) -> None:
        self._around.metrics.unknown.set(len(self._open) if self._around.leads() else 0)


def _unknown(resource: Resource) -> list[str]:
    """Targets that may know what is not known here."""
    ledger = resource.status.ledger or {}
    open_ones = [name for name, entry in ledger.items() if entry.outcome == "Unknown" and entry.request_id]
    return [name for name in open_ones if ledger[name].reason not in NEVER_TOLD]


def _age_s(resource: Resource) -> float:
    """Seconds since it ended; beyond all limits when that cannot be read."""
    return _seconds_since(resource.status.completion_time)


def _seconds_since(instant: str) -> float:
    """Without limit when that cannot be read."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(instant)).total_seconds()
    except ValueError:
        return math.inf
