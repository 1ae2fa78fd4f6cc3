"""Judges a history: every promise that it breaks, in words. Pure; see `history` for what it reads.

The rules:

* one effect: at most one of each kind for a request id, an engine and an incarnation of it; none that nobody asked for
* one end: every operation ends, with exactly one terminal row for each of its targets, those included that a rollout
  gave up on; what has ended never opens again, and a row that says for certain what happened never changes
* within max_unavailable: neither do engines work for more targets of one operation at once, nor are more said to be
  disrupted; one that a rollout gave up on counts until then, and for good when it gave up on its health
* the truth: "succeeded" had its effect, "not executed" and "skipped" never have one, a refusal changed nothing
* unknown: a lost answer is neither success nor failure, and what is unknown carries the id to ask by
* deadline: no engine takes a request up after the time its target had
* audit: the audit line was there before the effect
* floor: a run whose load had not reached its floor before the first fault proves nothing
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.robustness.history import TERMINAL, Called, Effect, Ended, Fault, Floor, History, Taken, Told

REFUSALS = frozenset({"FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED", "PERMISSION_DENIED"})
"""Codes by which a replica of one engine says that it changed nothing."""
UNCERTAIN = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"})
"""Codes that a transport makes by itself: without a sidecar's reason they say nothing about what happened."""


@dataclass(frozen=True)
class Violation:
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


def violations(history: History) -> list[Violation]:
    """Everything in this history that breaks a promise; empty when it keeps all of them."""
    run = _Run(history)
    return [
        *_one_effect(run),
        *_one_end(run),
        *_within_max_unavailable(run),
        *_truth(run),
        *_unknown(run),
        *_deadline(run),
        *_audit(run),
        *_floor(run),
    ]


def latest_start(history: History, operation_id: str, replica: str) -> int | None:
    """The instant after which no engine may take this target up; None when nothing is known of it."""
    run = _Run(history)
    return _latest_start(run, run.calls[operation_id], replica)


class _Run:
    """A history, indexed."""

    def __init__(self, history: History) -> None:
        self.calls = {event.operation_id: event for event in history if isinstance(event, Called)}
        self.owner = {request_id: call for call in self.calls.values() for request_id in call.request_ids}
        self.effects = [event for event in history if isinstance(event, Effect)]
        self.faults = [event for event in history if isinstance(event, Fault)]
        self.floors = [event for event in history if isinstance(event, Floor)]
        self.told: dict[str, list[Told]] = defaultdict(list)
        self.taken: dict[tuple[str, str, str], int] = {}
        self.ended: dict[tuple[str, str, str], int] = {}
        for event in history:
            match event:
                case Told():
                    self.told[event.operation_id].append(event)
                case Taken():
                    self.taken.setdefault((event.replica, event.incarnation, event.request_id), event.at_ns)
                case Ended():
                    self.ended.setdefault((event.replica, event.incarnation, event.request_id), event.at_ns)

    def had_effect(self, operation_id: str, replica: str) -> bool:
        return any(
            effect.replica == replica
            and effect.request_id in self.owner
            and self.owner[effect.request_id].operation_id == operation_id
            for effect in self.effects
        )

    def first_ends(self, operation_id: str) -> dict[str, str]:
        """Replica -> how it was first said to have ended."""
        ends: dict[str, str] = {}
        for told in self.told.get(operation_id, ()):
            for row in told.rows:
                if row.outcome in TERMINAL:
                    ends.setdefault(row.replica, row.outcome)
        return ends

    def finals(self) -> Iterator[tuple[Called, Told]]:
        """Each operation with every account of it since it had ended."""
        for operation_id, accounts in self.told.items():
            call = self.calls.get(operation_id)
            if call is not None:
                yield from ((call, told) for told in accounts if told.final)


def _one_effect(run: _Run) -> Iterator[Violation]:
    counted = Counter((e.request_id, e.replica, e.incarnation, e.effect) for e in run.effects)
    for (request_id, replica, incarnation, effect), times in counted.items():
        if times > 1:
            yield Violation("one effect", f"{times} x {effect} by {request_id} at {replica} ({incarnation[:8]})")
    for effect in run.effects:
        call = run.owner.get(effect.request_id)
        if call is None:
            yield Violation(
                "one effect", f"{effect.effect} at {effect.replica} by {effect.request_id}: asked by nobody"
            )
        elif call.request_ids[effect.request_id] != effect.replica:
            yield Violation(
                "one effect",
                f"{effect.effect} at {effect.replica} by {effect.request_id}, "
                f"which was for {call.request_ids[effect.request_id]}",
            )


def _one_end(run: _Run) -> Iterator[Violation]:
    for operation_id in run.calls:
        if not any(told.final for told in run.told.get(operation_id, ())):
            yield Violation("one end", f"operation {operation_id} never ended")
    for call, told in run.finals():
        rows = Counter(row.replica for row in told.rows)
        for replica in set(call.targets) | set(rows):
            if rows[replica] != (replica in call.targets):
                yield Violation("one end", f"{rows[replica]} rows for {replica} in operation {call.operation_id}")
        for row in told.rows:
            if row.outcome not in TERMINAL:
                yield Violation("one end", f"{row.replica} is {row.outcome!r} though {call.operation_id} has ended")
    for operation_id, accounts in run.told.items():
        if any(was.final and not told.final for was, told in pairwise(accounts)):
            yield Violation("one end", f"operation {operation_id} had ended and then went on")
        ended: dict[str, str] = {}
        for told in accounts:
            for row in told.rows:
                before = ended.get(row.replica, "")
                known_later = before == "unknown" and row.outcome in TERMINAL
                if before and before != row.outcome and not known_later:
                    yield Violation(
                        "one end", f"{row.replica} of {operation_id} was {before}, then {row.outcome or 'open'}"
                    )
                if row.outcome in TERMINAL:
                    ended[row.replica] = row.outcome


def _within_max_unavailable(run: _Run) -> Iterator[Violation]:
    for call in run.calls.values():
        if not call.max_unavailable:
            continue
        for told in run.told.get(call.operation_id, ()):
            disrupted = sum(row.outcome == "running" or bool(row.health) for row in told.rows)
            if disrupted > call.max_unavailable:
                yield Violation(
                    "within max_unavailable",
                    f"{disrupted} targets of {call.operation_id} are disrupted, {call.max_unavailable} may",
                )
        spans = [*_at_work(run, call), *_told_as_running(run, call)]
        for _, begun, _ in spans:
            at_once = {replica for replica, since, until in spans if since <= begun < until}
            if len(at_once) > call.max_unavailable:
                yield Violation(
                    "within max_unavailable",
                    f"{len(at_once)} engines worked for {call.operation_id} at once, {call.max_unavailable} may",
                )


def _at_work(run: _Run, call: Called) -> Iterator[tuple[str, int, int]]:
    """Replica, from when, until when: an engine's work whose answer the operation surely waited for."""
    ends = run.first_ends(call.operation_id)
    for key, begun in run.taken.items():
        replica, _, request_id = key
        if request_id in call.request_ids and ends.get(replica) == "succeeded" and key in run.ended:
            yield replica, begun, run.ended[key]


def _told_as_running(run: _Run, call: Called) -> Iterator[tuple[str, int, int]]:
    """Replica, from when, until when: from an engine's first work to the last instant at which the target was surely
    not given up yet. Its engine may work on after that, and the operation has gone on.
    """
    begun: dict[str, int] = {}
    for (replica, _, request_id), at_ns in run.taken.items():
        if request_id in call.request_ids:
            begun[replica] = min(at_ns, begun.get(replica, at_ns))
    until: dict[str, int] = {}
    for told in run.told.get(call.operation_id, ()):
        until.update({row.replica: told.asked_ns for row in told.rows if row.outcome == "running"})
    yield from ((replica, begun[replica], until[replica]) for replica in begun.keys() & until.keys())


def _truth(run: _Run) -> Iterator[Violation]:
    for call, told in run.finals():
        for row in told.rows:
            did = run.had_effect(call.operation_id, row.replica)
            if row.outcome == "succeeded" and not did:
                yield Violation("the truth", f"{row.replica} of {call.operation_id} succeeded and has had no effect")
            nothing = row.execution == "not_executed" or row.outcome in ("skipped", "cancelled")
            refused = row.outcome == "failed" and row.code in REFUSALS
            if did and (nothing or refused):
                said = row.execution or f"{row.outcome} {row.code}"
                yield Violation("the truth", f"{row.replica} of {call.operation_id} was {said} and has had an effect")


def _unknown(run: _Run) -> Iterator[Violation]:
    for call, told in run.finals():
        for row in told.rows:
            if row.outcome == "failed" and row.code in UNCERTAIN and not row.reason and row.execution != "not_executed":
                yield Violation(
                    "unknown", f"{row.replica} of {call.operation_id} failed with {row.code}: that answer was lost"
                )
            if row.outcome == "unknown" and (row.execution != "unknown" or not row.request_id):
                yield Violation("unknown", f"{row.replica} of {call.operation_id} is unknown and cannot be asked for")


def _deadline(run: _Run) -> Iterator[Violation]:
    for effect in run.effects:
        call = run.owner.get(effect.request_id)
        if call is None:
            continue
        latest = _latest_start(run, call, effect.replica)
        if latest is not None and effect.taken_ns > latest:
            late_s = (effect.taken_ns - latest) / 1e9
            yield Violation(
                "deadline", f"{effect.effect} at {effect.replica} by {effect.request_id}: {late_s:.2f} s too late"
            )


def _latest_start(run: _Run, call: Called, replica: str) -> int | None:
    """When this target's time was surely over; None when nothing is known of it.

    Its time had begun when it was first seen under way or ended. A coordinator that starts anew gives what it resumes a
    time of its own.
    """
    begun = None
    over = None
    for told in run.told.get(call.operation_id, ()):
        for row in told.rows:
            if row.replica == replica and (row.outcome == "running" or row.outcome in TERMINAL):
                begun = told.at_ns if begun is None else begun
        if told.final and over is None:
            over = told.at_ns
    if begun is None:
        return None
    for fault in run.faults:
        if fault.whom == "coordinator" and fault.what == "start" and (over is None or fault.at_ns < over):
            begun = max(begun, fault.at_ns)
    return begun + int(call.timeout_s * 1e9)


def _audit(run: _Run) -> Iterator[Violation]:
    for effect in run.effects:
        if not effect.audited:
            yield Violation("audit", f"{effect.effect} at {effect.replica} by {effect.request_id} came before its line")


def _floor(run: _Run) -> Iterator[Violation]:
    if not run.floors:
        yield Violation("floor", "the run names no load that had to be there before its first fault")
        return
    wanted = max(floor.operations for floor in run.floors)
    first = min((fault.at_ns for fault in run.faults), default=None)
    done = {
        told.operation_id
        for accounts in run.told.values()
        for told in accounts
        if told.final and (first is None or told.at_ns < first) and all(row.outcome == "succeeded" for row in told.rows)
    }
    if len(done) < wanted:
        yield Violation("floor", f"{len(done)} operations had succeeded before the first fault, {wanted} were to")
