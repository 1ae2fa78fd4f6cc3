"""Who acts, of several operator processes: a Lease, as controllers in Kubernetes do it.

Clocks of machines differ, so the times in the Lease are for people: a process measures on its own monotonic clock how
long it has seen the record unchanged, and takes it over after the full duration. A leader that cannot renew stops
earlier than that, so that two never act together as long as a write takes less than the difference. Should it happen
all the same, request ids are the same ones and an engine does each at most once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_api import Api, ApiError

LOG: Final = logging.getLogger(__name__)

_NOT_ASKED: Final = "the lease has not been asked for yet"


class LeaseSpec(msgspec.Struct, rename="camel", omit_defaults=True):
    """The record."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _LeaseMeta(msgspec.Struct, rename="camel", omit_defaults=True):
    name: str
    namespace: str
    resource_version: str | None = None


class Lease(msgspec.Struct, rename="camel"):
    """coordination.k8s.io/v1 Lease."""

    metadata: _LeaseMeta
    spec: LeaseSpec = msgspec.field(default_factory=LeaseSpec)
    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. A leader gives up before others may take over: renew_deadline < duration."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0

    @classmethod
    def of(cls, duration: float) -> Timing:
        """The same proportions for another duration."""
        return cls(duration, duration * 2 / 3, duration * 2 / 15)


class Election:
    """One candidate. `run` keeps trying; `leads` says whether this process may act right now."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity`: of this process, unique among candidates; a restarted one is another one."""
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace, self._name, self._identity = namespace, name, identity
        self._timing = timing or Timing()
        self._clock = clock
        self.trouble = _NOT_ASKED
        """Why nothing is known of the lease; empty when the API server answered the last time."""
        self._renewed_at = -float("inf")
        self._seen: tuple[str | None, str | None, str | None] | None = None
        self._seen_at = 0.0

    def leads(self) -> bool:
        """Whether the lease was renewed recently enough to act."""
        return self._clock() - self._renewed_at < self._timing.renew_deadline

    async def run(self, on_start: Callable[[], Awaitable[None]], on_stop: Callable[[], Awaitable[None]]) -> None:
        """Try to lead until cancelled; then the lease is given back, so that the next one need not wait."""
        leading = False
        try:
            while True:
                await self._attempt()
                if self.leads() != leading:
                    leading = not leading
                    LOG.info("%s %s", self._identity, "leads" if leading else "no longer leads")
                    await (on_start() if leading else on_stop())
                await asyncio.sleep(self._timing.retry * random.uniform(0.9, 1.1))  # noqa: S311 - jitter
        finally:
            if leading:
                await on_stop()
                await self._release()

    async def attempt(self) -> bool:
        """One try to take or renew it; whether this process leads now."""
        await self._attempt()
        return self.leads()

    async def _attempt(self) -> None:
        try:
            await self._take_or_renew()
        except (ApiError, DiscoveryError) as error:
            # A conflict means that another candidate was faster; anything else is told, and tried again.
            conflict = isinstance(error, ApiError) and error.status == 409
            self._see("" if conflict else str(error))
        else:
            self._see("")

    def _see(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            LOG.warning("lease %s/%s: %s", self._namespace, self._name, trouble)
        if self.trouble not in ("", _NOT_ASKED) and not trouble:
            LOG.info("lease %s/%s: the Kubernetes API answers again", self._namespace, self._name)
        self.trouble = trouble

    async def _take_or_renew(self) -> None:
        began = self._clock()
        lease = await self._read()
        if lease is None:
            await self._write("POST", self._path, Lease(self._meta(None), self._claim(None)))
            self._renewed_at = began
        elif self._may_take(lease):
            await self._write("PUT", self._one, Lease(self._meta(lease), self._claim(lease.spec)))
            self._renewed_at = began

    def _may_take(self, lease: Lease) -> bool:
        spec = lease.spec
        record = (spec.holder_identity, spec.renew_time, lease.metadata.resource_version)
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        if not spec.holder_identity or spec.holder_identity == self._identity:
            return True
        expired_after = float(spec.lease_duration_seconds or self._timing.duration)
        return self._clock() - self._seen_at > expired_after

    def _claim(self, was: LeaseSpec | None) -> LeaseSpec:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = was is not None and was.holder_identity == self._identity
        transitions = (was.lease_transitions or 0) if was else 0
        return LeaseSpec(
            self._identity,
            max(1, round(self._timing.duration)),
            was.acquire_time if was and mine else stamp,
            stamp,
            transitions if mine or was is None else transitions + 1,
        )

    async def _release(self) -> None:
        self._renewed_at = -float("inf")
        try:
            lease = await self._read()
            if lease is None or lease.spec.holder_identity != self._identity:
                return
            spec = LeaseSpec("", 1, lease.spec.acquire_time, lease.spec.renew_time, lease.spec.lease_transitions)
            await self._write("PUT", self._one, Lease(self._meta(lease), spec))
        except (ApiError, DiscoveryError) as error:
            LOG.info("lease not given back, it runs out by itself: %s", error)

    @property
    def _one(self) -> str:
        return f"{self._path}/{self._name}"

    def _meta(self, lease: Lease | None) -> _LeaseMeta:
        # The version makes the write conditional: of two candidates, one succeeds.
        return _LeaseMeta(self._name, self._namespace, lease.metadata.resource_version if lease else None)

    async def _read(self) -> Lease | None:
        try:
            return msgspec.json.decode(await self._api.request("GET", self._one), type=Lease)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, method: str, path: str, lease: Lease) -> None:
        body = msgspec.json.encode(lease)
        await self._api.request("PUT" if method == "PUT" else "POST", path, body=body)
