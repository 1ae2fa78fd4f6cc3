"""The coordinator as a process: what it is made of, in which order it starts and ends.

Start: the store's lock, addresses and certificates first, so that a second coordinator or a taken port ends the process
before anything is served. Then what the last coordinator left unfinished is taken up, and health says SERVING once
discovery has answered. End, on SIGTERM: health goes down, no further target is started, calls under way may end within
the grace, and the rest waits in the store for whoever starts next. A second SIGTERM leaves at once.

A store that is corrupt does not keep the process from starting: reads are served as far as they go, and everything that
would need a record is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
from http import HTTPStatus
from pathlib import Path
from typing import Final

from kvctl.v1 import fleet_pb2_grpc
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from engine_bridge import __version__
from sidecar.coordinator.audit import FleetAudit
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.config import Config
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.discovery.sources import discovery_of, kept_current
from sidecar.coordinator.metrics import CoordinatorMetrics
from sidecar.coordinator.operations import Operations
from sidecar.coordinator.roster import Roster
from sidecar.coordinator.running import Retention, Running
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.service import RULES, SERVICE, FleetAdmin
from sidecar.coordinator.store import Store, StoreLock
from sidecar.coordinator.targets import Discovered
from sidecar.rpc import addresses, logs, ready_file
from sidecar.rpc import server as rpc_server
from sidecar.rpc.audit import STDOUT, AuditLog
from sidecar.rpc.health import Health
from sidecar.rpc.plain_http import Page, PlainHttp
from sidecar.rpc.ready_file import ReadyFile
from sidecar.rpc.server import CannotListen, ServerSettings
from sidecar.rpc.serving import Serving

LOG: Final = logging.getLogger("kvctl.coordinator")

_PRUNE_EVERY_S: Final = 3600.0
_VERIFY_EVERY_S: Final = 30.0
_CLOSE_S: Final = 0.5


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. OSError, ValueError and StoreError say why it could not start."""
    logs.configure(config.log_format, config.log_level)
    return asyncio.run(Application(config).run())


def check(config: Config) -> str:
    """Everything that can be checked without serving; OSError, ValueError or StoreError name what is wrong."""
    settings = server_settings(config)
    rpc_server.check_exposure(settings)
    rpc_server.check_free(settings)
    if settings.tls is not None:
        settings.tls.credentials()
    _check_client(config)
    if config.metrics is not None and (why := addresses.why_not_bindable(config.metrics)):
        raise CannotListen(why)
    discovery = discovery_of(config.sources, config.inventory or "", config.replica_server_name)
    found = asyncio.run(_look_once(discovery))
    _make_folder(config.store)
    StoreLock(config.store).release()
    ready_file.check(config.ready_file)
    _audit_log(config).close()
    lines = {
        "replicas": f"{discovery.describe()}: {len(found.targets)} now",
        "store": str(config.store),
        "audit": "stdout" if config.audit_log == STDOUT else config.audit_log,
        "keeps": f"{config.keep_operations} ended operations, {config.keep_for / 86400:g} days",
        "grpc": ", ".join(str(address) for address in settings.listen),
        "tls": "mutual" if config.tls_client_ca else "yes" if config.tls_cert else "no",
        "callers": config.server_security.describe(),
        "metrics": str(config.metrics) if config.metrics else "off",
        "grace": f"{config.grace:g} s",
    }
    notes = [f"  note: {warning}" for warning in found.warnings]
    return "\n".join(["settings are valid", *(f"  {key:<8} {value}" for key, value in lines.items()), *notes])


def _check_client(config: Config) -> None:
    """What this coordinator shows to replicas; found out now and not by every replica being unreachable."""
    security = config.client_security
    if security.tls is not None:
        security.tls.check()


async def _look_once(discovery: Discovery) -> Discovered:
    async with kept_current(discovery):
        return await discovery.targets()


def server_settings(config: Config) -> ServerSettings:
    """How to listen and whom to serve. OSError or ValueError when a token file cannot be used."""
    security = config.server_security
    return ServerSettings(
        config.listen,
        security.authorizer(RULES),
        security.tls(),
        config.insecure,
        config.max_calls,
        reflection=(SERVICE,),
    )


class Application:
    """One coordinator. `run` may be called once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        """From start to end."""
        self._take_signals()
        config = self._config
        settings = server_settings(config)
        rpc_server.check_exposure(settings)
        _check_client(config)
        discovery = discovery_of(config.sources, config.inventory or "", config.replica_server_name)
        _make_folder(config.store)
        with contextlib.closing(_audit_log(config)) as log:
            self._store = Store(config.store)
            channels = Channels(config.client_security)
            try:
                async with kept_current(discovery):
                    code = await self._serve(settings, discovery, channels, FleetAudit(log))
            finally:
                await channels.close()
                await self._store.close()
        LOG.info("stopped")  # not where it never served: its error says why
        return code

    async def _serve(
        self, settings: ServerSettings, discovery: Discovery, channels: Channels, audit: FleetAudit
    ) -> int:
        config = self._config
        ready_file.check(config.ready_file)
        self._metrics = CoordinatorMetrics()
        retention = Retention(config.keep_operations, config.keep_for)
        self._running = Running(self._store, discovery, channels, self._metrics, audit, retention)
        self._operations = Operations(self._store, discovery, channels, self._running, audit)
        self._roster = Roster(discovery, channels, self._metrics)
        self._health = Health(SERVICE)
        service = FleetAdmin(self._operations, discovery, channels)
        add_service = functools.partial(fleet_pb2_grpc.add_FleetAdminServicer_to_server, service)
        server = Serving(settings, [add_service, self._health.register])
        bound = server.bind()
        http = PlainHttp({"/metrics": self._metrics_page, "/livez": self._livez, "/readyz": self._readyz})
        background: list[asyncio.Task[None]] = []
        ready: ReadyFile | None = None
        try:
            metrics_at = await http.start(config.metrics) if config.metrics is not None else None
            await self._resume()
            await server.start()
            background = [
                asyncio.create_task(self._roster.run(lambda: self._health.set_serving(True))),
                asyncio.create_task(self._prune_now_and_then()),
                asyncio.create_task(self._verify_now_and_then()),
                asyncio.create_task(self._running.unknowns.run()),
            ]
            LOG.info(
                "serving address=%s metrics=%s store=%s discovery=%r pid=%d version=%s",
                ",".join(str(address) for address in bound),
                metrics_at or "off",
                config.store,
                discovery.describe(),
                os.getpid(),
                __version__,
            )
            if not settings.authorizer.enforced and not all(address.is_local for address in bound):
                LOG.warning("serving other machines without credentials: anyone who can connect is admin")
            if config.ready_file is not None:
                ready = ReadyFile(config.ready_file, bound, metrics_at)
            await self._stop.wait()
            LOG.info("stopping grace_s=%.1f", config.grace)
            self._health.drain()
            await self._running.drain(config.grace)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await server.stop(_CLOSE_S)
            await http.close()
            if ready is not None:
                ready.remove()
        return 0

    async def _resume(self) -> None:
        if self._store.trouble:
            LOG.error("store unusable, nothing will be recorded or changed: %s", self._store.trouble)
        try:
            resumed = await self._running.resume_all()
        except StoreError as error:
            LOG.error("unfinished operations cannot be read: %s", error)
            return
        if resumed:
            LOG.info("operations resumed count=%d", resumed)

    async def _prune_now_and_then(self) -> None:
        while True:
            await self._running.prune()
            await asyncio.sleep(_PRUNE_EVERY_S)

    async def _verify_now_and_then(self) -> None:
        while True:
            before = self._store.trouble
            await self._store.verify()
            if self._store.trouble and self._store.trouble != before:
                LOG.error("store unusable, nothing will be recorded or changed: %s", self._store.trouble)
            await asyncio.sleep(_VERIFY_EVERY_S)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            LOG.warning("second signal: leaving at once")
            os._exit(1)
        self._stop.set()

    # --- pages ---------------------------------------------------------------------------------------------------

    def _livez(self) -> Page:
        return Page(b"alive\n")

    def _readyz(self) -> Page:
        if self._health.serving:
            note = f"note: {self._store.trouble}\n" if self._store.trouble else ""
            return Page(f"ready\n{note}".encode())
        why = "shutting down" if self._signals else self._roster.trouble
        return Page(f"{why}\n".encode(), HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics_page(self) -> Page:
        self._metrics.store_failed.set(bool(self._store.trouble))
        self._metrics.active.set(self._running.active)
        return Page(self._metrics.exposition(), content_type=CONTENT_TYPE_LATEST)


def _audit_log(config: Config) -> AuditLog:
    """OSError names the setting and the path when it cannot be used."""
    return AuditLog(config.audit_log, {"coordinator": socket.gethostname()})


def _make_folder(store: Path) -> None:
    try:
        store.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OSError(
            error.errno, f"the folder of the store {store} cannot be made by uid {os.getuid()}: {error.strerror}"
        ) from error
