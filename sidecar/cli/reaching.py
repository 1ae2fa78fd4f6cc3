"""From settings to a fleet, and from what goes wrong there to one line and an exit code."""

from __future__ import annotations

import asyncio
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
from sidecar.rpc.tls import ClientTls

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
    return DirectReach(discovery_of(settings.targets, settings.inventory), security)


def security_of(settings: Settings) -> ClientSecurity:
    """How to prove who we are and whom to trust."""
    wants_tls = bool(settings.ca or settings.cert or settings.key or settings.server_name)
    tls = ClientTls(_path(settings.ca), _path(settings.cert), _path(settings.key), settings.server_name)
    return ClientSecurity(tls if wants_tls else None, _path(settings.token_file), settings.insecure)


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
        raise Refusal(str(error), exitcodes.of_code(error.failure.code)) from error
    except OSError as error:
        raise Refusal(str(error.strerror if error.errno and not error.args[1:] else error), Exit.UNREACHABLE) from error


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
