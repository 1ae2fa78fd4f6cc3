"""What to do next fits the command that was refused."""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.cli.printers.advice import advise
from sidecar.cli.printers.operation import summary, told


@pytest.mark.parametrize("reason", ["BLOCKS_HELD_BY_REQUESTS", "BLOCKS_HELD_BY_TRANSFERS", "HELD_WHILE_PAUSED"])
def test_a_refused_reorder_is_not_answered_with_options_of_reset(reason: str) -> None:
    hint = advise(reason, kind=types_pb2.OPERATION_KIND_REORDER)
    assert "--scope" in hint
    assert "--mode" not in hint
    assert "--mode" in advise(reason, kind=types_pb2.OPERATION_KIND_RESET)


def test_an_unknown_outcome_at_a_coordinator_is_looked_up_and_not_repeated_under_an_id_that_runs_nothing() -> None:
    operation = fleet_pb2.FleetOperation(operation_id="an-id")
    outcome = fleet_pb2.TARGET_OUTCOME_UNKNOWN
    operation.results.add(replica="r0", outcome=outcome, code="UNAVAILABLE", reason="OUTCOME_UNKNOWN")
    assert "    -> repeat it with --request-id an-id" in summary(operation)
    operation.version = 7
    assert "    -> the coordinator goes on asking for an hour: `kvctl ops get an-id`" in summary(operation)


def test_a_pause_whose_outcome_is_unknown_is_told_how_it_is_ended() -> None:
    operation = fleet_pb2.FleetOperation(operation_id="an-id", counts=fleet_pb2.OutcomeCounts(total=1, unknown=1))
    operation.spec.pause.SetInParent()
    hint = "  -> `kvctl scheduling resume --pause` with this id ends it"
    assert f"{hint}, also where it is not known whether it holds" in summary(operation)
    operation.counts.unknown, operation.counts.succeeded = 0, 1
    assert hint in summary(operation)


def test_a_refused_dry_run_says_that_it_would_be_refused_and_speaks_of_no_other_engine() -> None:
    engine = types_pb2.EngineReset(status=types_pb2.EngineStatus(code=9, reason="BLOCKS_HELD_BY_REQUESTS"))
    row = fleet_pb2.TargetResult(
        outcome=fleet_pb2.TARGET_OUTCOME_FAILED,
        reason="BLOCKS_HELD_BY_REQUESTS",
        message="4 requests run",
        reset=replica_pb2.ResetPrefixCacheResponse(validate_only=True, engines=[engine]),
    )
    assert told(row) == "would refuse: BLOCKS_HELD_BY_REQUESTS: 4 requests run"


@pytest.mark.parametrize("kind", ["pause", "resume"])
def test_a_dry_run_of_a_pause_does_not_claim_that_it_was_checked(kind: str) -> None:
    spec = fleet_pb2.OperationSpec(validate_only=True)
    getattr(spec, kind).SetInParent()
    row = fleet_pb2.TargetResult(outcome=fleet_pb2.TARGET_OUTCOME_SUCCEEDED)
    assert told(row, spec) == f"answers; whether its engines would {kind} is not checked"
