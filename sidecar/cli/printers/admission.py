"""Admission of a fleet: a row an engine, the sentence that explains what stalls, and one line a change when watched.

What needs a look comes last, where it stays on the screen after many rows.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.duration_pb2 import Duration
from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Console
from rich.text import Text

from sidecar.cli.printers.style import clean, fitting, named, seconds, table, words
from sidecar.coordinator.outcomes import TARGET_NOT_READY, enum_word

GOOD: Final = frozenset({types_pb2.VERDICT_IDLE, types_pb2.VERDICT_FLOWING})
BAD: Final = frozenset(
    {
        types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK,
        types_pb2.VERDICT_HEAD_CANNOT_FIT,
        types_pb2.VERDICT_BLOCKS_LEAKED,
        types_pb2.VERDICT_ENGINE_HUNG,
        types_pb2.VERDICT_ENGINE_STOPPED,
        types_pb2.VERDICT_ENGINE_DEAD,
    }
)


def verdict_name(verdict: types_pb2.Verdict.ValueType) -> str:
    """FLOWING, HELD_BLOCKS_DEADLOCK, ...; a verdict of a newer sidecar by its number."""
    return enum_word(types_pb2.Verdict.DESCRIPTOR, verdict, "VERDICT_").upper()


def tone(engine: types_pb2.EngineAdmission) -> str:
    """Colour of a verdict."""
    if engine.stalled or engine.verdict in BAD:
        return "bad"
    return "good" if engine.verdict in GOOD else "doubtful"


def instead(replica: fleet_pb2.ReplicaAdmission) -> Text:
    """What stands in the place of a verdict for a replica without one: it was skipped, or the code of the call."""
    skipped = replica.reason == TARGET_NOT_READY
    return words("SKIPPED", "doubtful") if skipped else words(replica.code, "bad")


def known(number: int) -> str:
    """A count; "-" when this backend cannot know it."""
    return "-" if number < 0 else str(number)


def length(duration: Duration) -> float:
    """Seconds."""
    return float(duration.seconds) + duration.nanos / 1e9


_COLUMNS: Final = ("REPLICA", "ENGINE", "VERDICT", "FOR", "RUN", "WAIT", "FREE", "BLOCKS", "OLDEST")


def print_table(console: Console, fleet: fleet_pb2.FleetAdmissionResponse) -> None:
    """A row an engine, readable at 80 columns; a sentence under it for each that needs one."""
    rows: list[list[Text]] = []
    for replica in in_order(fleet):
        for engine in replica.admission.engines:
            rows.append(
                [
                    words(replica.replica),
                    words(str(engine.engine.data_parallel_rank)),
                    words(verdict_name(engine.verdict), tone(engine)),
                    words(seconds(length(engine.verdict_for))),
                    words(known(engine.requests.running)),
                    words(known(engine.requests.waiting)),
                    words(known(engine.blocks.free)),
                    words(known(engine.blocks.total)),
                    words(seconds(length(engine.oldest_waiting)) if engine.requests.waiting > 0 else "-"),
                ]
            )
        if replica.code != "OK":
            rows.append([words(replica.replica), words("-"), instead(replica), *[words("-")] * 6])
    shown = fitting(_COLUMNS, rows, console.width, least=3)
    made = table(*_COLUMNS[:shown])
    for row in rows:
        made.add_row(*row[:shown])
    if fleet.replicas:
        console.print(made)
    for line in remarks(fleet):
        console.print(line)


def print_wide(console: Console, fleet: fleet_pb2.FleetAdmissionResponse) -> None:
    """A row an engine with every figure."""
    made = table(
        "REPLICA", "ADDRESS", "ENGINE", "VERDICT", "STALLED", "FOR", "RUN", "WAIT", "REMOTE", "HOLDING", "FREE",
        "CACHED", "BLOCKS", "ORPHANED", "HEAD NEEDS", "TOKENS/S", "STEPS", "CONTIGUITY", "WEIGHTS",
        "LAST RESET", "EXPLANATION",
    )  # fmt: skip
    for replica in in_order(fleet):
        for engine in replica.admission.engines:
            requests, blocks = engine.requests, engine.blocks
            rate = engine.tokens_per_second
            made.add_row(
                words(replica.replica),
                words(replica.address),
                words(str(engine.engine.data_parallel_rank)),
                words(verdict_name(engine.verdict), tone(engine)),
                words("yes" if engine.stalled else "no"),
                words(seconds(length(engine.verdict_for))),
                *[words(known(n)) for n in (requests.running, requests.waiting)],
                *[words(known(n)) for n in (requests.waiting_remote_kv, requests.waiting_holding_blocks)],
                *[words(known(n)) for n in (blocks.free, blocks.cached, blocks.total, blocks.orphaned)],
                words(str(engine.head.blocks_needed) if engine.HasField("head") else "-"),
                words("-" if rate < 0 else f"{rate:.0f}"),
                words(str(engine.steps)),
                words(f"{engine.contiguity.ratio:.2f}" if engine.HasField("contiguity") else "-"),
                words(engine.weight_version or "-"),
                words(last_reset(engine)),
                words(engine.explanation),
            )
        if replica.code != "OK":
            head = [words(replica.replica), words(replica.address), words("-"), instead(replica)]
            made.add_row(*head, *[words("-")] * 16, words(replica.message))
    if fleet.replicas:
        console.print(made)
    for line in remarks(fleet):
        console.print(line)


def last_reset(engine: types_pb2.EngineAdmission) -> str:
    """As in: 2.0 s ago (keep)."""
    if not engine.HasField("since_last_reset"):
        return "-"
    mode = enum_word(types_pb2.RunningRequests.DESCRIPTOR, engine.last_reset_mode, "RUNNING_REQUESTS_")
    return f"{seconds(length(engine.since_last_reset))} ago ({mode})"


def remarks(fleet: fleet_pb2.FleetAdmissionResponse) -> list[str]:
    """A sentence for each engine that stalls or warns, and each replica that did not answer."""
    lines = []
    for replica in in_order(fleet):
        for engine in replica.admission.engines:
            where = f"{replica.replica} engine {engine.engine.data_parallel_rank}"
            if engine.explanation and (engine.stalled or tone(engine) == "bad"):
                lines.append(f"{where}: {engine.explanation}")
            if engine.verdict == types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK:
                lines.append(f"  -> kvctl relieve --replicas {replica.replica}")
            lines += [f"{where}: {warning}" for warning in engine.warnings]
    lines += _not_reached(fleet)
    if fleet.incomplete:
        lines.append("the list of replicas may be incomplete")
    return [clean(line) if not line.startswith("  ") else "  " + clean(line[2:]) for line in lines]


def in_order(fleet: fleet_pb2.FleetAdmissionResponse) -> list[fleet_pb2.ReplicaAdmission]:
    """Replicas as they are shown: well, then in doubt or skipped, stalled, not reached."""
    return sorted(fleet.replicas, key=lambda replica: (_place(replica), replica.replica, replica.address))


def _place(replica: fleet_pb2.ReplicaAdmission) -> int:
    if replica.reason == TARGET_NOT_READY:
        return 1
    if replica.code != "OK":
        return 3
    tones = {tone(engine) for engine in replica.admission.engines}
    return 2 if "bad" in tones else 1 if "doubtful" in tones else 0


def _not_reached(fleet: fleet_pb2.FleetAdmissionResponse) -> list[str]:
    """Why replicas did not answer; a reason that several share once, with how many and the first names."""
    reasons: dict[str, list[str]] = {}
    for replica in in_order(fleet):
        if replica.code != "OK":
            text = replica.message.removeprefix(f"{replica.address}: ").replace(f" from {replica.address}", "")
            reasons.setdefault(text or replica.code, []).append(replica.replica)
    return [f"{named(names)}: {text}" for text, names in sorted(reasons.items(), key=lambda item: -len(item[1]))]


def change_line(when: str, sample: fleet_pb2.WatchFleetAdmissionResponse) -> list[str]:
    """One line an engine for a sample of a watch."""
    replica = sample.replica
    if replica.code != "OK":
        return [clean(f"{when}  {replica.replica}  {instead(replica).plain}  {replica.message}")]
    lines = []
    for engine in replica.admission.engines:
        figures = (
            f"run {known(engine.requests.running)} wait {known(engine.requests.waiting)} "
            f"free {known(engine.blocks.free)}/{known(engine.blocks.total)}"
        )
        text = f"  {engine.explanation}" if engine.stalled and engine.explanation else ""
        name = verdict_name(engine.verdict)
        lines.append(clean(f"{when}  {replica.replica}/{engine.engine.data_parallel_rank}  {name}  {figures}{text}"))
    return lines
