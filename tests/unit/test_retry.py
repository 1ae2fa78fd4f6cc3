"""When a target is called again: what the contract allows, within time and budget."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator.retry import Next, Retries, RetryBudget, RetryPolicy

FAILED = fleet_pb2.TARGET_OUTCOME_FAILED
UNREACHABLE = fleet_pb2.TARGET_OUTCOME_UNREACHABLE
UNKNOWN = fleet_pb2.TARGET_OUTCOME_UNKNOWN
NOT_EXECUTED = types_pb2.EXECUTION_NOT_EXECUTED


def row(code: str, reason: str = "", outcome: int = FAILED, execution: int = 0) -> fleet_pb2.TargetResult:
    return fleet_pb2.TargetResult(outcome=outcome, code=code, reason=reason, execution=execution)  # type: ignore[arg-type]


def retries(*, wait: bool = False, deadline: float = 30.0, budget: float = 100.0, seed: int = 0) -> Retries:
    return Retries(RetryPolicy(), RetryBudget(budget, budget), deadline, wait, random.Random(seed))


SUCCESS = row("OK", outcome=fleet_pb2.TARGET_OUTCOME_SUCCEEDED)


@pytest.mark.parametrize(
    ("answer", "wait", "expected"),
    [
        (SUCCESS, True, Next.DONE),
        (row("UNAVAILABLE", "ENGINE_STARTING"), False, Next.REPEAT),
        (row("UNAVAILABLE", "REPLICA_UNREACHABLE", UNREACHABLE, NOT_EXECUTED), False, Next.REPEAT),
        (row("UNAVAILABLE", "NOT_A_SIDECAR", UNREACHABLE), True, Next.DONE),
        (row("UNAVAILABLE", "ENGINE_DIED_DURING_OPERATION"), True, Next.DONE),
        (row("UNAVAILABLE"), False, Next.ASK),
        (row("DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", UNKNOWN), False, Next.ASK),
        (row("UNKNOWN", "UNCONFIRMED", UNKNOWN, types_pb2.EXECUTION_UNKNOWN), True, Next.DONE),
        (row("DEADLINE_EXCEEDED", "NOT_EXECUTED", FAILED, NOT_EXECUTED), True, Next.DONE),
        (row("FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS"), False, Next.DONE),
        (row("FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS"), True, Next.REPEAT),
        (row("FAILED_PRECONDITION", "NOT_DEADLOCKED"), True, Next.DONE),
        (row("ABORTED", "OPERATION_IN_PROGRESS"), False, Next.DONE),
        (row("ABORTED", "OPERATION_IN_PROGRESS"), True, Next.REPEAT),
        (row("ABORTED", "REQUEST_ID_REUSED"), True, Next.DONE),
        (row("INVALID_ARGUMENT", "INVALID_FIELD"), True, Next.DONE),
        (row("UNIMPLEMENTED", "TIER_UNSUPPORTED"), True, Next.DONE),
        (row("PERMISSION_DENIED", "ROLE_TOO_SMALL", UNREACHABLE), True, Next.DONE),
        (row("INTERNAL", "OPERATION_RAISED"), True, Next.DONE),
    ],
)
def test_each_answer_is_repeated_asked_for_or_final_as_the_contract_says(
    answer: fleet_pb2.TargetResult, wait: bool, expected: Next
) -> None:
    assert retries(wait=wait).after(answer, 0.0).next is expected


def test_an_unavailable_replica_is_called_four_times_unless_waiting_was_asked_for() -> None:
    tries = retries()
    calls = 1
    while tries.after(row("UNAVAILABLE", "ENGINE_STARTING"), 0.0).next is Next.REPEAT:
        calls += 1
    assert calls == 4
    patient = retries(wait=True)
    assert all(patient.after(row("UNAVAILABLE", "ENGINE_STARTING"), 0.0).next is Next.REPEAT for _ in range(20))


def test_a_delay_named_by_the_replica_is_the_least_wait_and_is_spread() -> None:
    waits = [
        retries(wait=True, seed=seed).after(row("FAILED_PRECONDITION", "CONNECTOR_BUSY"), 0.0, 2.0).after_s
        for seed in range(50)
    ]
    assert min(waits) >= 2.0
    assert max(waits) <= 3.0
    assert len({round(wait, 6) for wait in waits}) > 40


def test_a_replica_that_asks_for_more_time_than_a_person_gives_is_told_of_at_once() -> None:
    no_engine = row("UNAVAILABLE", "NO_ENGINE")
    advice = retries().after(no_engine, 0.0, retry_after_s=5.0)
    assert advice.next is Next.DONE
    assert "--wait" in advice.why
    assert retries(wait=True).after(no_engine, 0.0, retry_after_s=5.0).next is Next.REPEAT
    # What may have had an effect is asked for whatever the delay.
    assert retries().after(row("UNAVAILABLE"), 0.0, retry_after_s=5.0).next is Next.ASK


def test_sixty_retries_cannot_happen_in_milliseconds() -> None:
    tries = retries(wait=True, deadline=10.0)
    now, calls = 0.0, 0
    while (advice := tries.after(row("FAILED_PRECONDITION", "CONNECTOR_BUSY"), now)).next is Next.REPEAT:
        calls += 1
        now += advice.after_s
    assert calls < 20


def test_no_retry_starts_without_time_for_it() -> None:
    late = retries().after(row("UNAVAILABLE", "ENGINE_STARTING"), 29.96)
    assert late.next is Next.DONE
    assert "no time" in late.why


def test_a_spent_budget_ends_the_retries_of_every_target_and_success_refills_it() -> None:
    budget = RetryBudget(1.0, 4.0)
    first, second = (Retries(RetryPolicy(), budget, 30.0, False, random.Random(0)) for _ in range(2))
    starting = row("UNAVAILABLE", "ENGINE_STARTING")
    assert first.after(starting, 0.0).next is Next.REPEAT
    spent = second.after(starting, 0.0)
    assert spent.next is Next.DONE
    assert "used up its retries" in spent.why
    first.after(SUCCESS, 0.0)
    first.after(SUCCESS, 0.0)
    assert second.after(starting, 0.0).next is Next.REPEAT


ANSWERS = st.sampled_from(
    [
        row("UNAVAILABLE", "ENGINE_STARTING"),
        row("UNAVAILABLE"),
        row("DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", UNKNOWN),
        row("FAILED_PRECONDITION", "CONNECTOR_BUSY"),
        row("ABORTED", "OPERATION_IN_PROGRESS"),
        row("INTERNAL", "OPERATION_RAISED"),
        SUCCESS,
    ]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    answers=st.lists(ANSWERS, min_size=1, max_size=60),
    wait=st.booleans(),
    budget=st.floats(0, 20),
    seed=st.integers(0, 2**32),
    took=st.floats(0, 3),
    named=st.sampled_from([0.0, 0.1, 4.0]),
)
def test_retries_stay_within_time_and_budget_and_never_repeat_the_unknown(
    answers: list[fleet_pb2.TargetResult], wait: bool, budget: float, seed: int, took: float, named: float
) -> None:
    """The model: a clock that runs on, and a count of retries that were paid for."""
    shared = RetryBudget(budget, budget)
    tries = Retries(RetryPolicy(), shared, 30.0, wait, random.Random(seed))
    now, paid = 0.0, 0
    for answer in answers:
        now += took
        advice = tries.after(answer, now, named)
        if advice.next is Next.DONE:
            break
        assert now + advice.after_s < 30.0
        assert 0.0 <= advice.after_s <= max(5.0, named * 1.5)
        assert advice.after_s >= named
        unknown = answer.outcome == UNKNOWN or (answer.code == "UNAVAILABLE" and not answer.reason)
        assert (advice.next is Next.ASK) == unknown
        if answer.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            paid += 1
            assert wait or paid < 4
        else:
            assert wait
        now += advice.after_s
    assert paid <= budget
