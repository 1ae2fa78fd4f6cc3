"""One CacheOperation from what the API server has of it to its end.

Three beginnings, one way: a new resource is resolved and its plan (every target with its pod uid and address) goes on
record before anything is called; one with a plan goes on from it, over the very same targets; one that cannot mean
anything ends as Failed with one sentence. The rest is the coordinator's own execution with the resource as its journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec
from kvctl.v1 import fleet_pb2

from sidecar.coordinator import resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery, DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api
from sidecar.coordinator.execution import Execution
from sidecar.coordinator.metrics import CoordinatorMetrics
from sidecar.coordinator.pods import PodReplicas
from sidecar.coordinator.port import JournalError
from sidecar.coordinator.rollout import Policy, PolicyError
from sidecar.coordinator.selectors import SelectorError, read_targets
from sidecar.operator import status
from sidecar.operator.ended import EndedTargets
from sidecar.operator.journal import ResourceJournal, StatusWriter
from sidecar.operator.plan import Plan, bounded, new_plan, plan_on_record
from sidecar.operator.resource import Condition, Phase, Resource, Unreadable, operation_id, operation_spec
from sidecar.operator.status import Patch

LOG: Final = logging.getLogger(__name__)

_DISCOVERY_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0)
_STORE_RETRIES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)


class NotToRun(Exception):  # noqa: N818 - an ending, read as a sentence
    """The operation ends without calling anybody. The text is for a person."""

    def __init__(self, phase: Phase, reason: str, message: str) -> None:
        """`reason`: CamelCase, for the event."""
        super().__init__(message)
        self.phase: Phase = phase
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every run of one operator shares."""

    api: Api
    discovery: Discovery
    channels: Channels
    metrics: CoordinatorMetrics
    announce: Callable[[Resource, str, str, str], Awaitable[None]]
    """Post an event: resource, "Normal" or "Warning", reason, message."""
    leads: Callable[[], bool]
    """Whether this process holds the lease now."""
    server_name: str = ""
    """Name expected in the sidecars' certificates."""


def now() -> str:
    """The time for people, RFC 3339."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Run:
    """One run. `admit` is asked once the targets are known; it may raise NotToRun, or wait and say so (True)."""

    def __init__(self, resource: Resource, around: Surroundings, admit: Callable[[Run], Awaitable[bool]]) -> None:
        self.resource = resource
        self.plan: Plan | None = None
        self.execution: Execution | None = None
        self.admitted = False
        """Whether the concurrency policy has let it in."""
        self.turn = 0
        """Grows in the order in which runs are let in; 0 for one that was let in before this process led."""
        self.done = asyncio.Event()
        """Set when it has ended here, whatever the reason."""
        self._around = around
        self._admit = admit
        self._writer = StatusWriter(around.api, resource, around.leads)
        self._replicas: PodReplicas | None = None
        self._cancelled = ""
        self._cancelling = asyncio.Event()
        self._held = False
        self._shown: str = resource.status.phase
        """The phase that was written last, of Running and Suspended."""
        self._waits_for = ""
        """Whom or what the status says that it waits for."""
        self._conditions_shown = resource.status.conditions or []
        self._health: dict[str, str] = {}
        """Targets whose health the next wave waits for, and how it is."""
        self._telling: asyncio.Task[None] | None = None
        self._ending = False
        """Whether the end is being written: nothing may write another phase after it."""

    @property
    def ended(self) -> bool:
        """Whether it has ended here."""
        return self.done.is_set()

    # --- from outside --------------------------------------------------------------------------------------------

    async def cancel(self, why: str, *, gone: bool = False) -> None:
        """Start no further target and take back what has had no effect yet. `gone`: nothing can be recorded."""
        self._cancelled = why
        self._cancelling.set()
        if gone:
            self._writer.detach(why)
        if self.execution is not None:
            self.execution.cancel(why)
        if self._replicas is not None:
            await self._replicas.withdraw()

    async def hold(self, held: bool) -> None:
        """Suspend, or go on; shown in the phase."""
        if held == self._held:
            return
        self._held = held
        if self.execution is None:
            return
        if held:
            self.execution.hold()
        else:
            self.execution.release()
        await self._show_hold()

    async def _show_hold(self) -> None:
        phase = "Suspended" if self._held else "Running"
        if phase != self._shown and not self._ending:
            self._shown = phase
            await self._try_write({"phase": phase, **self._generation()})

    async def outlast(self, others: Sequence[Run]) -> None:
        """Return when all of these have ended, or this one is cancelled."""

        async def all_ended() -> None:
            for other in others:
                await other.done.wait()

        async def cancelled() -> None:
            await self._cancelling.wait()

        waits = [asyncio.create_task(all_ended()), asyncio.create_task(cancelled())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def wait_for(self, reason: str, message: str) -> None:
        """Show that it has not begun. `reason`: CamelCase; `message` says whom or what it waits for."""
        if message == self._waits_for:
            return
        patch: Patch = {
            **self._generation(),
            "operation": self.resource.spec.shown_as,
            "phase": "Pending",
            "message": message[: status.MAX_MESSAGE],
            "conditions": self._conditions("Pending", message, reason),
        }
        if await self._try_write(patch):
            self._waits_for = message

    async def go(self) -> Phase | None:
        """Run to the end. None when it did not end here: the resource is gone, or another process leads."""
        try:
            return await self._to_an_end()
        except JournalError as error:
            LOG.warning("%s: %s", self.resource.key, error)
            return None
        finally:
            self.done.set()

    async def _to_an_end(self) -> Phase | None:
        try:
            return await self._go()
        except NotToRun as ending:
            await self._finish(ending.phase, str(ending), reason=ending.reason)
            return ending.phase

    # --- the way -------------------------------------------------------------------------------------------------

    async def _go(self) -> Phase | None:
        resource, spec = self.resource, self._asked()
        resumed = self.admitted = bool(resource.status.operation_id)
        self._held = self._held or resource.spec.suspend
        if resumed:
            self.plan = plan = plan_on_record(resource.status, self._around.server_name)
        else:
            plan = await self._admitted_plan(spec)
        journal = ResourceJournal(self._writer, plan.ledger, plan.results)
        if not resumed:
            await self._put_plan_on_record(plan, journal)
        self._replicas = PodReplicas(self._around.channels, self._around.discovery)
        identity = operation_id(resource.metadata.uid, resource.spec.step)
        self.execution = Execution(
            identity,
            spec,
            plan.aims,
            self._replicas,
            journal=journal,
            recorded=plan.recorded,
            on_change=self._changed,
            on_health=self._health_changed,
            most_calls=self._around.channels.limit,
        )
        if resource.spec.cancel or self._cancelled:
            self.execution.cancel(self._cancelled or "the CacheOperation was cancelled")
        if self._held:
            self.execution.hold()
        await self._show_hold()  # what is on record may be older than a word that came while nobody ran it
        LOG.info("%s: %s over %d targets%s", resource.key, spec, len(plan.aims), ", resumed" if resumed else "")
        await self.execution.run()
        if self._writer.detached:
            return None
        results = {**plan.results, **self.execution.results}
        plan.warnings.extend(self.execution.warnings)
        phase = status.final_phase(results.values(), incomplete=plan.incomplete)
        message = status.summary(phase, list(results.values()), len(plan.ledger))
        await self._finish(phase, message, shown=journal.shown())
        self._around.metrics.operation_ended(_ended(spec, phase))
        return phase

    def _asked(self) -> fleet_pb2.OperationSpec:
        if isinstance(self.resource, Unreadable):
            raise NotToRun("Failed", "InvalidSpec", self.resource.why)
        try:
            asked = operation_spec(self.resource.spec)
            Policy.resolve(asked.rollout, 1)
        except ValueError as error:
            raise NotToRun("Failed", "InvalidSpec", str(error)) from error
        return asked

    async def _admitted_plan(self, spec: fleet_pb2.OperationSpec) -> Plan:
        """The targets there are when its turn has come: what was seen before a wait may be minutes old."""
        waited = True
        while waited:
            self.plan = plan = await self._new_plan(spec)
            if self.resource.spec.cancel or self._cancelled:
                raise NotToRun("Cancelled", "Cancelled", self._cancelled or "cancelled before it was started")
            waited = await self._admit(self)
        return plan

    async def _new_plan(self, spec: fleet_pb2.OperationSpec) -> Plan:
        made = new_plan(await self._resolve(spec), now())
        if len(made.ledger) > status.MAX_TARGETS:
            raise NotToRun(
                "Failed",
                "TooManyTargets",
                f"{len(made.ledger)} targets; one CacheOperation holds {status.MAX_TARGETS}: split it by a selector",
            )
        return made

    async def _resolve(self, spec: fleet_pb2.OperationSpec) -> resolution.Resolved:
        """Discovery in trouble is waited for, a selection that means nothing is an ending."""
        attempt = 0
        while True:
            try:
                selection = read_targets(spec.targets)
                discovered = await self._around.discovery.targets()
                return await resolution.resolve(selection, discovered, self._around.channels)
            except (SelectorError, PolicyError) as error:
                raise NotToRun("Failed", "InvalidSpec", str(error)) from error
            except DiscoveryError as error:
                if self._cancelled:
                    raise NotToRun("Cancelled", "Cancelled", self._cancelled) from error
                await self.wait_for("DiscoveryFailed", str(error))
                await asyncio.sleep(_DISCOVERY_BACKOFF_S[min(attempt, len(_DISCOVERY_BACKOFF_S) - 1)])
                attempt += 1

    async def _put_plan_on_record(self, plan: Plan, journal: ResourceJournal) -> None:
        phase: Phase = "Suspended" if self._held else "Running"
        self._shown = phase
        message = f"{len(plan.aims)} targets"
        await self._writer.write(
            {
                **self._generation(),
                "operationId": operation_id(self.resource.metadata.uid, self.resource.spec.step),
                "operation": self.resource.spec.shown_as,
                "phase": phase,
                "message": message,
                **plan.patch(),
                "conditions": self._conditions(phase, message),
                **journal.shown(),
            }
        )
        await self._announce("Normal", "Started", f"{self.resource.spec.shown_as} of {message}")

    async def _finish(
        self,
        phase: Phase,
        message: str,
        *,
        reason: str = "",
        shown: Patch | None = None,
    ) -> None:
        self._ending = True
        patch: Patch = {
            **self._generation(),
            "operation": self.resource.spec.shown_as,
            "phase": phase,
            "message": message[: status.MAX_MESSAGE],
            "completionTime": now(),
            "conditions": self._conditions(phase, message),
            **(shown if shown is not None else EndedTargets(0).patch()),
        }
        if self.plan:
            patch["warnings"] = bounded(self.plan.warnings)
        for wait_s in (*_STORE_RETRIES_S, None):
            try:
                await self._writer.write(patch)
                break
            except JournalError as error:
                # The end must be on record, or a restart would run nothing and still never end.
                if wait_s is None or self._writer.detached:
                    raise
                LOG.warning("%s: the end is not on record yet: %s", self.resource.key, error)
                await asyncio.sleep(wait_s)
        kind = "Normal" if phase == "Succeeded" else "Warning"
        await self._announce(kind, reason or phase, message)

    # --- inside --------------------------------------------------------------------------------------------------

    def _generation(self) -> Patch:
        return {"observedGeneration": self.resource.metadata.generation}

    def _conditions(self, phase: Phase, message: str, reason: str = "") -> list[status.Json]:
        incomplete = self.plan.incomplete if self.plan else None
        generation, was = self.resource.metadata.generation, self._conditions_shown
        told = status.conditions(phase, message, now(), generation, incomplete, was, reason)
        self._conditions_shown = msgspec.convert(told, type=list[Condition])
        return told

    def _changed(self, row: fleet_pb2.TargetResult) -> None:
        if row.outcome != fleet_pb2.TARGET_OUTCOME_RUNNING and self.execution is not None:
            operation = fleet_pb2.FleetOperation(spec=self.execution.spec)
            self._around.metrics.target_ended(operation, row)

    def _health_changed(self, row: fleet_pb2.TargetResult) -> None:
        """What the next wave waits for is the message while it does."""
        if row.health:
            self._health[row.replica] = row.health
        else:
            self._health.pop(row.replica, None)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_health())

    async def _tell_health(self) -> None:
        told: dict[str, str] | None = None
        while told != self._health and not self._ending:
            told = dict(self._health)
            first = next((f"{name}: {text}" for name, text in told.items()), "")
            more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
            message = f"{first}{more}" or f"{len(self.plan.aims) if self.plan else 0} targets"
            await self._try_write({"message": message[: status.MAX_MESSAGE]})

    async def _announce(self, kind: str, reason: str, message: str) -> None:
        await self._around.announce(self.resource, kind, reason, message)

    async def _try_write(self, patch: Patch) -> bool:
        """For what is only shown; what must be on record goes through the journal. Whether it is shown."""
        try:
            await self._writer.write(patch)
        except JournalError as error:
            LOG.warning("%s: not shown: %s", self.resource.key, error)
            return False
        return True


def _ended(spec: fleet_pb2.OperationSpec, phase: Phase) -> fleet_pb2.FleetOperation:
    state = getattr(fleet_pb2, f"OPERATION_STATE_{phase.upper()}")
    return fleet_pb2.FleetOperation(spec=spec, state=state)
