"""The sidecar as a process: what it is made of, in which order it starts and ends.

Start: files and addresses are checked and bound first, so that a taken port or an unreadable certificate ends the
process before anything is served. It then serves at once, also without an engine: health says NOT_SERVING until every
engine listed is connected. End, on SIGTERM: health goes down, nothing new is taken, what runs is finished or withdrawn
within the grace and recorded, then everything closes. A second SIGTERM leaves at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from http import HTTPStatus
from typing import Final

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from engine_bridge import __version__
from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.backends.engine import EngineSet
from sidecar.replica.audit import AuditLog
from sidecar.replica.config import Config
from sidecar.replica.judgement import thresholds
from sidecar.replica.metrics import ReplicaMetrics
from sidecar.replica.operations import Operations
from sidecar.replica.sampler import Sampler
from sidecar.replica.service import ACCESS, SERVICE, CacheAdmin
from sidecar.replica.watch import Watchers
from sidecar.rpc import addresses, logs, ready_file, tracing
from sidecar.rpc import server as rpc_server
from sidecar.rpc.health import Health
from sidecar.rpc.late_calls import Instance
from sidecar.rpc.plain_http import Page, PlainHttp
from sidecar.rpc.ready_file import ReadyFile
from sidecar.rpc.server import CannotListen, ServerSettings
from sidecar.rpc.serving import Serving
from sidecar.rpc.tls import check_certificates, read_token

LOG: Final = logging.getLogger("kvctl.sidecar")

CLIENT: Final = f"kvctl-sidecar/{__version__}"

_LAST_WORDS_S: Final = 5.0


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. OSError and ValueError say why it could not start."""
    logs.configure(config.log_format, config.log_level)
    return asyncio.run(Application(config).run())


def check(config: Config) -> str:
    """Everything that can be checked without serving; OSError or ValueError name what is wrong."""
    settings = server_settings(config)
    rpc_server.check_exposure(settings)
    rpc_server.check_free(settings)
    if settings.tls is not None:
        settings.tls.credentials()
    if config.metrics is not None and (why := addresses.why_not_bindable(config.metrics)):
        raise CannotListen(why)
    if config.engine_ca is not None:
        check_certificates(config.engine_ca, "CA file")
    if config.engine_token_file is not None:
        read_token(config.engine_token_file)
    AuditLog(config.audit_log, config.name).close()
    ready_file.check(config.ready_file)
    if config.engine_url:
        from sidecar.backends.http.client import parse_url  # memory: only where it is used

        parse_url(config.engine_url)
    return describe(config, settings)


def describe(config: Config, settings: ServerSettings) -> str:
    """The settings in force, for a person."""
    lines = {
        "name": config.name,
        "labels": ", ".join(f"{key}={value}" for key, value in config.labels.items()) or "none",
        "engines": str(config.engine_dir) + (f", else {config.engine_url}" if config.engine_url else ""),
        "grpc": ", ".join(str(address) for address in settings.listen),
        "tls": "mutual" if config.tls_client_ca else "yes" if config.tls_cert else "no",
        "callers": config.server_security.describe(),
        "metrics": str(config.metrics) if config.metrics else "off",
        "audit": "stdout" if config.audit_log == "-" else config.audit_log,
        "grace": f"{config.grace:g} s",
        "verdicts": f"stalled after {config.stall_after:g} s, hung after {config.hung_after:g} s",
    }
    return "\n".join(["settings are valid", *(f"  {key:<8} {value}" for key, value in lines.items())])


def server_settings(config: Config) -> ServerSettings:
    """How to listen and whom to serve. OSError or ValueError when a token file cannot be used."""
    security = config.server_security
    return ServerSettings(
        config.listen,
        security.authorizer(ACCESS),
        security.tls(),
        config.insecure,
        config.max_calls,
        spans=tracing.span_maker("kvctl-sidecar"),
        reflection=(SERVICE,),
    )


def engine_set(config: Config) -> EngineSet:
    """Where engines are looked for: the bridge, and stock vLLM's HTTP routes where a URL is given and no bridge is."""
    bridge = EngineDirectory(config.engine_dir, CLIENT, expected=config.expect_engines)
    if not config.engine_url:
        return bridge
    from sidecar.backends.http.engines import HttpEngines, PreferBridge  # memory: only where it is used

    tls = None
    if config.engine_ca is not None:
        import ssl

        check_certificates(config.engine_ca, "CA file")
        tls = ssl.create_default_context(cafile=str(config.engine_ca))
    return PreferBridge(bridge, HttpEngines(config.engine_url, token_file=config.engine_token_file, tls=tls))


class Application:
    """One sidecar. `run` may be called once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._signals = 0

    async def run(self) -> int:
        """From start to end."""
        self._take_signals()
        config = self._config
        ready_file.check(config.ready_file)
        settings = server_settings(config)
        audit = AuditLog(config.audit_log, config.name)
        self._engines = engine_set(config)
        self._sampler = Sampler(self._engines, thresholds=thresholds(config.stall_after, config.hung_after))
        self._watchers = Watchers(self._sampler)
        metrics = ReplicaMetrics(self._sampler, __version__, watchers=lambda: len(self._watchers))
        self._operations = Operations(self._engines, audit, metrics, config.expect_engines)
        self._health = Health(SERVICE)
        self._metrics = metrics
        instance = Instance.new()
        service = CacheAdmin(
            config.name, config.labels, instance, self._engines, self._operations, self._sampler, self._watchers
        )
        server = Serving(settings, [service.register, self._health.register], instance)
        bound = server.bind()
        http = PlainHttp({"/metrics": self._metrics_page, "/livez": self._livez, "/readyz": self._readyz})
        metrics_at = await http.start(config.metrics) if config.metrics is not None else None
        await server.start()
        await self._engines.start()
        await self._sampler.start()
        self._engines.on_change(self._update_health)
        self._update_health()
        LOG.info(
            "serving name=%s address=%s metrics=%s engines=%s pid=%d version=%s",
            config.name,
            ",".join(str(address) for address in bound),
            metrics_at or "off",
            self._engines.place,
            os.getpid(),
            __version__,
        )
        if not settings.authorizer.enforced and not all(address.is_local for address in bound):
            LOG.warning("serving other machines without credentials: anyone who can connect is admin")
        ready = ReadyFile(config.ready_file, bound, metrics_at) if config.ready_file is not None else None
        try:
            await self._stop.wait()
            await self._drain()
        finally:
            # Returns once every call has ended; what was just told to its caller must still be sent.
            await server.stop(min(_LAST_WORDS_S, max(0.5, config.grace / 4)))
            await http.close()
            await self._sampler.close()
            await self._engines.close()
            audit.close()
            if ready is not None:
                ready.remove()
        LOG.info("stopped")
        return 0

    async def _drain(self) -> None:
        LOG.info("stopping grace_s=%.1f", self._config.grace)
        self._health.drain()
        self._watchers.end()
        await self._operations.stop(self._config.grace)

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

    # --- health and pages ----------------------------------------------------------------------------------------

    def _why_not_ready(self) -> list[str]:
        """Empty when every engine is there and answers."""
        if self._signals:
            return ["shutting down"]
        trouble = self._engines.trouble()
        if trouble is not None:
            return [f"{trouble.reason}: {trouble.message}"]
        engines = self._engines.engines()
        found = [engine.trouble for engine in engines]
        lines = [f"{one.reason}: {one.message}" for one in found if one is not None]
        if len(engines) < self._config.expect_engines:
            lines.append(f"NO_ENGINE: {len(engines)} of {self._config.expect_engines} engines have appeared")
        return lines

    def _update_health(self) -> None:
        self._health.set_serving(not self._why_not_ready())

    def _livez(self) -> Page:
        return Page(b"alive\n")

    def _readyz(self) -> Page:
        why = self._why_not_ready()
        if not why:
            return Page(b"ready\n")
        return Page(("\n".join(why) + "\n").encode(), HTTPStatus.SERVICE_UNAVAILABLE)

    def _metrics_page(self) -> Page:
        return Page(generate_latest(self._metrics.registry), content_type=CONTENT_TYPE_LATEST)
