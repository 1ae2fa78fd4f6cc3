"""The checker itself: a history that breaks a rule is caught by that rule, the one that keeps all of them passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from tests.robustness.checker import violations
from tests.robustness.history import AnyEvent, Called, Effect, Ended, Fault, Floor, Row, Taken, Tape, Told, read

SECOND = 1_000_000_000


@dataclass
class Story:
    """A run of two replicas, r0 and r1, told line by line; `at` is in seconds."""

    events: list[AnyEvent] = field(default_factory=lambda: [Floor(at_ns=0, operations=0)])

    def call(self, at: float, operation: str = "op", timeout_s: float = 5, max_unavailable: int = 0) -> Story:
        ids = {f"{operation}/{replica}": replica for replica in ("r0", "r1")}
        return self._add(
            Called(
                at_ns=_ns(at),
                operation_id=operation,
                targets=["r0", "r1"],
                request_ids=ids,
                timeout_s=timeout_s,
                max_unavailable=max_unavailable,
            )
        )

    def work(
        self,
        at: float,
        replica: str,
        *,
        request_id: str = "",
        effects: int = 1,
        lasts: float = 0.1,
        incarnation: str = "first",
        audited: bool = True,
    ) -> Story:
        """An engine takes a request up, does it, and answers."""
        who = {"replica": replica, "incarnation": incarnation, "request_id": request_id or f"op/{replica}"}
        self._add(Taken(at_ns=_ns(at), **who))
        for _ in range(effects):
            self._add(Effect(at_ns=_ns(at) + 1, effect="reset", taken_ns=_ns(at), audited=audited, **who))
        return self._add(Ended(at_ns=_ns(at + lasts), **who))

    def tell(self, at: float, *rows: Row, final: bool = True, operation: str = "op") -> Story:
        told = Told(at_ns=_ns(at), operation_id=operation, rows=rows, final=final, asked_ns=_ns(at - 0.01))
        return self._add(told)

    def fault(self, at: float, what: str = "kill", whom: str = "r0 sidecar") -> Story:
        return self._add(Fault(at_ns=_ns(at), what=what, whom=whom))

    def floor(self, operations: int) -> Story:
        return self._add(Floor(at_ns=0, operations=operations))

    def broken(self) -> list[str]:
        return [violation.rule for violation in violations(self.events)]

    def _add(self, event: AnyEvent) -> Story:
        self.events.append(event)
        return self


def _ns(seconds: float) -> int:
    return int(seconds * SECOND)


def row(replica: str, outcome: str = "succeeded", **more: str) -> Row:
    return Row(replica, outcome, request_id=f"op/{replica}", **more)


UNKNOWN = row("r0", "unknown", code="UNAVAILABLE", execution="unknown")


def both_done() -> Story:
    return Story().call(1).work(1.1, "r0").work(1.1, "r1").tell(2, row("r0"), row("r1"))


def test_a_history_that_keeps_every_promise_passes() -> None:
    story = Story().floor(1).call(1, max_unavailable=1)
    story.tell(1.05, row("r0", "running"), row("r1", ""), final=False)
    story.work(1.1, "r0").tell(1.25, row("r0"), row("r1", "running"), final=False).work(1.3, "r1")
    story.tell(2, row("r0"), row("r1")).fault(3)
    assert story.broken() == []


def test_two_effects_of_one_request_id_in_one_incarnation_are_caught() -> None:
    assert both_done().work(2.1, "r0").broken() == ["one effect"]
    assert both_done().work(2.1, "r0", effects=0).broken() == []


def test_a_successor_of_the_engine_may_do_it_again() -> None:
    assert both_done().work(2.1, "r0", incarnation="second").broken() == []


def test_an_effect_that_nobody_asked_for_or_for_somebody_else_is_caught() -> None:
    assert both_done().work(2.1, "r0", request_id="stray").broken() == ["one effect"]
    assert both_done().work(2.1, "r0", request_id="op/r1").broken() == ["one effect"]


def test_an_operation_without_an_end_is_caught() -> None:
    story = Story().call(1).work(1.1, "r0").tell(1.2, row("r0"), row("r1", "running"), final=False)
    assert story.broken() == ["one end"]


@pytest.mark.parametrize(
    "rows",
    [
        (row("r0"),),
        (row("r0"), row("r1"), row("r1")),
        (row("r0"), row("r1"), row("r2", "skipped")),
        (row("r0"), row("r1", "running")),
        (row("r0"), row("r1", "")),
    ],
    ids=["missing", "twice", "never asked for", "under way", "not begun"],
)
def test_a_target_without_exactly_one_terminal_row_is_caught(rows: Sequence[Row]) -> None:
    story = Story().call(1).work(1.1, "r0").work(1.1, "r1").tell(2, *rows)
    assert set(story.broken()) == {"one end"}


@pytest.mark.parametrize(
    "rows",
    [
        (UNKNOWN,),
        (UNKNOWN, row("r1", "skipped"), row("r1", "skipped")),
        (UNKNOWN, row("r1", "")),
        (row("r1", "skipped"),),
    ],
    ids=["never called", "never called, twice", "still to come", "given up"],
)
def test_a_target_that_a_rollout_gave_up_on_without_exactly_one_result_is_caught(rows: Sequence[Row]) -> None:
    def ending(*told: Row) -> list[str]:
        return Story().call(1, max_unavailable=1).work(1.1, "r0", lasts=9).tell(2, *told).broken()

    assert ending(UNKNOWN, row("r1", "skipped")) == []
    assert set(ending(*rows)) == {"one end"}


def test_a_result_that_is_taken_back_is_caught() -> None:
    story = Story().call(1).work(1.1, "r0").work(1.1, "r1").tell(1.5, UNKNOWN, row("r1", "running"), final=False)
    assert story.tell(1.6, row("r0", "running"), row("r1"), final=False).tell(2, row("r0"), row("r1")).broken() == [
        "one end"
    ]
    assert both_done().tell(3, row("r0"), row("r1"), final=False).broken() == ["one end"]


def test_a_certain_row_that_changes_later_is_caught_and_an_unknown_one_may_become_known() -> None:
    assert both_done().tell(3, row("r0", "failed", code="INTERNAL"), row("r1")).broken() == ["one end"]
    learned = Story().call(1).work(1.1, "r0").work(1.1, "r1").tell(2, UNKNOWN, row("r1")).tell(3, row("r0"), row("r1"))
    assert learned.broken() == []


def test_more_engines_at_work_at_once_than_may_be_are_caught() -> None:
    def at(second: float) -> Story:
        story = Story().call(1, max_unavailable=1).work(1.1, "r0", lasts=0.5).work(second, "r1")
        return story.tell(3, row("r0"), row("r1"))

    assert at(1.5).broken() == ["within max_unavailable"]
    assert at(1.6).broken() == []


def test_a_target_that_was_given_up_on_counts_until_then_and_is_not_waited_for_after() -> None:
    def called_next_at(second: float) -> list[str]:
        story = Story().call(1, max_unavailable=1).work(1.1, "r0", lasts=5).work(second, "r1")
        story.tell(2, row("r0", "running"), row("r1", ""), final=False)
        return story.tell(3, UNKNOWN, row("r1")).tell(7, row("r0"), row("r1")).broken()

    assert called_next_at(1.9) == ["within max_unavailable"]
    assert called_next_at(2.1) == []


def test_an_engine_that_died_at_its_work_counts_until_the_rollout_gives_its_target_up() -> None:
    story = Story().call(1, max_unavailable=1).work(1.1, "r0").work(1.5, "r1")
    story.events = [event for event in story.events if not (isinstance(event, Ended) and event.replica == "r0")]
    story.tell(2, row("r0", "running"), row("r1", ""), final=False).tell(3, UNKNOWN, row("r1"))
    assert story.broken() == ["within max_unavailable"]


def test_a_target_that_was_done_anew_by_a_successor_counts_once() -> None:
    story = Story().call(1, max_unavailable=1).work(1.1, "r0", lasts=2).work(2, "r0", incarnation="second")
    story.tell(2.5, row("r0", "running"), row("r1", ""), final=False).work(3.2, "r1")
    assert story.tell(4, row("r0"), row("r1")).broken() == []


def test_a_target_whose_health_was_given_up_keeps_its_place() -> None:
    ill = row("r0", health="not healthy within 60 s: stalled")

    def beside(other: Row, max_unavailable: int) -> list[str]:
        story = Story().call(1, max_unavailable=max_unavailable).work(1.1, "r0").work(1.5, "r1")
        return story.tell(1.55, ill, other, final=False).tell(2, ill, row("r1")).broken()

    assert beside(row("r1", "running"), 2) == []
    assert beside(row("r1", "running"), 1) == ["within max_unavailable"]
    assert beside(row("r1", ""), 1) == []


def test_more_targets_said_to_run_at_once_than_may_are_caught() -> None:
    story = Story().call(1, max_unavailable=1).work(1.1, "r0").work(1.3, "r1")
    story.tell(1.05, row("r0", "running"), row("r1", "running"), final=False).tell(2, row("r0"), row("r1"))
    assert story.broken() == ["within max_unavailable"]


def test_a_success_without_an_effect_is_caught() -> None:
    story = Story().call(1).work(1.1, "r0").work(1.1, "r1", effects=0).tell(2, row("r0"), row("r1"))
    assert story.broken() == ["the truth"]


@pytest.mark.parametrize(
    "told",
    [
        row("r0", "unreachable", code="UNAVAILABLE", execution="not_executed"),
        row("r0", "failed", code="DEADLINE_EXCEEDED", reason="NOT_EXECUTED", execution="not_executed"),
        row("r0", "failed", code="FAILED_PRECONDITION", reason="BLOCKS_HELD_BY_REQUESTS"),
        row("r0", "skipped"),
        row("r0", "cancelled"),
    ],
    ids=["unreachable", "too late", "refused", "skipped", "cancelled"],
)
def test_nothing_done_is_a_promise_also_for_later(told: Row) -> None:
    story = Story().call(1).work(1.1, "r1").tell(2, told, row("r1"))
    assert story.broken() == []
    assert story.work(3, "r0").broken() == ["the truth"]


def test_a_lost_answer_that_is_told_as_a_failure_is_caught() -> None:
    lost = row("r0", "failed", code="UNAVAILABLE")
    story = Story().call(1).work(1.1, "r0").work(1.1, "r1").tell(2, lost, row("r1"))
    assert story.broken() == ["unknown"]


def test_a_failure_with_its_reason_from_the_replica_is_no_lost_answer() -> None:
    died = row("r0", "failed", code="UNAVAILABLE", reason="ENGINE_DIED_DURING_OPERATION")
    assert Story().call(1).work(1.1, "r1").tell(2, died, row("r1")).broken() == []


def test_an_unknown_outcome_that_cannot_be_asked_for_is_caught() -> None:
    nameless = msgspec.structs.replace(UNKNOWN, request_id="")
    unmarked = msgspec.structs.replace(UNKNOWN, execution="")
    for told in (nameless, unmarked):
        assert Story().call(1).work(1.1, "r1").tell(2, told, row("r1")).broken() == ["unknown"]
    assert Story().call(1).work(1.1, "r1").tell(2, UNKNOWN, row("r1")).broken() == []


def test_an_engine_that_takes_a_request_up_after_its_deadline_is_caught() -> None:
    def at(late: float) -> Story:
        story = Story().call(1, timeout_s=2).tell(1.1, row("r0", "running"), row("r1", "running"), final=False)
        return story.work(1.2, "r1").work(late, "r0").tell(3.2, UNKNOWN, row("r1"))

    assert at(3.0).broken() == []
    assert at(3.5).broken() == ["deadline"]


def test_a_coordinator_that_starts_anew_gives_what_it_resumes_time_of_its_own() -> None:
    story = Story().call(1, timeout_s=2).tell(1.1, row("r0", "running"), row("r1", "running"), final=False)
    story.work(1.2, "r1").fault(1.3, "kill", "coordinator").fault(2, "start", "coordinator")
    assert story.work(3.5, "r0").tell(3.8, row("r0"), row("r1")).broken() == []
    after_the_end = both_done().fault(3, "start", "coordinator")
    assert after_the_end.work(9, "r0", incarnation="second").broken() == ["deadline"]


def test_an_effect_before_its_audit_line_is_caught() -> None:
    story = Story().call(1).work(1.1, "r0", audited=False).work(1.1, "r1").tell(2, row("r0"), row("r1"))
    assert story.broken() == ["audit"]


def test_a_run_whose_load_was_not_there_before_the_fault_is_caught() -> None:
    assert both_done().floor(1).fault(3).broken() == []
    assert both_done().floor(1).fault(1.5).broken() == ["floor"]
    assert both_done().floor(2).fault(3).broken() == ["floor"]
    nothing_named = both_done()
    nothing_named.events = nothing_named.events[1:]
    assert nothing_named.broken() == ["floor"]


def test_a_history_reads_back_as_it_was_written_but_for_a_line_cut_short(tmp_path: Path) -> None:
    story = both_done().fault(3)
    callers, engines = Tape(tmp_path / "callers.jsonl"), Tape(tmp_path / "engines.jsonl")
    for event in story.events:
        (engines if isinstance(event, Taken | Effect | Ended) else callers).write(event)
    with engines.file.open("a") as file:
        file.write('{"type":"effect","at_ns":5')
    found = read([callers.file, engines.file, tmp_path / "never-made.jsonl"])
    assert found == sorted(msgspec.convert(msgspec.to_builtins(story.events), list[AnyEvent]), key=lambda e: e.at_ns)
    assert violations(found) == []
