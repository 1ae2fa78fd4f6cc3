"""The operator as a process: a watch tells, a Lease says who acts, the controller runs.

On SIGTERM the lease is given back at once; runs are dropped, and the next leader goes on with what is on record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from engine_bridge import __version__
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import DiscoveryError, kube_access, kubernetes
from sidecar.coordinator.discovery.kube_access import Access
from sidecar.coordinator.discovery.kube_api import Api, ApiError
from sidecar.coordinator.discovery.kube_rows import Pod
from sidecar.coordinator.discovery.kubernetes import KubernetesDiscovery
from sidecar.coordinator.discovery.sources import JoinedDiscovery
from sidecar.coordinator.metrics import CoordinatorMetrics
from sidecar.coordinator.roster import Roster
from sidecar.operator.config import Config
from sidecar.operator.controller import Controller
from sidecar.operator.events import Announcer
from sidecar.operator.journal import path_of
from sidecar.operator.lease import Election, Timing
from sidecar.operator.reset_on import ResetOn
from sidecar.operator.resource import Resource, read
from sidecar.operator.run import Surroundings
from sidecar.operator.unknowns import Unknowns
from sidecar.operator.watch import Watch
from sidecar.rpc import logs
from sidecar.rpc.plain_http import Page, PlainHttp

LOG: Final = logging.getLogger("kvctl.operator")

_LIST_AGAIN_S: Final = 0.3

SIDECAR_SELECTOR: Final = "kvctl.dev%2Fsidecar%3Dtrue"
"""Label of pods with a sidecar (deploy/kustomize/components/sidecar), as in a URL."""


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. OSError and DiscoveryError say why it could not start."""
    logs.configure(config.log_format, config.log_level)
    if config.log_level != "debug":
        logging.getLogger("kopf").setLevel(logging.WARNING)  # else a line for each change of each pod
    return asyncio.run(Operator(config, kube_access.find()).run())


class Operator:
    """One operator process. `run` may be called once."""

    def __init__(self, config: Config, access: Access) -> None:
        self._config = config
        self._api = Api(access)
        self._namespace = config.namespace or access.namespace
        identity = f"{config.identity}-{uuid.uuid4().hex[:8]}"
        self._metrics = CoordinatorMetrics()
        self._channels = Channels(config.client_security)
        self._sources = self._discoveries()
        self._discovery = self._sources[0] if len(self._sources) == 1 else JoinedDiscovery(self._sources)
        self._election = Election(self._api, self._namespace, config.lease, identity, Timing.of(config.lease_duration))
        announcer = Announcer(self._api, identity)
        self._around = Surroundings(
            self._api,
            self._discovery,
            self._channels,
            self._metrics,
            announcer,
            self._election.leads,
            config.replica_server_name,
        )
        self.controller = Controller(self._around)
        self._reset_on = ResetOn(self._api, announcer.on_pod)
        self.unknowns = Unknowns(self._around)
        self._roster = Roster(self._discovery, self._channels, self._metrics)
        self._stop = asyncio.Event()
        self._watching = asyncio.Event()
        self._not_listed = ""
        """Why this leader does not know yet what is under way."""

    def _discoveries(self) -> list[KubernetesDiscovery]:
        urls = self._config.discovery or [f"pods:///{self._namespace}?selector={SIDECAR_SELECTOR}"]
        return [kubernetes.from_url(url, self._api, self._config.replica_server_name) for url in urls]

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    async def run(self) -> int:
        """From start to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        return await self.serve()

    async def serve(self) -> int:
        """Run until `stop`, leaving signals alone."""
        config = self._config
        http = PlainHttp({"/metrics": self._metrics_page, "/livez": self._livez, "/readyz": self._readyz})
        metrics_at = await http.start(config.metrics) if config.metrics is not None else None
        for source in self._sources:
            source.start()
        watch = Watch(self._api.access, self._namespace, self._operation_seen, self._pod_seen)
        tasks = [
            asyncio.create_task(watch.run(self._watching.set), name="watch"),
            asyncio.create_task(self._elect(), name="lease"),
            asyncio.create_task(self._roster.run(lambda: None), name="roster"),
            asyncio.create_task(self.unknowns.run(), name="unknowns"),
        ]
        LOG.info("serving namespace=%s metrics=%s version=%s", self._namespace, metrics_at or "off", __version__)
        if config.ready_file is not None:
            config.ready_file.write_text(json.dumps({"pid": os.getpid(), "metrics": str(metrics_at or "")}) + "\n")
        stopping = asyncio.create_task(self._stop.wait())
        try:
            ended, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in ended - {stopping}:
                task.result()  # a task that ends by itself has raised: the process must not go on without it
            return 0
        finally:
            LOG.info("stopping")
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)
            for source in self._sources:
                await source.stop()
            await http.close()
            await self._channels.close()
            await self._api.close()
            if config.ready_file is not None:
                config.ready_file.unlink(missing_ok=True)

    # --- leading -------------------------------------------------------------------------------------------------

    async def _elect(self) -> None:
        await self._watching.wait()
        await self._election.run(self._lead, self._follow)

    async def _lead(self) -> None:
        await self._told_of_all()
        await self.controller.lead()
        self._reset_on.lead()

    async def _told_of_all(self) -> None:
        """Wait until the watch has told of every CacheOperation: policies must see what is under way.

        No longer than the lease holds, which is not renewed meanwhile.
        """
        while self._election.leads():
            try:
                answer = await self._api.request("GET", path_of(self._namespace))
            except (ApiError, DiscoveryError) as error:
                trouble = f"CacheOperations cannot be listed: {error}"
                if trouble != self._not_listed:
                    LOG.warning("%s", trouble)
                self._not_listed = trouble
            else:
                self._not_listed = ""
                if all(map(self.controller.knows, _uids(answer))):
                    return
            await asyncio.sleep(_LIST_AGAIN_S)

    async def _follow(self) -> None:
        self._reset_on.stop()
        await self.controller.stop()

    # --- watching ------------------------------------------------------------------------------------------------

    async def _operation_seen(self, resource: Resource, deleted: bool) -> None:
        if deleted:
            self.unknowns.gone(resource.metadata.uid)
            await self.controller.gone(resource.metadata.uid)
        else:
            self.unknowns.seen(resource)
            await self.controller.seen(resource)
        await self._reset_on.operation_seen(resource)

    async def _pod_seen(self, pod: Pod, deleted: bool) -> None:
        if deleted:
            self._reset_on.gone(pod.metadata.uid)
        else:
            await self._reset_on.seen(pod)

    # --- pages ---------------------------------------------------------------------------------------------------

    def _livez(self) -> Page:
        return Page(b"alive\n")

    def _readyz(self) -> Page:
        leads = self._election.leads()
        trouble = "not watching yet" if not self._watching.is_set() else self._election.trouble
        trouble = trouble or (self._not_listed if leads else "")
        if trouble:
            return Page(f"{trouble}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)
        return Page(b"leading\n" if leads else b"standing by\n")

    def _metrics_page(self) -> Page:
        self._metrics.active.set(self.controller.active)
        return Page(self._metrics.exposition(), content_type=CONTENT_TYPE_LATEST)


def _uids(answer: bytes) -> Iterator[str]:
    """Of the resources in a list, without those that cannot be read: nobody is told of them."""
    for body in msgspec.json.decode(answer)["items"]:
        with contextlib.suppress(ValueError):
            yield read(body).metadata.uid


def check(config: Config) -> str:
    """Everything that can be checked without serving; OSError, ValueError or DiscoveryError name what is wrong."""
    access = kube_access.find()

    async def look() -> list[str]:
        operator = Operator(config, access)
        try:
            found = await operator._discovery.targets()
        finally:
            await operator._api.close()
        return [f"  replicas   {operator._discovery.describe()}: {len(found.targets)} now"]

    try:
        lines = asyncio.run(look())
    except DiscoveryError as error:
        raise DiscoveryError(f"{access.server}: {error}") from error
    return "\n".join(["settings are valid", f"  api        {access.server}", *lines])
