"""Many engines, one status: nothing lost, nothing glossed over."""

from __future__ import annotations

import itertools
import uuid
from typing import get_args

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from sidecar.backends.engine import Answered, Lost, Unreachable
from sidecar.replica.aggregate import ORDER, EngineAnswer, fold
from sidecar.rpc import errors

Code = grpc.StatusCode
ID = str(uuid.uuid4())
TIER = protocol.Tier("done")
RESET = protocol.ResetResult(
    TIER, protocol.Tier("not_requested"), protocol.Tier("not_requested"), protocol.Tier("not_requested"),
    5, 2, 2, 0, 0, protocol.Holders(4, 2), True, True, ["GPU"], protocol.PauseCost(100, 120, 2),
)  # fmt: skip


def outcome(state="done", reason="", message="", result=RESET, **more):
    return Answered(protocol.Outcome(1, ID, "reset", state, reason, message, result, **more))


def answer(submitted, rank=0, **more):
    return EngineAnswer(rank, f"{rank:032x}", submitted, **more)


ANY = st.one_of(
    st.builds(
        outcome,
        st.sampled_from(get_args(protocol.OutcomeState)),
        st.sampled_from(["", "NOT_A_REASON", "CONNECTOR_BUSY", "NEVER_IDLE", "OPERATION_RAISED"]),
        st.text(max_size=2000),
        st.sampled_from([None, RESET, protocol.SchedulingResult("paused", "v")]),
    ),
    st.builds(Lost, st.sampled_from(["not_executed", "unknown"]), st.text(max_size=50)),
    st.builds(Unreachable, st.sampled_from(["ENGINE_DEAD", "NO_ENGINE", "???"]), st.text(max_size=50), st.booleans()),
)


@pytest.mark.parametrize(
    ("submitted", "code", "reason"),
    [
        (outcome("done"), Code.OK, ""),
        (outcome("refused", "BLOCKS_HELD_BY_TRANSFERS", "x"), Code.FAILED_PRECONDITION, "BLOCKS_HELD_BY_TRANSFERS"),
        (outcome("pending", "CONNECTOR_BUSY", "x"), Code.FAILED_PRECONDITION, "CONNECTOR_BUSY"),
        (outcome("partial", "TIER_UNSUPPORTED", "x"), Code.UNIMPLEMENTED, "TIER_UNSUPPORTED"),
        (outcome("partial", "BLOCKS_HELD_BY_REQUESTS", "x"), Code.FAILED_PRECONDITION, "BLOCKS_HELD_BY_REQUESTS"),
        (outcome("partial", "OPERATION_RAISED", "x"), Code.INTERNAL, "OPERATION_RAISED"),
        (outcome("partial", "UNCONFIRMED", "x"), Code.UNKNOWN, "UNCONFIRMED"),
        (outcome("busy", "OPERATION_IN_PROGRESS", "x"), Code.ABORTED, "OPERATION_IN_PROGRESS"),
        (outcome("mismatch"), Code.ABORTED, "REQUEST_ID_REUSED"),
        (outcome("expired", "NOT_EXECUTED", "x"), Code.DEADLINE_EXCEEDED, "NOT_EXECUTED"),
        (outcome("withdrawn", "NEVER_IDLE", "x"), Code.DEADLINE_EXCEEDED, "NEVER_IDLE"),
        (outcome("withdrawn", "CANCELLED", "x"), Code.CANCELLED, "CANCELLED"),
        (outcome("unsupported"), Code.UNIMPLEMENTED, "ENGINE_LACKS_CAPABILITY"),
        (outcome("unsupported", "NEEDS_DEV_MODE", "x"), Code.UNIMPLEMENTED, "NEEDS_DEV_MODE"),
        (outcome("invalid"), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (outcome("raised"), Code.INTERNAL, "OPERATION_RAISED"),
        (outcome("stopping"), Code.UNAVAILABLE, "ENGINE_STOPPING"),
        (outcome("from the future"), Code.INTERNAL, "PROTOCOL_ERROR"),
        (Lost("not_executed", "x"), Code.DEADLINE_EXCEEDED, "NOT_EXECUTED"),
        (Lost("unknown", "x"), Code.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN"),
        (Unreachable("ENGINE_STARTING", "x"), Code.UNAVAILABLE, "ENGINE_STARTING"),
        (Unreachable("PROTOCOL_ERROR", "x"), Code.INTERNAL, "PROTOCOL_ERROR"),
    ],
)
def test_every_ending_has_its_code(submitted, code, reason):
    folded = fold("reset", ID, [answer(submitted)])
    assert (folded.code, folded.reason) == (code, reason)
    assert folded.response.engines[0].status.code == code.value[0]
    assert bool(folded.message) == (code is not Code.OK)


@given(st.lists(ANY, min_size=1, max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_ok_only_when_every_engine_did_all_and_lives_and_otherwise_an_error_that_can_be_sent(submitted, alive):
    answers = [answer(one, rank, alive_after=alive[rank]) for rank, one in enumerate(submitted)]
    folded = fold("reset", ID, answers)
    all_done = all(isinstance(s, Answered) and s.outcome.state == "done" for s in submitted)
    assert folded.ok == (all_done and all(alive[: len(submitted)]))
    assert len(folded.response.engines) == len(submitted)
    assert [e.status.engine.data_parallel_rank for e in folded.response.engines] == list(range(len(submitted)))
    if not folded.ok:
        assert folded.reason in errors.REASONS
        assert len(errors.to_status(folded.failure()).SerializeToString()) < 8192


def test_the_most_actionable_code_wins_whatever_the_order_of_ranks():
    by_code = {
        Code.INTERNAL: outcome("raised"),
        Code.INVALID_ARGUMENT: outcome("invalid"),
        Code.UNIMPLEMENTED: outcome("unsupported"),
        Code.UNKNOWN: outcome("partial", "UNCONFIRMED"),
        Code.DEADLINE_EXCEEDED: Lost("unknown", "x"),
        Code.UNAVAILABLE: Unreachable("ENGINE_DEAD", "x"),
        Code.ABORTED: outcome("busy"),
        Code.FAILED_PRECONDITION: outcome("refused"),
        Code.CANCELLED: outcome("withdrawn"),
        Code.OK: outcome(),
    }
    assert tuple(by_code) == ORDER
    for one, other in itertools.permutations(ORDER, 2):
        folded = fold("reset", ID, [answer(by_code[one], 0), answer(by_code[other], 1)])
        assert folded.code is min(one, other, key=ORDER.index)


LATE = Lost("not_executed", "the deadline passed before it began")
DOUBTFUL = Lost("unknown", "it had begun")
HELD = outcome("refused", "BLOCKS_HELD_BY_TRANSFERS", "x")


@pytest.mark.parametrize(
    ("ranks", "reason", "execution"),
    [
        ([LATE, LATE], "NOT_EXECUTED", "NOT_EXECUTED"),
        ([LATE, DOUBTFUL], "OUTCOME_UNKNOWN", "UNKNOWN"),
        ([LATE, outcome("done")], "NOT_EXECUTED", None),
        ([LATE, HELD], "NOT_EXECUTED", None),
        ([outcome("raised", "OPERATION_RAISED", "x"), DOUBTFUL], "OPERATION_RAISED", "UNKNOWN"),
        ([HELD, outcome("done")], "BLOCKS_HELD_BY_TRANSFERS", None),
    ],
)
def test_the_whole_was_not_executed_only_where_no_rank_did_and_is_unknown_where_one_is(ranks, reason, execution):
    for order in itertools.permutations(ranks):
        folded = fold("reset", ID, [answer(each, rank) for rank, each in enumerate(order)])
        assert (folded.reason, folded.metadata.get("execution")) == (reason, execution)


def test_a_process_that_died_after_its_answer_is_not_ok():
    folded = fold("reset", ID, [answer(outcome(), alive_after=False)])
    assert (folded.code, folded.reason) == (Code.UNAVAILABLE, "ENGINE_DIED_DURING_OPERATION")
    assert folded.response.engines[0].cached_blocks_dropped == 5


def test_the_headline_names_the_engine_and_how_many_did_it():
    folded = fold("reset", ID, [answer(outcome(), 0), answer(outcome("refused", "", "4 blocks held"), 1)])
    assert folded.message == "engine 1: 4 blocks held; all other engines did it"
    folded = fold("reset", ID, [answer(Lost("unknown", "engine 0 gave no answer"), 0), answer(outcome("raised"), 1)])
    assert folded.message.endswith("; 0 of 2 engines did it")


def test_a_retry_is_advised_only_where_it_can_help():
    refused = answer(outcome("refused", "BLOCKS_HELD_BY_REQUESTS", "x", retry_after_ms=700))
    assert fold("reset", ID, [refused]).retry_after == pytest.approx(0.7)
    unsupported = answer(outcome("unsupported"), 1)
    assert fold("reset", ID, [refused, unsupported]).retry_after is None


def test_done_without_effect_says_so():
    nothing = protocol.ResetResult(
        TIER, TIER, TIER, TIER, 0, 0, 0, 0, 0, protocol.Holders(), True, False, [], protocol.PauseCost()
    )
    engine = fold("reset", ID, [answer(outcome(result=nothing))]).response.engines[0]
    assert engine.prefix_cache.message == "0 blocks were cached"


def test_an_engine_without_a_result_shows_its_tiers_as_not_run():
    mutation = protocol.Reset(0, ID, 0, "keep", connector=True)
    engine = fold("reset", ID, [answer(Lost("not_executed", "x"))], mutation).response.engines[0]
    assert engine.prefix_cache.state == types.TIER_STATE_NOT_RUN
    assert engine.connector.state == types.TIER_STATE_NOT_RUN
    assert engine.encoder.state == types.TIER_STATE_NOT_REQUESTED


def test_every_fact_of_a_reset_arrives():
    engine = fold("reset", ID, [answer(outcome(replayed=True))]).response.engines[0]
    assert engine == types.EngineReset(
        status=types.EngineStatus(engine=types.EngineRef(incarnation="0" * 32), replayed=True),
        prefix_cache=types.TierResult(state=types.TIER_STATE_DONE),
        connector=types.TierResult(state=types.TIER_STATE_NOT_REQUESTED),
        multimodal=types.TierResult(state=types.TIER_STATE_NOT_REQUESTED),
        encoder=types.TierResult(state=types.TIER_STATE_NOT_REQUESTED),
        cached_blocks_dropped=5,
        requests_running=2,
        requests_kept=2,
        holders=types.BlockHolders(held_blocks=4, running_requests=2),
        prefix_caching_enabled=True,
        event_published=True,
        event_tiers=["GPU"],
        pause=types.EnginePause(longest_us=100, total_us=120, slices=2),
    )


def test_contiguity_is_counted_as_the_api_says():
    result = protocol.ReorderResult(
        "all_free",
        3,
        protocol.Contiguity(10, 3, 7),
        protocol.Contiguity(1, 0, 1),
        protocol.Holders(),
        protocol.PauseCost(),
    )
    submitted = Answered(protocol.Outcome(1, ID, "reorder", "done", result=result))
    engine = fold("reorder", ID, [answer(submitted)]).response.engines[0]
    assert (engine.before.ratio, engine.before.mean_run_length) == (pytest.approx(1 / 3), pytest.approx(10 / 7))
    assert engine.after.ratio == 1.0


@pytest.mark.parametrize(
    ("kind", "result", "response"),
    [
        ("reset", RESET, api.ResetPrefixCacheResponse),
        ("relieve", protocol.RelieveResult("HELD_BLOCKS_DEADLOCK", ["a"], 3, 1, 4, protocol.PauseCost()),
         api.RelieveAdmissionResponse),
        ("pause", protocol.SchedulingResult("paused", "v1", 10**9), api.PauseSchedulingResponse),
        ("resume", protocol.SchedulingResult("running", "v2"), api.ResumeSchedulingResponse),
        ("renew", protocol.SchedulingResult("paused", "v1", 10**9), api.RenewPauseResponse),
    ],
)  # fmt: skip
def test_every_operation_has_its_response(kind, result, response):
    folded = fold(kind, ID, [answer(Answered(protocol.Outcome(1, ID, kind, "done", result=result)))])
    assert isinstance(folded.response, response)
    assert folded.ok


def test_a_result_of_the_wrong_kind_is_not_taken_for_another():
    folded = fold("pause", ID, [answer(outcome())])
    assert folded.response.engines[0].state == types.SCHEDULING_STATE_UNSPECIFIED
