"""Verdicts of engines that stand still or leak, on histories as the sampler records them."""

from __future__ import annotations

import msgspec
import pytest

from engine_bridge.page import Phase
from sidecar.replica.history import SECOND, Verdict
from sidecar.replica.judgement import Thresholds
from tests.unit.histories.deadlock import DEADLOCK, deadlocked, serving
from tests.unit.histories.tape import START_NS, Tape, evidence, head

# --- standing still ----------------------------------------------------------------------------------------------


def test_loaded_requests_that_hold_what_the_head_needs_are_a_deadlock():
    """Seed 002: both loads finished, 27 blocks free, the head's next chunk needs 32, nothing runs."""
    tape = deadlocked()
    assert tape.last.verdict is Verdict.HELD_BLOCKS_DEADLOCK
    assert tape.last.stalled
    assert (
        tape.last.explanation
        == "2 waiting requests hold 133 blocks, the head needs 32 and 27 are free: run `kvctl relieve`"
    )


def test_a_stall_is_raised_within_its_threshold_plus_two_seconds_and_only_once():
    tape = deadlocked()
    raised = tape.since("HELD_BLOCKS_DEADLOCK") - 22
    assert Thresholds().stall_ns / SECOND <= raised + 0.5
    assert raised <= Thresholds().stall_ns / SECOND + 2
    assert tape.verdicts.count("HELD_BLOCKS_DEADLOCK") == 1
    assert tape.verdicts[-1] == "HELD_BLOCKS_DEADLOCK"


def test_a_stall_is_dated_from_the_last_progress_and_not_from_its_discovery():
    tape = deadlocked()
    assert (tape.now_ns - tape.last.since_ns) / SECOND == pytest.approx(30, abs=0.6)


def test_a_stall_clears_within_two_samples_of_progress():
    tape = deadlocked()
    tape.play(1, tokens=500, outputs=10, running=2, waiting=0, deferred=0, holding=0)
    assert tape.last.verdict is Verdict.FLOWING
    assert not tape.last.stalled


def test_a_stall_clears_when_its_requests_are_aborted():
    tape = deadlocked()
    tape.play(1, running=0, waiting=0, deferred=0, holding=0, blocks_free=160, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.IDLE


def test_a_sidecar_started_beside_a_deadlocked_engine_sees_it_with_the_first_evidence():
    tape = Tape()
    tape.page.last_progress_ns = START_NS - 3600 * SECOND
    told = msgspec.structs.replace(DEADLOCK, oldest_waiting_ns=3600 * SECOND)
    tape.play(2, evidence=told, running=0, waiting=2, deferred=2, holding=2, blocks_free=27)
    assert tape.last.verdict is Verdict.HELD_BLOCKS_DEADLOCK
    assert tape.last.since_ns == pytest.approx(START_NS - 3600 * SECOND, abs=2 * SECOND)


def test_a_load_still_in_flight_is_waited_for_and_is_no_deadlock():
    tape = serving()
    told = msgspec.structs.replace(DEADLOCK, load_finished=1, waiting_remote_kv=1)
    tape.play(60, evidence=told, running=0, waiting=2, deferred=2, holding=2, blocks_free=27)
    assert tape.last.verdict is Verdict.WAITING_REMOTE_KV
    assert not tape.last.stalled


def test_loads_that_never_end_become_a_stall():
    tape = serving()
    told = evidence(waiting=2, waiting_remote_kv=2, waiting_holding_blocks=2, blocks_free=27)
    tape.play(130, evidence=told, running=0, waiting=2, deferred=2, holding=2, blocks_free=27)
    assert tape.last.verdict is Verdict.WAITING_REMOTE_KV
    assert tape.last.stalled
    assert "KV connector" in tape.last.explanation


def test_a_head_larger_than_the_pool_can_never_fit():
    tape = serving()
    told = evidence(waiting=3, head=head(200), oldest_waiting_ns=6 * SECOND)
    tape.play(10, evidence=told, running=0, waiting=3, blocks_free=160)
    assert tape.last.verdict is Verdict.HEAD_CANNOT_FIT
    assert tape.last.stalled
    assert "needs 200 blocks and the whole pool has 160" in tape.last.explanation


def test_a_head_that_needs_more_than_the_pool_on_top_of_what_it_holds_can_never_fit():
    """vllm#39734."""
    tape = serving()
    told = evidence(waiting=1, waiting_holding_blocks=1, blocks_free=60, head=head(80, held=100))
    tape.play(10, evidence=told, running=0, waiting=1, holding=1, blocks_free=60)
    assert tape.last.verdict is Verdict.HEAD_CANNOT_FIT
    assert "on top of the 100 it holds" in tape.last.explanation


def test_a_head_whose_need_cannot_be_computed_is_not_called_a_fault_of_the_scheduler():
    tape = serving()
    tape.play(10, evidence=evidence(waiting=1, head=head(-1)), running=0, waiting=1)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.UNKNOWN, True)
    assert "cannot be computed" in tape.last.explanation


def test_nothing_running_with_an_empty_pool_is_stalled_with_a_reason():
    """vllm#45414: running 0, waiting N, KV usage 0%. No verdict of blocks is true, so UNKNOWN, and stalled."""
    tape = serving()
    told = evidence(waiting=6, head=head(4), oldest_waiting_ns=60 * SECOND)
    tape.play(10, evidence=told, running=0, waiting=6, blocks_free=160)
    assert tape.last.verdict is Verdict.UNKNOWN
    assert tape.last.stalled
    assert "not a shortage of blocks but a fault of the scheduler" in tape.last.explanation


def test_a_standstill_that_the_engine_does_not_explain_is_stalled_all_the_same():
    tape = serving()
    tape.play(10, running=0, waiting=6, blocks_free=160)
    assert tape.last.verdict is Verdict.UNKNOWN
    assert tape.last.stalled


def test_requests_that_wait_for_a_grammar_which_never_comes_are_stalled():
    tape = serving()
    told = evidence(waiting=2, waiting_other=2, head=head(1, "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"))
    tape.play(10, evidence=told, running=0, waiting=2, deferred=2, blocks_free=160)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.UNKNOWN, True)
    assert "GRAMMAR" in tape.last.explanation


def test_running_requests_that_get_no_token_while_the_loop_turns_are_stalled():
    tape = serving()
    told = evidence(running=29, waiting=4, blocks_free=60)
    tape.play(10, evidence=told, running=29, waiting=4)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.UNKNOWN, True)


# --- leaks -------------------------------------------------------------------------------------------------------


def test_blocks_held_by_no_request_and_growing_are_leaked():
    """vllm#46283: aborted remote loads leak blocks."""
    tape = serving()
    for free in (150, 130, 100):
        tape.play(15, running=0, waiting=0, blocks_free=free, phase=Phase.IDLE)
        tape.play(5, tokens=500, outputs=500, running=3, blocks_free=free - 40)
    tape.play(15, running=0, waiting=0, blocks_free=90, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.BLOCKS_LEAKED
    assert "70 of 160 blocks are held although there is no request, up from 10" in tape.last.explanation


def test_blocks_of_a_transfer_that_ends_are_no_leak():
    tape = serving()
    for free in (150, 130, 160, 140, 120):
        tape.play(8, running=0, waiting=0, blocks_free=free, phase=Phase.IDLE)
    assert "BLOCKS_LEAKED" not in tape.verdicts


def test_blocks_held_without_growth_are_a_warning_and_no_verdict():
    tape = serving()
    tape.play(60, running=0, waiting=0, blocks_free=150, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.IDLE
    assert any("10 blocks held by no request" in warning for warning in tape.last.warnings)


def test_a_leak_that_leaves_the_head_no_room_is_stalled():
    tape = serving()
    told = evidence(waiting=2, blocks_free=10, blocks_orphaned=150, head=head(32), oldest_waiting_ns=SECOND)
    tape.play(20, evidence=told, running=0, waiting=2, blocks_free=10)
    assert tape.last.verdict is Verdict.BLOCKS_LEAKED
    assert tape.last.stalled


def test_evidence_from_before_the_last_progress_explains_nothing_now():
    tape = deadlocked()
    tape.play(0.5, tokens=500, outputs=10, running=2, waiting=0, deferred=0, holding=0)
    tape.play(7, running=0, waiting=2)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.UNKNOWN, True)
