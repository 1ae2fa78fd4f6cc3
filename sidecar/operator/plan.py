"""The targets of one CacheOperation: made once from what was resolved, and read back from the status by who goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.port import Aim, Recorded
from sidecar.coordinator.resolution import Resolved
from sidecar.operator import status
from sidecar.operator.resource import Entry, Status
from sidecar.operator.status import Json, Patch


@dataclass(slots=True)
class Plan:
    """The targets of one operation, as they are on record."""

    ledger: dict[str, Entry]
    aims: list[Aim]
    results: dict[str, fleet_pb2.TargetResult] = field(default_factory=dict)
    """Targets that have ended: those never to be called, and those of before a restart."""
    recorded: dict[str, Recorded] = field(default_factory=dict)
    incomplete: bool = False
    warnings: list[str] = field(default_factory=list)
    started: str = ""

    @property
    def pods(self) -> set[str]:
        """Uids of the pods that it calls; what two operations are compared by."""
        return {entry.uid or name for name, entry in self.ledger.items() if not entry.outcome}

    def patch(self) -> Patch:
        """What of it goes on record before anything is called."""
        return {
            "startTime": self.started,
            "targetsIncomplete": self.incomplete,
            "warnings": bounded(self.warnings),
            "ledger": {name: _builtins(entry) for name, entry in self.ledger.items()},
        }


def new_plan(resolved: Resolved, started: str) -> Plan:
    """Of an operation that begins. `started`: RFC 3339."""
    ledger = {aim.name: Entry(aim.identity, aim.address) for aim in resolved.aims}
    results = {}
    for row in resolved.apart:
        name = row.replica if row.replica not in ledger else f"{row.replica}@{row.address}"
        row.replica = name
        ledger[name] = status.entry_of(row, "")
        results[name] = row
    return Plan(ledger, list(resolved.aims), results, {}, resolved.incomplete, list(resolved.warnings), started)


def plan_on_record(was: Status, server_name: str) -> Plan:
    """Of an operation that goes on. `server_name`: expected in the sidecars' certificates."""
    ledger, rows = dict(was.ledger or {}), was.results or []
    recorded = status.recorded(ledger, rows)
    return Plan(
        ledger,
        # Who was never to be called is no aim: it is shown, and counts neither way in the rollout.
        [aim for aim in status.aims(ledger, server_name) if _callable(ledger[aim.name])],
        {name: at.result for name, at in recorded.items() if at.result is not None},
        {name: at for name, at in recorded.items() if _callable(ledger[name])},
        was.targets_incomplete,
        list(was.warnings or []),
        was.start_time,
    )


def bounded(warnings: Sequence[str]) -> list[Json]:
    """Each once and cut, and not too many of them."""
    return [warning[: status.MAX_MESSAGE] for warning in list(dict.fromkeys(warnings))[: status.MAX_WARNINGS]]


def _callable(entry: Entry) -> bool:
    return bool(entry.request_id) or not entry.outcome


def _builtins(entry: Entry) -> Patch:
    return {
        "uid": entry.uid,
        "address": entry.address,
        **({"outcome": entry.outcome, "code": entry.code, "reason": entry.reason} if entry.outcome else {}),
    }
