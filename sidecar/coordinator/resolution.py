"""From a selection to the targets an operation will call, and why the others are not called.

Who answers at an address is asked only where the answer is needed before anything starts: for a target without a name,
for a selector over labels that discovery does not give, and for a rollout that counts its targets. Otherwise the first
call finds out, so that a target that answers nothing delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import calls, outcomes
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.outcomes import Failure
from sidecar.coordinator.port import Aim
from sidecar.coordinator.selectors import Selection, none_matched
from sidecar.coordinator.targets import Discovered, Target

CONNECT_TIMEOUT_S: Final = 5.0
"""For learning who is at an address when the selection depends on it. A sidecar answers without its engines."""

NAME_PATIENCE_S: Final = 1.0
"""For learning only what to call a target: one that is slower goes by its address, and the others do not wait."""

IDENTIFY_CONCURRENCY: Final = 64


@dataclass(frozen=True, slots=True)
class Resolved:
    """The targets of one operation."""

    aims: tuple[Aim, ...]
    """To be called."""
    apart: tuple[fleet_pb2.TargetResult, ...] = ()
    """Rows of targets that are shown and not called: not ready, duplicates."""
    identities: Mapping[str, types_pb2.ReplicaInfo] = field(default_factory=dict)
    """Address -> who answered there, for those that were asked."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    """Address -> why nobody answered, for those that were asked."""
    incomplete: bool = False
    warnings: tuple[str, ...] = ()


async def resolve(
    selection: Selection,
    discovered: Discovered,
    channels: Channels,
    *,
    ask_all: bool = False,
    within_s: float = CONNECT_TIMEOUT_S,
) -> Resolved:
    """The targets a selection means. SelectorError when it means none, or names one that is not known.

    `ask_all`: ask every target who it is, also where that is not needed to select (rolling, or a listing).
    `within_s`: all the time there is, when that is less than naming may take otherwise.
    """
    selectable = _selectable_unasked(selection, discovered.targets)
    asked = [t for t in discovered.targets if not t.not_ready and (ask_all or not selectable or not t.name)]
    patience = NAME_PATIENCE_S if selectable and not ask_all else CONNECT_TIMEOUT_S
    found = await _identify(asked, channels, min(patience, within_s))
    identities = {address: who for address, who in found.items() if not isinstance(who, Failure)}
    failures = {address: who for address, who in found.items() if isinstance(who, Failure)}
    chosen: list[tuple[Target, str]] = []
    unsure: list[str] = []
    known: list[str] = []
    for target in discovered.targets:
        info = identities.get(target.address)
        name = target.name or (info.name if info else "") or target.address
        known.append(name)
        labels = {**(info.labels if info else {}), **target.labels}
        if selection.matches(name, labels) or (selection.patterns and selection.matches(target.address, {})):
            chosen.append((target, name))
        elif info is None and not selectable and not target.not_ready and not (selection.patterns and target.name):
            unsure.append(target.shown_as)
    missing = selection.unmatched([*known, *(t.address for t in discovered.targets)])
    if missing or (not chosen and not unsure):
        text = ",".join(missing) or selection.text
        raise none_matched(Selection(patterns=(text,), text=text), known)
    warnings = list(discovered.warnings)
    if unsure:
        warnings.append(f"not known whether {selection.text!r} means {', '.join(unsure)}: no answer")
    aims, apart = _merge(chosen, identities, warnings)
    return Resolved(
        aims, apart, identities, failures, discovered.incomplete or bool(unsure), tuple(dict.fromkeys(warnings))
    )


def _selectable_unasked(selection: Selection, targets: Sequence[Target]) -> bool:
    """Whether discovery's own names and labels decide the selection."""
    if selection.everything:
        return True
    if selection.patterns:
        return all(target.name for target in targets)
    return all(target.labels for target in targets)


async def _identify(
    targets: Sequence[Target], channels: Channels, timeout_s: float
) -> dict[str, types_pb2.ReplicaInfo | Failure]:
    gate = asyncio.Semaphore(IDENTIFY_CONCURRENCY)

    async def one(target: Target) -> types_pb2.ReplicaInfo | Failure:
        async with gate, channels.lease(target) as channel:
            return await calls.get_replica(channel, target.address, timeout_s, channels.metadata())

    answers = await asyncio.gather(*(one(target) for target in targets))
    return {target.address: answer for target, answer in zip(targets, answers, strict=True)}


def _merge(
    chosen: Sequence[tuple[Target, str]], identities: Mapping[str, types_pb2.ReplicaInfo], warnings: list[str]
) -> tuple[tuple[Aim, ...], tuple[fleet_pb2.TargetResult, ...]]:
    """Drop further addresses of one replica and targets that are not ready; make names unique."""
    aims: list[Aim] = []
    apart: list[fleet_pb2.TargetResult] = []
    owners: dict[str, tuple[str, str]] = {}
    taken: set[str] = set()
    shared: list[str] = []
    for target, name in chosen:
        info = identities.get(target.address)
        labels = {**(info.labels if info else {}), **target.labels}
        unique = name if name not in taken else f"{name}@{target.address}"
        if target.not_ready:
            apart.append(skipped(unique, target.address, outcomes.TARGET_NOT_READY, f"not called: {target.not_ready}"))
            continue
        # One address under two names is one replica, whoever is there.
        key = info.instance_id if info and info.instance_id else target.address
        owner = owners.setdefault(key, (unique, target.address))
        if owner[0] != unique:
            row = duplicate(unique, target.address, *owner)
            apart.append(row)
            warnings.append(row.message)
            continue
        if unique != name:
            shared.append(name)
        taken.add(unique)
        aims.append(Aim(unique, target.address, labels, target.server_name, target.identity))
    if shared:
        some = ", ".join(sorted(set(shared))[:3]) + (", ..." if len(set(shared)) > 3 else "")
        warnings.append(f"several replicas call themselves {some}; all but the first are shown with their address")
    return tuple(aims), tuple(apart)


def skipped(name: str, address: str, reason: str, message: str) -> fleet_pb2.TargetResult:
    """The row of a target that is not called."""
    return fleet_pb2.TargetResult(
        replica=name,
        address=address,
        outcome=fleet_pb2.TARGET_OUTCOME_SKIPPED,
        code="CANCELLED",
        reason=reason,
        message=message,
        execution=types_pb2.EXECUTION_NOT_EXECUTED,
    )


def duplicate(name: str, address: str, owner: str, owner_address: str) -> fleet_pb2.TargetResult:
    """The row of a further name or address of a replica that is called as `owner`."""
    text = f"{address} and {owner_address} are one replica; it is called once, through {owner_address}"
    if address == owner_address:
        text = f"{name} and {owner} are one replica, {address}; it is called once, as {owner}"
    return skipped(name, address, outcomes.DUPLICATE_TARGET, text)
