"""Words for the shell's Tab key: from what is on disk, and of a coordinator's fleet from the coordinator. No replica is
called by us, and a coordinator that is slow or away leaves the prompt with nothing after a moment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import click

from sidecar.cli.failures import Refusal
from sidecar.cli.settings import Settings, choose, config_path, load_config

LONGEST_S: Final = 3.0
"""How long a person who pressed Tab may be kept waiting."""


def context_names(incomplete: str) -> list[str]:
    """Names of contexts."""
    try:
        return [name for name in load_config(config_path()).contexts if name.startswith(incomplete)]
    except Refusal:
        return []


def replica_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Names of replicas from the coordinator, inventory or targets in force, and `all`; of a comma list the last."""
    head, comma, tail = incomplete.rpartition(",")
    given = ctx.params
    flags = Settings(
        targets=tuple(given.get("target") or ()),
        inventory=str(given.get("inventory") or ""),
        coordinator=str(given.get("coordinator") or ""),
    )
    try:
        names = _known(choose(flags, str(given.get("context") or "")))
    except (Refusal, OSError, ValueError):
        names = []
    words = names if comma else ["all", *names]
    return [f"{head}{comma}{name}" for name in words if name.startswith(tail)]


def _known(settings: Settings) -> list[str]:
    if settings.coordinator:
        return _asked(settings)
    if settings.inventory and os.path.isfile(settings.inventory):
        from sidecar.coordinator.inventory import load_inventory

        return [target.shown_as for target in load_inventory(Path(settings.inventory))]
    return [text.partition("=")[0] for text in settings.targets if "=" in text]


def _asked(settings: Settings) -> list[str]:
    import asyncio

    from kvctl.v1 import fleet_pb2

    from sidecar.cli.reaching import run
    from sidecar.client.reach import Reach

    async def listed(reach: Reach) -> list[str]:
        fleet = await asyncio.wait_for(reach.replicas(fleet_pb2.Targets(all=True)), LONGEST_S)
        return [row.name for row in fleet.replicas]

    return run(settings, listed)
