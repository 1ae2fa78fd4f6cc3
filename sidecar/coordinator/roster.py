"""The fleet as it was at the last look: for health and metrics only.

Operations never use it: each asks discovery afresh, because a target that appeared a moment ago must not be missed.
The coordinator serves once discovery has answered for the first time; when it fails later, what runs goes on and the
metrics say that the view may be incomplete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sidecar.coordinator import outcomes, resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery, DiscoveryError
from sidecar.coordinator.metrics import REPLICA_STATES, CoordinatorMetrics
from sidecar.coordinator.selectors import Selection

FIRST_LOOKS_S: Final = 1.0
"""Between looks until the first that succeeds."""
LOOK_EVERY_S: Final = 30.0

_log = logging.getLogger(__name__)


class Roster:
    """Looks at the fleet now and then, and counts."""

    def __init__(self, discovery: Discovery, channels: Channels, metrics: CoordinatorMetrics) -> None:
        self._discovery = discovery
        self._channels = channels
        self._metrics = metrics
        self.up = False
        """Whether discovery has answered at least once."""
        self.trouble = "discovery has not answered yet"
        """Why the last look failed; empty when it did not."""
        self._warnings: tuple[str, ...] = ()

    async def run(self, came_up: Callable[[], None]) -> None:
        """Look for ever; `came_up` is called once, after the first look that succeeds."""
        while True:
            seen = await self._look()
            if seen and not self.up:
                self.up = True
                _log.info("discovery up source=%r", self._discovery.describe())
                came_up()
                continue
            await asyncio.sleep(LOOK_EVERY_S if self.up else FIRST_LOOKS_S)

    async def _look(self) -> bool:
        try:
            discovered = await self._discovery.targets()
        except DiscoveryError as error:
            if str(error) != self.trouble:
                _log.warning("discovery failed: %s", error)
            self.trouble = str(error)
            self._metrics.incomplete.set(1)
            return False
        self.trouble = ""
        for warning in discovered.warnings:
            if warning not in self._warnings:
                _log.warning("discovery: %s", warning)
        self._warnings = discovered.warnings
        if not self.up:
            # Serving does not wait for replicas: who is unreachable is a row of an operation, not a reason to be down.
            return True
        counts = dict.fromkeys(REPLICA_STATES, 0)
        incomplete = discovered.incomplete
        if discovered.targets:
            resolved = await resolution.resolve(Selection(everything=True), discovered, self._channels, ask_all=True)
            incomplete = resolved.incomplete
            for aim in resolved.aims:
                counts["ready" if aim.address in resolved.identities else "unreachable"] += 1
            for row in resolved.apart:
                counts["duplicate" if row.reason == outcomes.DUPLICATE_TARGET else "not_ready"] += 1
        for state, number in counts.items():
            self._metrics.replicas.labels(state).set(number)
        self._metrics.incomplete.set(incomplete)
        return True
