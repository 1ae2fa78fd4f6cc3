"""Words for the shell's Tab key, from what is on disk: nothing is called, so a dead fleet does not hang a prompt."""

from __future__ import annotations

import os
from pathlib import Path

import click

from sidecar.cli.failures import Refusal
from sidecar.cli.settings import Settings, choose, config_path, load_config


def context_names(incomplete: str) -> list[str]:
    """Names of contexts."""
    try:
        return [name for name in load_config(config_path()).contexts if name.startswith(incomplete)]
    except Refusal:
        return []


def replica_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Names of replicas from the inventory or targets in force, and `all`; the last of a comma list is completed."""
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
    if settings.inventory and os.path.isfile(settings.inventory):
        from sidecar.coordinator.inventory import load_inventory

        return [target.shown_as for target in load_inventory(Path(settings.inventory))]
    return [text.partition("=")[0] for text in settings.targets if "=" in text]
