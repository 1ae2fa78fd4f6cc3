"""What a fleet operation is aimed at, and the id each replica sees.

A target is an address with what discovery knows of it. Who really answers there (its name, its labels, whether two
addresses are one replica) is only known once it was asked, so a target may come without a name.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

EVERY_REPLICA: Final = "all"
"""What a person writes for the whole fleet; no replica may be called so."""


@dataclass(frozen=True, slots=True)
class Target:
    """One address to call."""

    address: str
    """A gRPC address: "host:port", "[v6]:port" or "unix:/path"."""
    name: str = ""
    """Replica name as discovery gives it. Empty: the replica is asked for its own."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels as discovery gives them; the replica's own fill what is missing here."""
    not_ready: str = ""
    """Why this target must not be called ("terminating", "not ready"). Empty: call it. It is shown either way."""
    server_name: str = ""
    """Name to expect in the TLS certificate when it is not the host of `address` (addresses found through DNS)."""
    identity: str = ""
    """What request ids are derived from where names are used again for other replicas: a pod's uid. Empty: the name
    that the replica gives itself.
    """

    @property
    def shown_as(self) -> str:
        """What to call it before it has answered."""
        return self.name or self.address


@dataclass(frozen=True, slots=True)
class Discovered:
    """What one look at discovery found."""

    targets: tuple[Target, ...]
    incomplete: bool = False
    """True when there may be targets that were not found; an operation on the rest is then never all succeeded."""
    warnings: tuple[str, ...] = ()


def derive_request_id(operation_id: str, identity: str) -> str:
    """The request id one replica sees: the same operation and replica always give the same id.

    `identity` is what the replica calls itself, not what an inventory calls it: two names or addresses of one replica
    must give one effect. Nor is it the sidecar's instance id: an operation repeated after the sidecar restarted must
    still be recognised by the engine as the one that it has run already.
    """
    return str(uuid.uuid5(uuid.UUID(operation_id), identity))


def next_request_id(request_id: str) -> str:
    """The id of the attempt after one that was refused: engines answer a repeated id with the recorded refusal.

    It follows from the last id alone, so that whoever goes on after a crash never returns to an id used before.
    """
    return str(uuid.uuid5(uuid.UUID(request_id), "again"))
