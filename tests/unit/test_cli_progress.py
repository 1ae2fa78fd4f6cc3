"""The line that says how far an operation is, and for whom it waits."""

from __future__ import annotations

import io

from kvctl.v1 import fleet_pb2

from sidecar.cli.progress import Progress

SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED
ILL = "waiting for it to be healthy (58 s left): HELD_BLOCKS_DEADLOCK for 12 s"


def text_after(*rows: fleet_pb2.TargetResult, targets: int = 4) -> str:
    progress = Progress(io.StringIO())
    for row in rows:
        progress.changed(row, targets)
    return progress.text(targets)


def row(name: str, outcome: int = SUCCEEDED, health: str = "") -> fleet_pb2.TargetResult:
    return fleet_pb2.TargetResult(replica=name, outcome=outcome, health=health)


def test_it_counts_and_names_the_last_ones_it_waits_for() -> None:
    running = [row(f"r{number}", fleet_pb2.TARGET_OUTCOME_RUNNING) for number in range(3)]
    failed = row("r0", fleet_pb2.TARGET_OUTCOME_FAILED)
    assert text_after(*running, failed) == "1 of 4 done, 1 not succeeded, waiting for r1, r2"


def test_between_two_waves_it_says_whose_health_is_waited_for_until_it_is_well() -> None:
    assert text_after(row("r0"), row("r0", health=ILL)) == f"1 of 4 done, r0: {ILL}"
    assert text_after(row("r0", health=ILL), row("r0")) == "1 of 4 done"
    assert text_after(row("r0", health="x"), row("r1", health=ILL)) == f"2 of 4 done, r1: {ILL}"


def test_nobody_waits_for_those_whose_turn_has_not_come_as_a_coordinator_tells_of_them() -> None:
    later = row("r1", fleet_pb2.TARGET_OUTCOME_UNSPECIFIED)
    assert text_after(later, row("r0", health=ILL)) == f"1 of 4 done, r0: {ILL}"


def test_a_health_cannot_control_the_terminal() -> None:
    assert "\x1b" not in text_after(row("r0", health="evil \x1b[31m"))
