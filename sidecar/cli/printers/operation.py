"""A fleet operation as a table: a row a replica (wide: a row an engine), then what it came to and what to do.

What needs a look comes last: at the end of 200 rows the two that refused are the ones still on the screen. What many
replicas say in the same words is said once, under the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvctl.v1 import fleet_pb2
from rich.console import Console
from rich.table import Table

from sidecar.cli.printers import advice, effects
from sidecar.cli.printers.operations import state_name
from sidecar.cli.printers.style import clean, count, named, seconds, table, words

OUTCOMES: Final = {
    fleet_pb2.TARGET_OUTCOME_UNSPECIFIED: ("waiting", "quiet"),
    fleet_pb2.TARGET_OUTCOME_RUNNING: ("running", "quiet"),
    fleet_pb2.TARGET_OUTCOME_SUCCEEDED: ("succeeded", "good"),
    fleet_pb2.TARGET_OUTCOME_FAILED: ("failed", "bad"),
    fleet_pb2.TARGET_OUTCOME_UNREACHABLE: ("unreachable", "bad"),
    fleet_pb2.TARGET_OUTCOME_UNKNOWN: ("unknown", "doubtful"),
    fleet_pb2.TARGET_OUTCOME_SKIPPED: ("skipped", "quiet"),
    fleet_pb2.TARGET_OUTCOME_CANCELLED: ("cancelled", "quiet"),
}
"""Outcome -> (word, tone)."""

REPLAYED: Final = " (recorded earlier, nothing ran now)"
REPLAYED_SHORT: Final = " (recorded earlier)"

SAID_BY_MANY: Final = 4
"""Replicas with one text from which on it is said once, under the table."""

_Text = tuple[str, str, str]
"""Code, reason and message of a failure."""


def print_table(console: Console, operation: fleet_pb2.FleetOperation) -> None:
    """A row a replica, one line each where it succeeded, readable at 80 columns, and the summary, which has the codes.
    A roomy terminal has them in the rows too.
    """
    roomy = console.width >= ROOMY
    made = table(*_BESIDE, *(["CODE"] if roomy else []), "WHAT HAPPENED")
    common = _said_by_many(operation)
    rows = in_order(operation.results)
    detail = "full" if roomy else _fitting(rows, operation.spec, console.width)
    for row in rows:
        word, tone = _outcome(row)
        text = row.reason if row.reason and _text(row) in common else told(row, operation.spec, detail)
        code = [words(row.code or "-")] if roomy else []
        made.add_row(words(row.replica), words(word, tone), *code, words(text))
    _show(console, made, operation)


ROOMY: Final = 120
"""Columns from which on each row has its code, and as many words as there are."""

_BESIDE: Final = ("REPLICA", "OUTCOME")
"""Columns beside what happened."""


def _fitting(rows: Sequence[fleet_pb2.TargetResult], spec: fleet_pb2.OperationSpec, width: int) -> effects.Detail:
    """The most detail in which every success has a line of its own, or the least there is."""
    beside = sum(
        2 + max(words(each).cell_len for each in (head, *column))
        for head, column in zip(
            _BESIDE, ([row.replica for row in rows], [_outcome(row)[0] for row in rows]), strict=True
        )
    )
    done = [row for row in rows if row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED and not row.health]
    for detail in effects.DETAILS:
        if all(words(told(row, spec, detail)).cell_len <= width - beside for row in done):
            return detail
    return effects.DETAILS[-1]


def in_order(rows: Iterable[fleet_pb2.TargetResult]) -> list[fleet_pb2.TargetResult]:
    """Rows as they are shown: those that succeeded, those not finished, those not called, those that a rollout waits
    for or found ill, then what went wrong.
    """
    return sorted(rows, key=lambda row: (_place(row), row.replica, row.address))


def _place(row: fleet_pb2.TargetResult) -> int:
    return _ILL if row.health else _PLACES.get(row.outcome, _LAST)


_PLACES: Final = {
    fleet_pb2.TARGET_OUTCOME_SUCCEEDED: 0,
    fleet_pb2.TARGET_OUTCOME_UNSPECIFIED: 1,
    fleet_pb2.TARGET_OUTCOME_RUNNING: 1,
    fleet_pb2.TARGET_OUTCOME_CANCELLED: 2,
    fleet_pb2.TARGET_OUTCOME_SKIPPED: 2,
    fleet_pb2.TARGET_OUTCOME_FAILED: 4,
}
_ILL: Final = 3
_LAST: Final = 5


def _outcome(row: fleet_pb2.TargetResult) -> tuple[str, str]:
    """The word for how it ended, and its tone; one that stalls afterwards is no good news."""
    word, tone = OUTCOMES.get(row.outcome, (f"outcome {row.outcome}", "doubtful"))
    return word, "doubtful" if row.health else tone


def _said_by_many(operation: fleet_pb2.FleetOperation) -> dict[_Text, int]:
    """Texts that so many replicas share that they are shown once, with how many."""
    counts = Counter(_text(row) for row in operation.results if row.outcome in _TO_EXPLAIN and not effects.of_row(row))
    return {text: number for text, number in counts.items() if number >= SAID_BY_MANY}


def _text(row: fleet_pb2.TargetResult) -> _Text:
    """With the address taken out, in which alone the texts of unreachable replicas differ."""
    message = row.message.removeprefix(f"{row.address}: ").replace(f" from {row.address}", "") if row.address else ""
    return row.code, row.reason, message or row.message


def print_wide(console: Console, operation: fleet_pb2.FleetOperation) -> None:
    """A row an engine with every figure, as wide as it needs, and the summary."""
    made = table("REPLICA", "ADDRESS", "ENGINE", "OUTCOME", "CODE", "TRIES", "TOOK", "WHAT HAPPENED")
    for row in in_order(operation.results):
        word, tone = _outcome(row)
        took = seconds(row.took.seconds + row.took.nanos / 1e9) if row.HasField("took") else "-"
        engines = list(_engines(row, operation.spec)) or [("-", row.code or "-", _reason_and(row.reason, row.message))]
        if row.health:
            rank, code, text = engines[-1]
            engines[-1] = rank, code, f"{text}; {row.health}"
        for rank, code, text in engines:
            shown = (
                (word, tone)
                if code in (row.code, "-")
                else ("succeeded", "good")
                if code == "OK"
                else ("failed", "bad")
            )
            made.add_row(
                words(row.replica),
                words(row.address),
                words(rank),
                words(*shown),
                words(code),
                words(str(row.attempts)),
                words(took),
                words(text),
            )
    _show(console, made, operation)


def told(
    row: fleet_pb2.TargetResult, spec: fleet_pb2.OperationSpec | None = None, detail: effects.Detail = "full"
) -> str:
    """The right-hand column: the effect, or the reason with the replica's own words."""
    effect = effects.of_row(row, spec, detail)
    if row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED:
        otherwise = _forecast(spec) if spec and spec.validate_only else "done"
        health = f"; {row.health}" if row.health else ""
        earlier = (REPLAYED if detail == "full" else REPLAYED_SHORT) if _replayed(row) else ""
        return (effect or row.message or otherwise) + earlier + health
    if row.outcome in (fleet_pb2.TARGET_OUTCOME_UNSPECIFIED, fleet_pb2.TARGET_OUTCOME_RUNNING):
        return row.message
    text = _reason_and(row.reason, _text(row)[2] if row.replica == row.address else row.message)
    if row.reset.validate_only or row.reorder.validate_only or row.relieve.validate_only:
        return f"would refuse: {text}"
    return f"{text}; the other engines: {effect}" if effect else text


def _forecast(spec: fleet_pb2.OperationSpec) -> str:
    """What a dry run knows that brought no figures."""
    kind = spec.WhichOneof("operation")
    if kind in ("pause", "resume"):
        return f"answers; whether its engines would {kind} is not checked"
    return "would run: the request is accepted"


def summary(operation: fleet_pb2.FleetOperation) -> list[str]:
    """The lines under a table: sums, groups of failures with what to do, and the id."""
    counts = operation.counts
    parts = [f"{getattr(counts, word)} {word}" for word in _COUNTED if getattr(counts, word)]
    missing = counts.total - sum(getattr(counts, word) for word in _COUNTED)
    if missing:
        parts.append(f"{missing} not finished")
    took = seconds(operation.took.seconds + operation.took.nanos / 1e9) if operation.HasField("took") else ""
    head = f"{count(counts.total, 'replica')}: {', '.join(parts) or 'nothing done'}"
    lines = [head + (f" in {took}" if took else "")]
    if operation.spec.validate_only:
        lines[0] += " (dry run: nothing was changed)"
    if restarted := effects.would_restart(operation):
        lines.append(f"it would restart {count(restarted, 'running request')}, whose tokens are computed again")
    lines += _groups(operation)
    if operation.targets_incomplete:
        lines.append("the list of replicas may be incomplete; those not found were not called")
    state = state_name(operation.state) if operation.state else ""
    lines.append(f"operation {operation.operation_id}" + (f" ({state})" if state else ""))
    paused, unknown = operation.counts.succeeded, operation.counts.unknown
    if (paused or unknown) and operation.spec.HasField("pause") and not operation.spec.validate_only:
        also = ", also where it is not known whether it holds" if unknown else ""
        lines.append(f"  -> `kvctl scheduling resume --pause` with this id ends it{also}")
    if operation.state == fleet_pb2.OPERATION_STATE_PAUSED:
        lines.append("  -> `kvctl ops resume` with this id lets it go on")
    return lines


_COUNTED: Final = ("succeeded", "failed", "unreachable", "unknown", "skipped", "cancelled")


def _groups(operation: fleet_pb2.FleetOperation) -> Iterator[str]:
    common = _said_by_many(operation)
    at_coordinator = bool(operation.version)  # only what a coordinator has on record has versions
    groups: dict[tuple[str, str], list[str]] = {}
    for row in in_order(operation.results):
        if row.outcome in _TO_EXPLAIN:
            groups.setdefault((row.code, row.reason), []).append(row.replica)
    for (code, reason), names in sorted(groups.items(), key=lambda item: -len(item[1])):
        yield f"  {code} {reason}: {named(names)}".replace(" :", ":")
        for text, number in common.items():
            if text[:2] == (code, reason) and text[2]:
                yield f"    {number} say: {text[2]}"
        if hint := advice.advise(reason, operation.operation_id, operation.kind, at_coordinator=at_coordinator):
            yield f"    -> {hint}"


_TO_EXPLAIN: Final = frozenset(
    {
        fleet_pb2.TARGET_OUTCOME_FAILED,
        fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
        fleet_pb2.TARGET_OUTCOME_UNKNOWN,
        fleet_pb2.TARGET_OUTCOME_SKIPPED,
    }
)


def _engines(row: fleet_pb2.TargetResult, spec: fleet_pb2.OperationSpec) -> Iterator[tuple[str, str, str]]:
    """Rank, code and text of each engine."""
    which = row.WhichOneof("result")
    if which is None:
        return
    engines = getattr(row, which).engines
    for engine in engines:
        status = engine.status
        if status.code:
            text = _reason_and(status.reason, status.message or (row.message if len(engines) == 1 else ""))
        elif which == "reset":
            if row.reset.validate_only:
                text = effects.would_reset([engine], spec.reset)
            else:
                text = f"{effects.reset([engine], with_tiers=False)}; {effects.tiers(engine)}".rstrip("; ")
        elif which == "reorder":
            text = effects.reorder([engine], row.reorder.validate_only)
        elif which == "relieve":
            text = effects.relieve([engine], row.relieve.validate_only)
        else:
            text = effects.scheduling([engine])
        if status.replayed:
            text += REPLAYED
        yield str(status.engine.data_parallel_rank), effects.code_name(status.code), text


def _replayed(row: fleet_pb2.TargetResult) -> bool:
    """Whether every engine's result is one on record."""
    which = row.WhichOneof("result")
    engines = getattr(row, which).engines if which else []
    return bool(engines) and all(engine.status.replayed for engine in engines)


def _reason_and(reason: str, message: str) -> str:
    return f"{reason}: {message}" if reason and message else reason or message or "no reason given"


def _show(console: Console, made: Table, operation: fleet_pb2.FleetOperation) -> None:
    if operation.results:
        console.print(made)
    print_lines(console, summary(operation))


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Lines as they are, folded at the console's width."""
    for line in lines:
        console.print(clean(line))
