"""A fleet operation as a table: a row a replica (wide: a row an engine), then what it came to and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvctl.v1 import fleet_pb2
from rich.console import Console
from rich.table import Table

from sidecar.cli.printers import advice, effects
from sidecar.cli.printers.style import clean, count, seconds, table, words

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

NAMES_IN_SUMMARY: Final = 6


def print_table(console: Console, operation: fleet_pb2.FleetOperation) -> None:
    """A row a replica, readable at 80 columns, and the summary."""
    made = table("REPLICA", "OUTCOME", "CODE", "WHAT HAPPENED")
    for row in operation.results:
        word, tone = OUTCOMES.get(row.outcome, (f"outcome {row.outcome}", "doubtful"))
        made.add_row(words(row.replica), words(word, tone), words(row.code or "-"), words(told(row)))
    _show(console, made, operation)


def print_wide(console: Console, operation: fleet_pb2.FleetOperation) -> None:
    """A row an engine with every figure, as wide as it needs, and the summary."""
    made = table("REPLICA", "ADDRESS", "ENGINE", "OUTCOME", "CODE", "TRIES", "TOOK", "WHAT HAPPENED")
    for row in operation.results:
        word, tone = OUTCOMES.get(row.outcome, (f"outcome {row.outcome}", "doubtful"))
        took = seconds(row.took.seconds + row.took.nanos / 1e9) if row.HasField("took") else "-"
        engines = list(_engines(row)) or [("-", row.code or "-", _reason_and(row.reason, row.message))]
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


def told(row: fleet_pb2.TargetResult) -> str:
    """The right-hand column: the effect, or the reason with the replica's own words."""
    effect = effects.of_row(row)
    if row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED:
        return (effect or row.message or "done") + (REPLAYED if _replayed(row) else "")
    if row.outcome in (fleet_pb2.TARGET_OUTCOME_UNSPECIFIED, fleet_pb2.TARGET_OUTCOME_RUNNING):
        return row.message
    text = _reason_and(row.reason, row.message)
    dry = row.reset.validate_only or row.reorder.validate_only or row.relieve.validate_only
    return f"{text}; the other engines: {effect}" if effect and not dry else text


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
    lines += _groups(operation)
    if operation.targets_incomplete:
        lines.append("the list of replicas may be incomplete; those not found were not called")
    lines.append(f"operation {operation.operation_id}")
    return lines


_COUNTED: Final = ("succeeded", "failed", "unreachable", "unknown", "skipped", "cancelled")


def _groups(operation: fleet_pb2.FleetOperation) -> Iterator[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for row in operation.results:
        if row.outcome in _TO_EXPLAIN:
            groups.setdefault((row.code, row.reason), []).append(row.replica)
    for (code, reason), names in sorted(groups.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(names[:NAMES_IN_SUMMARY])
        rest = len(names) - NAMES_IN_SUMMARY
        yield f"  {code} {reason}: {shown}{f' and {rest} more' if rest > 0 else ''}".replace(" :", ":")
        if hint := advice.advise(reason, operation.operation_id, operation.kind):
            yield f"    -> {hint}"


_TO_EXPLAIN: Final = frozenset(
    {
        fleet_pb2.TARGET_OUTCOME_FAILED,
        fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
        fleet_pb2.TARGET_OUTCOME_UNKNOWN,
        fleet_pb2.TARGET_OUTCOME_SKIPPED,
    }
)


def _engines(row: fleet_pb2.TargetResult) -> Iterator[tuple[str, str, str]]:
    """Rank, code and text of each engine."""
    which = row.WhichOneof("result")
    if which is None:
        return
    for engine in getattr(row, which).engines:
        status = engine.status
        if status.code:
            text = _reason_and(status.reason, status.message)
        elif which == "reset":
            effect = effects.reset([engine], row.reset.validate_only, with_tiers=False)
            text = f"{effect}; {effects.tiers(engine)}".rstrip("; ")
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
