"""Which CacheOperations run now: decisions over what the watch has told, and one task a resource.

The watch tells everybody; only the leader acts. Whoever becomes leader goes on with what is recorded as begun before
it begins anything new, oldest first, so that concurrency policies see the operations that are under way. Whoever stops
leading drops its tasks at once: intents without a result stay on record, and the next leader asks for them.

Deletion needs no finalizer: a resource that is gone has its run cancelled, calls that have had no effect are taken
back, and those that have are simply no longer recorded anywhere but at the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError
from sidecar.coordinator.port import JournalError
from sidecar.operator import status
from sidecar.operator.journal import StatusWriter, path_of
from sidecar.operator.resource import Phase, Resource, Unreadable, read
from sidecar.operator.run import NotToRun, Run, Surroundings, now

LOG: Final = logging.getLogger(__name__)

_DELETE_RETRIES_S: Final = (1.0, 5.0, 30.0)
_LOST_RETRY_S: Final = 2.0

OnEnd = Callable[[Resource, Phase], Awaitable[None]]


class Controller:
    """All runs of one operator process. Belongs to one loop."""

    def __init__(self, around: Surroundings, on_end: OnEnd | None = None) -> None:
        """`on_end` is told of every operation that has ended here."""
        self._around = around
        self._on_end = on_end
        self._known: dict[str, Resource] = {}
        self._runs: dict[str, Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._expiring: dict[str, asyncio.Task[None]] = {}
        self._marking: set[asyncio.Task[None]] = set()
        self._ended: set[str] = set()
        """Uids that ended here: what the watch still tells of them may be older than that."""
        self._leading = False
        self._turn = asyncio.Lock()
        self._turns = itertools.count(1)

    # --- what the watch tells ------------------------------------------------------------------------------------

    async def seen(self, resource: Resource) -> None:
        """A resource is there, in this state."""
        uid = resource.metadata.uid
        self._known[uid] = resource
        if self._leading:
            await self._act(resource)

    def knows(self, uid: str) -> bool:
        """Whether the watch has told of this resource."""
        return uid in self._known

    async def gone(self, uid: str) -> None:
        """A resource was deleted."""
        self._known.pop(uid, None)
        self._ended.discard(uid)
        expiring = self._expiring.pop(uid, None)
        if expiring is not None:
            expiring.cancel()
        run = self._runs.get(uid)
        if run is not None:
            await run.cancel("the CacheOperation was deleted", gone=True)

    # --- leading -------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Act from now on."""
        self._leading = True
        for resource in sorted(self._known.values(), key=_order):
            await self._act(resource)

    async def stop(self) -> None:
        """Drop everything at once; what is on record is enough for the next leader."""
        self._leading = False
        tasks = [*self._tasks.values(), *self._expiring.values(), *self._marking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._expiring.clear()
        self._runs.clear()
        self._ended.clear()

    @property
    def active(self) -> int:
        """Operations under way here."""
        return len(self._runs)

    # --- inside --------------------------------------------------------------------------------------------------

    async def _act(self, resource: Resource) -> None:
        uid = resource.metadata.uid
        if resource.metadata.deletion_timestamp is not None:
            # Somebody else's finalizer keeps it; to us it is deleted.
            if (run := self._runs.get(uid)) is not None:
                await run.cancel("the CacheOperation is being deleted")
            return
        if resource.finished:
            self._observe(resource)
            self._expire(resource)
            return
        run = self._runs.get(uid)
        if isinstance(resource, Unreadable) and (run is not None or resource.status.operation_id):
            # It is under way: who began it knows what it means, and what has become of its calls.
            LOG.error("%s: left as it is, for the operator that began it: %s", resource.key, resource.why)
            return
        if run is None:
            if uid not in self._ended:
                self._begin(resource)
            return
        run.resource.spec.cancel = resource.spec.cancel
        run.resource.metadata.generation = resource.metadata.generation
        if resource.spec.cancel:
            await run.cancel("the CacheOperation was cancelled")
        await run.hold(resource.spec.suspend)

    def _begin(self, resource: Resource) -> None:
        uid = resource.metadata.uid
        run = Run(resource, self._around, self._admit)
        self._runs[uid] = run
        self._around.metrics.active.set(len(self._runs))
        self._tasks[uid] = asyncio.create_task(self._one(run), name=f"cacheoperation {resource.key}")

    async def _one(self, run: Run) -> None:
        uid = run.resource.metadata.uid
        lost = False
        try:
            phase = await run.go()
            if phase is not None:
                self._ended.add(uid)
                if self._on_end is not None:
                    await self._on_end(run.resource, phase)
            lost = phase is None and uid in self._known and self._leading
        except Exception:
            LOG.exception("%s: the run raised; it is tried again", run.resource.key)
            lost = True
        finally:
            if self._runs.get(uid) is run:
                del self._runs[uid]
                self._tasks.pop(uid, None)
            self._around.metrics.active.set(len(self._runs))
        if lost:
            await asyncio.sleep(_LOST_RETRY_S)
            await self._again(uid)

    async def _again(self, uid: str) -> None:
        """What could not be recorded is gone on with from what the API server has, not from what the watch had."""
        known = self._known.get(uid)
        if known is None or not self._leading or uid in self._runs:
            return
        try:
            fresh = await fetch(self._around.api, known)
        except (ApiError, DiscoveryError) as error:
            LOG.warning("%s: cannot be read again: %s", known.key, error)
            fresh = known
        if fresh is None or fresh.metadata.uid != uid:
            self._known.pop(uid, None)
            return
        await self.seen(fresh)

    async def _admit(self, run: Run) -> bool:
        """The concurrency policy, once the new run's targets are known; whether it waited for others to end.

        What only checks changes nothing: it is in nobody's way, and nobody is in its. One at a time: two must not pass
        together.
        """
        policy = run.resource.spec.concurrency_policy
        exclusive = policy != "Allow" and not run.resource.spec.validate_only
        async with self._turn:
            in_the_way = self._in_the_way(run) if exclusive else []
            if in_the_way and policy == "Forbid":
                other, shared = in_the_way[0]
                raise NotToRun(
                    "Skipped",
                    "ConcurrencyForbidden",
                    f"{other.resource.metadata.name} runs on {shared} of the same pods; concurrencyPolicy is Forbid",
                )
            if not run.admitted:
                run.admitted, run.turn = True, next(self._turns)
        if not in_the_way:
            return False
        names = ", ".join(other.resource.metadata.name for other, _ in in_the_way)
        await run.wait_for("Replacing", f"waits for the end of {names}, which it replaces")
        for other, _ in in_the_way:
            await other.cancel(f"replaced by {run.resource.metadata.name}")
        await run.outlast([other for other, _ in in_the_way])
        return True

    def _in_the_way(self, run: Run) -> list[tuple[Run, int]]:
        """Runs that were let in before and change some of the same pods, and how many."""
        mine = run.plan.pods if run.plan else set()
        others = [
            other
            for other in self._runs.values()
            if other.admitted
            and not other.ended
            and (not run.admitted or other.turn < run.turn)
            and not other.resource.spec.validate_only
        ]
        shared = [(other, len(other.plan.pods & mine) if other.plan else 0) for other in others]
        return [(other, count) for other, count in shared if count]

    def _observe(self, resource: Resource) -> None:
        """A change after the end runs nothing; who waits for its generation to be observed is told so."""
        if resource.status.observed_generation < resource.metadata.generation:
            task = asyncio.create_task(self._mark_observed(resource))
            self._marking.add(task)
            task.add_done_callback(self._marking.discard)

    async def _mark_observed(self, resource: Resource) -> None:
        writer = StatusWriter(self._around.api, resource, self._around.leads)
        try:
            await writer.write(status.changed_after_the_end(resource.status, now(), resource.metadata.generation))
        except JournalError as error:
            LOG.warning("%s: a change after the end is not marked as seen: %s", resource.key, error)

    def _expire(self, resource: Resource) -> None:
        """Delete it when its time after the end is over; the time may have changed since it was last seen."""
        uid, ttl = resource.metadata.uid, resource.spec.ttl_seconds_after_finished
        expiring = self._expiring.pop(uid, None)
        if expiring is not None:
            expiring.cancel()
        if ttl is not None:
            self._expiring[uid] = asyncio.create_task(self._delete_after(resource, ttl))

    async def _delete_after(self, resource: Resource, ttl: int) -> None:
        await asyncio.sleep(max(0.0, _age_left(resource.status.completion_time, ttl)))
        body = f'{{"preconditions":{{"uid":"{resource.metadata.uid}"}},"propagationPolicy":"Background"}}'.encode()
        path = path_of(resource.metadata.namespace, resource.metadata.name)
        for wait_s in (*_DELETE_RETRIES_S, None):
            try:
                await self._around.api.request("DELETE", path, body=body)
                return
            except (ApiError, DiscoveryError) as error:
                if wait_s is None or (isinstance(error, ApiError) and error.status in (404, 409)):
                    LOG.info("%s: not deleted after its time: %s", resource.key, error)
                    return
                await asyncio.sleep(wait_s)


async def fetch(api: Api, resource: Resource) -> Resource | None:
    """The resource as the API server has it now; None when it is gone."""
    try:
        answer = await api.request("GET", path_of(resource.metadata.namespace, resource.metadata.name))
    except ApiError as error:
        if error.status == 404:
            return None
        raise
    return read(msgspec.json.decode(answer))


def _order(resource: Resource) -> tuple[bool, str, str]:
    """Begun ones first, then by age."""
    return (not resource.status.operation_id, resource.metadata.creation_timestamp, resource.metadata.uid)


def _age_left(completed: str, ttl: int) -> float:
    """Seconds until `ttl` after the end; 0 when the time of the end cannot be read."""
    try:
        ended = datetime.fromisoformat(completed)
    except ValueError:
        return 0.0
    return ttl - (datetime.now(UTC) - ended).total_seconds()
