"""Where replicas come from: an interface, and one module a source.

Discovery is asked afresh for every operation. It never raises because some replicas cannot be found: it says
`incomplete` with a warning, so that an operation on the rest is not reported as done everywhere.
"""

from __future__ import annotations

from typing import Protocol

from sidecar.coordinator.targets import Discovered


class DiscoveryError(Exception):
    """Nothing can be said about the fleet: the inventory cannot be read, the name cannot be resolved at all.

    The text is one line for a person: what was found, what was expected, what to do.
    """


class SourceError(DiscoveryError, ValueError):
    """A text that names no source of targets at all: nobody was asked."""


class InventoryUnreadable(DiscoveryError):  # noqa: N818 - the file is meant
    """The file that names the replicas is not there or is no inventory, and never was while this process read it."""


class Discovery(Protocol):
    """A source of targets."""

    async def targets(self) -> Discovered:
        """Every target there is now. DiscoveryError when nothing can be said."""
        ...

    def describe(self) -> str:
        """The source in a few words, for messages: "inventory /etc/kvctl/fleet.yaml"."""
        ...
