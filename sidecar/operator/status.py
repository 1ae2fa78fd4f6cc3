"""What a CacheOperation's status says: pure functions from targets to what `kubectl get` and `describe` show.

A status has to stay small (an object is written whole to etcd at every change), so results are bounded, those that did
not succeed first, and the ledger that a resume needs holds only what a resume needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvctl.v1 import fleet_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.port import Aim, Recorded
from sidecar.operator.resource import Condition, Entry, Phase, Row, Status

MAX_RESULTS: Final = 100
MAX_MESSAGE: Final = 512
MAX_WARNINGS: Final = 20
MAX_TARGETS: Final = 3000
"""An entry in the ledger has up to 330 bytes, and etcd takes objects up to 1.5 MB."""

Json = str | int | bool | None | Sequence["Json"] | Mapping[str, "Json"]
Patch = dict[str, Json]

_NAMES: Final = {
    fleet_pb2.TARGET_OUTCOME_SUCCEEDED: "Succeeded",
    fleet_pb2.TARGET_OUTCOME_FAILED: "Failed",
    fleet_pb2.TARGET_OUTCOME_UNREACHABLE: "Unreachable",
    fleet_pb2.TARGET_OUTCOME_UNKNOWN: "Unknown",
    fleet_pb2.TARGET_OUTCOME_SKIPPED: "Skipped",
    fleet_pb2.TARGET_OUTCOME_CANCELLED: "Cancelled",
}
_OUTCOMES: Final = {name: outcome for outcome, name in _NAMES.items()}
ORDER: Final = ("Failed", "Unknown", "Unreachable", "Cancelled", "Skipped", "Succeeded")
_PHASES: Final[dict[int, Phase]] = {
    fleet_pb2.OPERATION_STATE_SUCCEEDED: "Succeeded",
    fleet_pb2.OPERATION_STATE_PARTIAL: "Partial",
    fleet_pb2.OPERATION_STATE_FAILED: "Failed",
    fleet_pb2.OPERATION_STATE_CANCELLED: "Cancelled",
}


def entry_of(row: fleet_pb2.TargetResult, uid: str) -> Entry:
    """The ledger's entry of a target that has ended."""
    return Entry(uid, row.address, row.wave, row.request_id, _NAMES[row.outcome], row.code, row.reason)


def shown(row: fleet_pb2.TargetResult, uid: str) -> Row:
    """The row a person reads."""
    dropped = [engine.cached_blocks_dropped for engine in row.reset.engines] if row.HasField("reset") else [-1]
    return Row(
        row.replica,
        _NAMES[row.outcome],
        uid,
        row.address,
        row.code,
        row.reason,
        row.message if len(row.message) <= MAX_MESSAGE else row.message[: MAX_MESSAGE - 1] + "…",
        row.attempts,
        row.wave,
        row.request_id,
        sum(dropped) if min(dropped, default=0) >= 0 else None,  # -1: not known over HTTP
    )


def restored(name: str, entry: Entry, row: Row | None) -> fleet_pb2.TargetResult:
    """The result of a target that ended before a restart, as far as the status has it."""
    result = fleet_pb2.TargetResult(
        replica=name,
        address=entry.address,
        outcome=_OUTCOMES[entry.outcome],
        code=entry.code,
        reason=entry.reason,
        wave=entry.wave,
        request_id=entry.request_id,
    )
    if row is not None:
        result.message, result.attempts = row.message, row.attempts
        if row.cached_blocks_dropped is not None:
            result.reset.engines.add(cached_blocks_dropped=row.cached_blocks_dropped)
    return result


def recorded(ledger: Mapping[str, Entry], rows: Iterable[Row]) -> dict[str, Recorded]:
    """What Execution resumes from: targets with an intent, and targets that have ended."""
    by_name = {row.replica: row for row in rows}
    found = {}
    for name, entry in ledger.items():
        if not entry.request_id and not entry.outcome:
            continue
        result = restored(name, entry, by_name.get(name)) if entry.outcome else None
        found[name] = Recorded(entry.request_id, entry.wave, result, entry.unhealthy)
    return found


def aims(ledger: Mapping[str, Entry], server_name: str) -> list[Aim]:
    """The targets of a recorded plan, in its order."""
    return [Aim(name, entry.address, {}, server_name, entry.uid) for name, entry in ledger.items()]


def final_phase(results: Iterable[fleet_pb2.TargetResult], *, incomplete: bool) -> Phase:
    """How an operation whose every target has ended stands."""
    operation = fleet_pb2.FleetOperation(results=results, targets_incomplete=incomplete)
    return _PHASES[outcomes.final_state(operation)]


def summary(phase: Phase, results: Sequence[fleet_pb2.TargetResult], total: int) -> str:
    """One sentence for `kubectl get -o wide`: the first thing that went wrong, or that nothing did."""
    bad = [row for row in results if row.outcome != fleet_pb2.TARGET_OUTCOME_SUCCEEDED]
    if not bad:
        return f"all {total} targets succeeded"
    bad.sort(key=lambda row: (ORDER.index(_NAMES[row.outcome]), row.replica))
    first = bad[0]
    what = first.message or first.reason or first.code
    return f"{len(results) - len(bad)} of {total} targets succeeded; {first.replica}: {what}"[:MAX_MESSAGE]


def conditions(
    phase: str,
    message: str,
    now: str,
    generation: int,
    incomplete: bool | None,
    was: Sequence[Condition] | None = None,
    reason: str = "",
) -> list[Json]:
    """Complete and Succeeded, for `kubectl wait --for=condition=Complete`.

    `incomplete`: whether discovery may have missed targets, None before it was asked. `was`: the conditions on record,
    of which one that does not change keeps the time at which it began. `reason`: why it has not begun, where the phase
    does not say it.
    """
    ended = phase not in ("Pending", "Running", "Suspended")
    succeeded = "Unknown" if not ended else "True" if phase == "Succeeded" else "False"
    since = {(one.type, one.status): one.last_transition_time for one in was or ()}

    def one(kind: str, value: str, why: str, text: str) -> Json:
        return {
            "type": kind,
            "status": value,
            "reason": why,
            "message": text[:MAX_MESSAGE],
            "lastTransitionTime": since.get((kind, value)) or now,
            "observedGeneration": generation,
        }

    told = [
        one("Complete", "True" if ended else "False", reason or phase, message),
        one("Succeeded", succeeded, reason or phase, message),
    ]
    if incomplete:
        told.append(one("TargetsComplete", "False", "DiscoveryIncomplete", "discovery may have missed targets"))
    elif incomplete is not None:
        told.append(one("TargetsComplete", "True", "AllSeen", ""))
    return told


def changed_after_the_end(was: Status, now: str, generation: int) -> Patch:
    """What is written when a spec was changed after the end: that it was seen, and that nothing follows from it."""
    note = "changed after the end: nothing is run again"
    told = f"{was.message[: MAX_MESSAGE - len(note) - 2]}; {note}" if was.message else note
    resolved = any(one.type == "TargetsComplete" for one in was.conditions or ())
    incomplete = was.targets_incomplete if resolved else None
    told_at = was.completion_time or now
    return {
        "observedGeneration": generation,
        "conditions": conditions(was.phase, told, told_at, generation, incomplete, was.conditions),
    }
