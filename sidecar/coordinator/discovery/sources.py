"""From what a person wrote to a discovery: addresses, dns:///, endpoints:///, pods:///, an inventory, or several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sidecar.coordinator.discovery import Discovery, DiscoveryError
from sidecar.coordinator.discovery.dns import DnsDiscovery
from sidecar.coordinator.discovery.static import InventoryDiscovery, StaticDiscovery
from sidecar.coordinator.inventory import NAME
from sidecar.coordinator.targets import EVERY_REPLICA, Discovered, Target
from sidecar.rpc import addresses

if TYPE_CHECKING:
    from sidecar.coordinator.discovery.kube_api import Api
    from sidecar.coordinator.discovery.kubernetes import KubernetesDiscovery

FORMS = "[NAME=]ADDRESS, dns:///name:port, endpoints:///NAMESPACE/SERVICE[:PORT] or pods:///NAMESPACE?selector=LABELS"


@runtime_checkable
class Kept(Protocol):
    """A discovery that can be kept current in the background. One that is never started asks anew each time."""

    def start(self) -> None:
        """Begin."""
        ...

    async def stop(self) -> None:
        """End, and close what was opened."""
        ...


@asynccontextmanager
async def kept_current(discovery: Discovery) -> AsyncIterator[None]:
    """While the block runs, sources that can be watched are watched."""
    if not isinstance(discovery, Kept):
        yield
        return
    discovery.start()
    try:
        yield
    finally:
        await discovery.stop()


class JoinedDiscovery:
    """Several sources as one: `--target a --target dns:///b:7700`."""

    def __init__(self, sources: Sequence[Discovery]) -> None:
        self._sources = tuple(sources)

    async def targets(self) -> Discovered:
        """All of them; the first to give an address wins. Incomplete when any source is."""
        found: dict[str, Target] = {}
        incomplete = False
        warnings: list[str] = []
        for source in self._sources:
            try:
                part = await source.targets()
            except DiscoveryError as error:
                if len(self._sources) == 1:
                    raise
                incomplete = True
                warnings.append(str(error))
                continue
            incomplete |= part.incomplete
            warnings.extend(part.warnings)
            for target in part.targets:
                # A pod that is not called is no second way to whoever has its address, or to others without one.
                found.setdefault((target.not_ready and target.identity) or target.address, target)
        if not found and warnings:
            raise DiscoveryError("; ".join(warnings))
        return Discovered(tuple(found.values()), incomplete, tuple(warnings))

    def describe(self) -> str:
        """Every source."""
        return " and ".join(source.describe() for source in self._sources)

    def start(self) -> None:
        """Keep those current that can be."""
        for source in self._sources:
            if isinstance(source, Kept):
                source.start()

    async def stop(self) -> None:
        """End that."""
        for source in self._sources:
            if isinstance(source, Kept):
                await source.stop()


def discovery_of(targets: Sequence[str] = (), inventory: str | Path = "", server_name: str = "") -> Discovery:
    """A discovery for texts of FORMS, and for an inventory file.

    `server_name`: expected in the certificates of pods, which are called by address. ValueError when a text is none of
    these; DiscoveryError when there is no Kubernetes to ask.
    """
    sources: list[Discovery] = [InventoryDiscovery(Path(inventory))] if inventory else []
    listed: list[Target] = []
    for text in targets:
        if text.startswith("dns:"):
            sources.append(DnsDiscovery(text))
        elif text.startswith(("endpoints:", "pods:")):
            sources.append(_kubernetes(text, server_name))
        else:
            # Written again word for word it is no second way to that replica: there is one row of it, not three.
            target = _target(text)
            if target not in listed:
                listed.append(target)
    if listed:
        sources.insert(0, StaticDiscovery(listed))
    return sources[0] if len(sources) == 1 else JoinedDiscovery(sources)


def _kubernetes(url: str, server_name: str) -> Discovery:
    # Start-up time, and an HTTP client that only Kubernetes needs.
    from sidecar.coordinator.discovery import kube_access, kube_api, kubernetes

    api = kube_api.Api(kube_access.find())
    return _Owning(kubernetes.from_url(url, api, server_name), api)


class _Owning:
    """A Kubernetes discovery together with the connections that only it uses."""

    def __init__(self, discovery: KubernetesDiscovery, api: Api) -> None:
        self._discovery = discovery
        self._api = api
        self.targets = discovery.targets
        self.describe = discovery.describe
        self.start = discovery.start

    async def stop(self) -> None:
        await self._discovery.stop()
        await self._api.close()


def _target(text: str) -> Target:
    name, separator, address = text.partition("=")
    if not separator:
        name, address = "", text
    if separator and not name:
        raise ValueError(f"target {text!r} has no name before '='; expected {FORMS}")
    if name == EVERY_REPLICA:
        raise ValueError(f"target {text!r}: the name 'all' means every replica; give it another name")
    if name and not NAME.fullmatch(name):
        raise ValueError(f"target {text!r}: name {name!r} is not one; expected letters, digits, '.', '_' and '-'")
    return Target(address=addresses.parse(address, what="target").target, name=name)
