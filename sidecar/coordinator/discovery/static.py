"""Targets that a person wrote down: on the command line or in an inventory file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sidecar.coordinator.discovery import InventoryUnreadable
from sidecar.coordinator.inventory import InventoryError, load_inventory
from sidecar.coordinator.targets import Discovered, Target


class StaticDiscovery:
    """A fixed list."""

    def __init__(self, targets: Sequence[Target], source: str = "the command line") -> None:
        self._targets = tuple(targets)
        self._source = source

    async def targets(self) -> Discovered:
        """The list."""
        return Discovered(self._targets)

    def describe(self) -> str:
        """Where the list was written."""
        return self._source


class InventoryDiscovery:
    """A YAML file, read again whenever it changed.

    A file that is unreadable for a moment (an editor at work) keeps the last good list and says so as a warning; it
    is an error only when there never was a good one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._targets: tuple[Target, ...] | None = None

    async def targets(self) -> Discovered:
        """The list as the file now has it."""
        try:
            stamp = self._look()
            if stamp != self._stamp or self._targets is None:
                self._targets = load_inventory(self._path)
                self._stamp = stamp
        except (OSError, InventoryError) as error:
            if self._targets is None:
                raise InventoryUnreadable(_explain(self._path, error)) from error
            return Discovered(
                self._targets,
                incomplete=True,
                warnings=(f"{_explain(self._path, error)}; the list read before is used",),
            )
        return Discovered(self._targets)

    def describe(self) -> str:
        """The file."""
        return f"inventory {self._path}"

    def _look(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_ino, found.st_mtime_ns, found.st_size


def _explain(path: Path, error: OSError | InventoryError) -> str:
    if isinstance(error, InventoryError):
        return str(error)
    return f"inventory {path} cannot be read: {error.strerror or error}"
