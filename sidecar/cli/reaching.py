"""From settings to a fleet, and from what goes wrong there to one line and an exit code."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvctl.v1 import fleet_pb2

from sidecar.cli import exitcodes
from sidecar.cli.exitcodes import Exit
from sidecar.cli.failures import Refusal
from sidecar.cli.settings import Settings
from sidecar.client.direct import DirectReach
from sidecar.client.reach import Reach, discovery_of
from sidecar.client.remote import CoordinatorError, CoordinatorReach
from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.rollout import PolicyError
from sidecar.coordinator.selectors import SelectorError, parse_labels, parse_replicas
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.tls import ClientTls, read_file

_T = TypeVar("_T")


def run(settings: Settings, work: Callable[[Reach], Awaitable[_T]]) -> _T:
    """Open the fleet, do the work on its own event loop, close it. Refusal for whatever a person can mend."""

    async def everything() -> _T:
        reach = open_reach(settings)
        try:
            return await work(reach)
        finally:
            await reach.close()

    with told_plainly():
        return asyncio.run(everything())


def open_reach(settings: Settings) -> Reach:
    """The fleet that settings name. ValueError, OSError or DiscoveryError when they make no sense."""
    security = security_of(settings)
    if settings.coordinator:
        return CoordinatorReach(settings.coordinator, security)
    try:
        discovery = discovery_of(settings.targets, settings.inventory)
    except DiscoveryError as error:
        # Nobody was asked yet: the text itself is wrong.
        raise Refusal(str(error)) from error
    return DirectReach(discovery, security)


def security_of(settings: Settings) -> ClientSecurity:
    """How to prove who we are and whom to trust."""
    wants_tls = bool(settings.ca or settings.cert or settings.key or settings.server_name)
    tls = ClientTls(_path(settings.ca), _path(settings.cert), _path(settings.key), settings.server_name)
    _check_files(settings)
    return ClientSecurity(tls if wants_tls else None, _path(settings.token_file), settings.insecure)


def _check_files(settings: Settings) -> None:
    """Refusal when a file that a flag names cannot be read or has no certificate in it. gRPC takes anything and fails
    each handshake later, in words of its own.
    """
    given = (("CA file", settings.ca), ("certificate file", settings.cert), ("key file", settings.key))
    for what, name in (*given, ("token file", settings.token_file)):
        if not name:
            continue
        try:
            content = read_file(Path(name), what)
        except OSError as error:
            raise Refusal(error.strerror or str(error)) from error
        if what in ("CA file", "certificate file") and not _has_certificate(content):
            raise Refusal(f"{what} {name} contains no certificate; expected PEM with '-----BEGIN CERTIFICATE-----'")


def _has_certificate(content: bytes) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("utf-8", "replace"))
    except (ssl.SSLError, ValueError):
        return False
    return True


def coordinator_only(reach: Reach, what: str) -> CoordinatorReach:
    """The coordinator; Refusal when replicas are called directly, because nobody keeps operations then."""
    if isinstance(reach, CoordinatorReach):
        return reach
    raise Refusal(f"{what} needs a coordinator, which keeps operations on record: give --coordinator ADDRESS")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Errors that a person can mend, as one line and the right exit code."""
    try:
        yield
    except (SelectorError, PolicyError, ValueError) as error:
        raise Refusal(str(error)) from error
    except DiscoveryError as error:
        raise Refusal(str(error), Exit.UNREACHABLE if "DNS" in str(error) else Exit.USAGE) from error
    except CoordinatorError as error:
        raise Refusal(str(error), exitcodes.of_code(error.failure.code, error.failure.reason)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Refusal(f"{where}{error.strerror or error}", Exit.UNREACHABLE) from error


def targets_of(replicas: str, selector: str | None) -> fleet_pb2.Targets:
    """The API's message for --replicas and --selector."""
    with told_plainly():
        if selector:
            if replicas not in ("all", "*"):
                raise Refusal("--replicas and --selector both choose replicas; give one of them")
            parse_labels(selector)
            return fleet_pb2.Targets(selector=selector)
        return parse_replicas(replicas)


def _path(text: str) -> Path | None:
    return Path(text) if text else None
