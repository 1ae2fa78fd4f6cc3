"""From EndpointSlices and pods to targets: pure functions.

A service has several slices: more than 100 endpoints, one slice an address family, and, for a moment, one endpoint in
two slices while the controller moves it. A pod is one replica whatever the slices say, so rows are merged by pod uid.
Whoever must not be called is shown with the reason; leaving it out would make the fleet look complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sidecar.coordinator.targets import Target

PORT_NAME: Final = "kvctl"
"""Name of the sidecar's port in pods, services and slices."""

DEFAULT_PORT: Final = 7700

_NOT_READY: Final = "the pod is not ready"
TERMINATING: Final = "the pod is terminating"


class Meta(msgspec.Struct, rename="camel"):
    """What matters of an object's metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


# --- EndpointSlices (discovery.k8s.io/v1) ------------------------------------------------------------------------


class EndpointConditions(msgspec.Struct):
    """Unset means unknown; Kubernetes says to treat unknown readiness as ready."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class ObjectRef(msgspec.Struct):
    """Who stands behind an endpoint."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    """One endpoint; its addresses are interchangeable."""

    addresses: list[str] = msgspec.field(default_factory=list)
    conditions: EndpointConditions = msgspec.field(default_factory=EndpointConditions)
    target_ref: ObjectRef | None = None


class EndpointPort(msgspec.Struct):
    """One port of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """A part of a service's endpoints."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


# --- pods (v1) ---------------------------------------------------------------------------------------------------


class PodIp(msgspec.Struct):
    """One address of a pod; a dual-stack pod has two."""

    ip: str = ""


class Condition(msgspec.Struct):
    """One condition."""

    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct, rename="camel"):
    """What matters of a pod's status."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    pod_ips: list[PodIp] | None = msgspec.field(default=None, name="podIPs")
    conditions: list[Condition] | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    """One port of a container."""

    name: str = ""
    container_port: int = 0


class Container(msgspec.Struct):
    """What matters of a container."""

    name: str = ""
    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    """What matters of a pod's spec."""

    containers: list[Container] = msgspec.field(default_factory=list)
    init_containers: list[Container] | None = None


class Pod(msgspec.Struct):
    """One pod."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def ready(self) -> bool:
        """Whether its Ready condition is true; a pod that has none yet is not."""
        return any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())


@dataclass(slots=True)
class _Row:
    name: str
    uid: str
    addresses: list[tuple[str, int]] = field(default_factory=list)
    ready: bool = False
    terminating: bool = False


def from_slices(slices: Iterable[EndpointSlice], port: int | None, server_name: str) -> tuple[list[Target], list[str]]:
    """One target a pod over all slices, sorted by name, and warnings.

    `port`: None takes the slice's port named "kvctl", else its only port. IPv4 is preferred where a pod has both.
    """
    rows: dict[str, _Row] = {}
    warnings: list[str] = []
    for piece in sorted(slices, key=lambda one: (one.address_type, one.metadata.name)):
        if piece.address_type not in ("IPv4", "IPv6"):
            warnings.append(f"EndpointSlice {piece.metadata.name} holds {piece.address_type} addresses: not called")
            continue
        number = port or _slice_port(piece)
        if not number:
            names = [one.name or str(one.port) for one in piece.ports or ()]
            warnings.append(
                f"EndpointSlice {piece.metadata.name} has no port named {PORT_NAME} but {names or 'none'}: not called"
            )
            continue
        for endpoint in piece.endpoints or ():
            _add(rows, endpoint, number)
    return [_target(row, server_name, {}) for row in _by_name(rows)], warnings


def from_pods(pods: Iterable[Pod], port: int | None, server_name: str) -> list[Target]:
    """One target a pod, sorted by name. Pods that have ended are no replicas any more."""
    targets = []
    for pod in sorted(pods, key=lambda one: one.metadata.name):
        if pod.status.phase in ("Succeeded", "Failed"):
            continue
        addresses = [one.ip for one in pod.status.pod_ips or () if one.ip] or [pod.status.pod_ip]
        number = port or _pod_port(pod)
        row = _Row(pod.metadata.name, pod.metadata.uid)
        row.addresses = [(address, number) for address in addresses if address]
        row.ready = pod.ready
        row.terminating = pod.metadata.deletion_timestamp is not None
        targets.append(_target(row, server_name, pod.metadata.labels or {}))
    return targets


def _slice_port(piece: EndpointSlice) -> int:
    ports = [one for one in piece.ports or () if one.port]
    named = [one.port for one in ports if one.name == PORT_NAME]
    if named:
        return named[0] or 0
    return (ports[0].port or 0) if len(ports) == 1 else 0


def _pod_port(pod: Pod) -> int:
    every: Sequence[Container] = [*(pod.spec.init_containers or ()), *pod.spec.containers]
    for container in every:
        for port in container.ports or ():
            if port.name == PORT_NAME:
                return port.container_port
    return DEFAULT_PORT


def _add(rows: dict[str, _Row], endpoint: Endpoint, port: int) -> None:
    reference = endpoint.target_ref
    if not endpoint.addresses:
        return
    # Without a reference (endpoints written by hand) the address is all there is to tell replicas apart.
    key = reference.uid if reference and reference.uid else endpoint.addresses[0]
    row = rows.setdefault(key, _Row(reference.name if reference else "", reference.uid if reference else ""))
    row.addresses.extend((address, port) for address in endpoint.addresses if (address, port) not in row.addresses)
    # Of two slices that disagree while an endpoint moves, the one that says ready or terminating is the newer.
    row.ready = row.ready or endpoint.conditions.ready is not False
    row.terminating = row.terminating or endpoint.conditions.terminating is True


def _by_name(rows: dict[str, _Row]) -> list[_Row]:
    return sorted(rows.values(), key=lambda row: (row.name, row.addresses))


def _target(row: _Row, server_name: str, labels: dict[str, str]) -> Target:
    address = _joined(*row.addresses[0]) if row.addresses else ""
    why = ""
    if row.terminating:
        why = TERMINATING
    elif not row.addresses:
        why = "the pod has no address yet"
    elif not row.ready:
        why = _NOT_READY
    return Target(
        address=address or "(none)",
        name=row.name,
        labels=labels,
        not_ready=why,
        server_name=server_name,
        identity=row.uid,
    )


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
