"""Every verdict, on histories as the sampler records them. Numbers like vllm#45414 name the public report."""

from __future__ import annotations

import msgspec
import pytest

from engine_bridge.page import FLAG_ABANDONED_UPDATE, FLAG_WOKE_WITHOUT_RESET, Phase
from sidecar.replica.history import SECOND, Link, Process, Verdict
from sidecar.replica.judgement import ALWAYS_STALLED, NEVER_STALLED, Thresholds
from tests.unit.histories.tape import START_NS, Tape, evidence, head, holder

DEADLOCK = evidence(
    waiting=2,
    load_finished=2,
    waiting_holding_blocks=2,
    blocks_free=27,
    head=head(32, "WAITING_FOR_REMOTE_KVS", 66),
    holders=[holder(67, "a"), holder(66, "b")],
    oldest_waiting_ns=3 * SECOND,
)


def serving(**changes: int) -> Tape:
    """An engine that has served for 20 seconds."""
    tape = Tape()
    tape.play(2)
    tape.play(20, tokens=1500, outputs=1500, running=29, waiting=4, blocks_free=60, **changes)
    return tape


# --- healthy -----------------------------------------------------------------------------------------------------


def test_an_engine_without_requests_is_idle():
    tape = Tape()
    assert tape.play(10).verdict is Verdict.IDLE
    assert not tape.last.stalled


def test_frozen_gauges_without_work_are_no_stall():
    tape = serving()
    tape.play(600, running=0, waiting=0, blocks_free=160, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.IDLE
    assert not any(judgement.stalled for _, judgement in tape.judgements)


def test_an_engine_that_schedules_tokens_is_flowing():
    tape = serving()
    assert tape.last.verdict is Verdict.FLOWING
    assert tape.last.tokens_per_second == pytest.approx(1500, rel=0.05)
    assert "29 requests running" in tape.last.explanation


def test_a_deep_queue_at_high_throughput_is_no_stall():
    tape = Tape()
    tape.play(300, tokens=20_000, outputs=4000, running=256, waiting=5000, blocks_free=2)
    assert not any(judgement.stalled for _, judgement in tape.judgements)
    assert tape.last.verdict is Verdict.SATURATED


def test_one_slow_request_with_a_queue_behind_it_is_no_stall():
    tape = Tape()
    tape.play(120, tokens=2, outputs=2, running=1, waiting=40, blocks_free=100)
    assert tape.verdicts == ["FLOWING"]


def test_a_request_after_a_quiet_night_is_no_stall():
    tape = serving()
    tape.play(20, running=0, waiting=0, phase=Phase.IDLE)
    tape.now_ns += 8 * 3600 * SECOND
    tape.play(3, running=0, waiting=1)
    assert not any(judgement.stalled for _, judgement in tape.judgements)


def test_a_sidecar_that_starts_beside_a_busy_engine_says_flowing_at_once():
    tape = Tape()
    tape.play(0.5, tokens=100, outputs=100, running=3, waiting=0)
    assert tape.last.verdict is Verdict.FLOWING


def test_a_queue_whose_head_waits_for_blocks_while_tokens_move_is_saturated():
    tape = serving()
    told = evidence(running=29, waiting=4, blocks_free=60, head=head(80), oldest_waiting_ns=SECOND)
    tape.play(4, tokens=1500, outputs=1500, evidence=told)
    assert tape.last.verdict is Verdict.SATURATED
    assert not tape.last.stalled
    assert "needs 80 blocks and 60 are free" in tape.last.explanation


def test_saturated_does_not_flap_around_its_threshold():
    tape = Tape()
    for free in (15, 17, 15, 18, 14, 20, 15, 17):
        tape.play(1, tokens=1500, outputs=1500, running=29, waiting=4, blocks_free=free)
    assert tape.verdicts == ["SATURATED"]


def test_traffic_with_short_gaps_does_not_flap_between_idle_and_flowing():
    tape = Tape()
    for _ in range(20):
        tape.play(0.5, tokens=50, outputs=50, running=1)
        tape.play(0.5, running=0, phase=Phase.IDLE)
    assert tape.verdicts == ["FLOWING"]


def test_one_request_parked_for_ten_minutes_while_others_flow_is_shown_and_is_no_stall():
    """LMCache#5047."""
    tape = serving()
    told = evidence(
        running=29, waiting=1, waiting_remote_kv=1, blocks_free=60, oldest_waiting_ns=600 * SECOND, head=None
    )
    tape.play(10, tokens=1500, outputs=1500, waiting=1, deferred=1, evidence=told)
    assert tape.last.verdict is Verdict.FLOWING
    assert not tape.last.stalled
    assert any("oldest waiting request has waited 10 min" in warning for warning in tape.last.warnings)


def test_sessions_that_wait_for_their_clients_next_input_are_no_stall():
    tape = Tape()
    tape.play(60, waiting=3, deferred=3, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.IDLE
    assert not tape.last.stalled


# --- slow --------------------------------------------------------------------------------------------------------


def test_running_falling_from_29_to_3_with_tokens_collapsing_is_degraded():
    tape = Tape()
    tape.play(60, tokens=1500, outputs=1500, running=29, waiting=8, blocks_free=60)
    tape.play(30, tokens=90, outputs=90, running=3, waiting=34, blocks_free=140)
    assert tape.last.verdict is Verdict.DEGRADED
    assert not tape.last.stalled
    assert "1500 tokens/s with 29 running before" in tape.last.explanation
    assert tape.since("DEGRADED") - 60 < 12


def test_degraded_ends_when_the_throughput_is_back():
    tape = Tape()
    tape.play(60, tokens=1500, outputs=1500, running=29, waiting=8, blocks_free=60)
    tape.play(30, tokens=90, outputs=90, running=3, waiting=34)
    tape.play(15, tokens=1500, outputs=1500, running=29, waiting=8)
    assert tape.verdicts == ["FLOWING", "DEGRADED", "FLOWING"]


def test_fewer_requests_with_fewer_tokens_is_not_degraded():
    tape = Tape()
    tape.play(60, tokens=1500, outputs=1500, running=29, waiting=8, blocks_free=60)
    tape.play(30, tokens=100, outputs=100, running=2, waiting=0)
    assert tape.verdicts == ["FLOWING"]


def test_a_long_prefill_that_makes_few_outputs_from_many_tokens_is_not_degraded():
    tape = Tape()
    tape.play(60, tokens=1500, outputs=1500, running=29, waiting=8, blocks_free=60)
    tape.play(30, tokens=8000, outputs=1, running=29, waiting=8)
    assert tape.verdicts == ["FLOWING"]


def test_decoding_after_a_prefill_is_not_degraded():
    tape = Tape()
    tape.play(60, tokens=16_000, outputs=30, running=29, waiting=8, blocks_free=60)
    tape.play(30, tokens=600, outputs=600, running=29, waiting=8)
    assert tape.verdicts == ["FLOWING"]


def test_preempting_and_admitting_over_and_over_is_thrashing():
    """vllm-ascend#16315."""
    tape = Tape()
    tape.play(20, tokens=4000, outputs=0, preemptions=3, running=2, waiting=6, blocks_free=1)
    assert tape.last.verdict is Verdict.THRASHING
    assert tape.last.stalled, "not one output came out"
    assert "30 preemptions and only 0 outputs" in tape.last.explanation


def test_thrashing_that_still_yields_a_few_tokens_is_no_stall():
    tape = Tape()
    tape.play(20, tokens=4000, outputs=2, preemptions=3, running=2, waiting=6, blocks_free=1)
    assert tape.last.verdict is Verdict.THRASHING
    assert not tape.last.stalled


def test_preemptions_at_full_throughput_are_not_thrashing():
    tape = Tape()
    tape.play(30, tokens=4000, outputs=1000, preemptions=5, running=50, waiting=6, blocks_free=1)
    assert tape.last.verdict is Verdict.SATURATED


def test_one_reset_that_preempts_everything_is_not_thrashing():
    tape = serving()
    tape.page.preemptions += 29
    tape.play(12, tokens=1500, outputs=5, running=29, waiting=4)
    assert "THRASHING" not in tape.verdicts


# --- standing still ----------------------------------------------------------------------------------------------


def deadlocked() -> Tape:
    tape = serving()
    tape.play(30, evidence=DEADLOCK, running=0, waiting=2, deferred=2, holding=2, blocks_free=27)
    return tape


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


# --- not meant to run --------------------------------------------------------------------------------------------


def test_a_paused_scheduler_explains_the_standstill():
    tape = serving()
    tape.play(20, running=2, waiting=3, paused=2, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.PAUSED
    assert not tape.last.stalled


def test_a_pause_that_outlasts_any_plan_with_requests_waiting_is_stalled():
    tape = serving()
    tape.play(70, running=2, waiting=3, paused=2, phase=Phase.IDLE)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.PAUSED, True)
    assert "3 requests are waiting" in tape.last.explanation


def test_an_abandoned_weight_update_is_paused_stalled_and_named():
    tape = serving()
    tape.play(2, running=0, waiting=0, paused=2, flags=FLAG_ABANDONED_UPDATE, phase=Phase.IDLE)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.PAUSED, True)
    assert "weight update was abandoned" in tape.last.explanation


def test_a_sleeping_engine_is_sleeping():
    """vllm#17103."""
    tape = serving()
    tape.play(5, running=0, waiting=0, sleeping=1, paused=2, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.SLEEPING


def test_waking_without_a_reset_is_warned_about():
    """vllm#17103."""
    tape = serving()
    tape.play(5, running=0, waiting=0, sleeping=0, flags=FLAG_WOKE_WITHOUT_RESET, phase=Phase.IDLE)
    assert tape.last.verdict is Verdict.IDLE
    assert any("woke up with an empty KV cache" in warning for warning in tape.last.warnings)


def test_an_engine_that_is_not_ready_is_starting():
    tape = Tape()
    tape.play(5, phase=Phase.STARTING)
    assert tape.last.verdict is Verdict.STARTING


def test_an_address_where_nothing_has_listened_yet_is_starting_until_no_start_takes_so_long():
    tape = Tape()
    tape.play(20, no_page=True, link=Link.NOT_YET, process=Process.UNREADABLE)
    assert tape.last.verdict is Verdict.STARTING
    tape.now_ns += 900 * SECOND
    tape.play(1, no_page=True, link=Link.NOT_YET, process=Process.UNREADABLE)
    assert tape.last.verdict is Verdict.ENGINE_DEAD


# --- the process -------------------------------------------------------------------------------------------------


def test_a_long_model_step_is_not_hung_before_the_threshold():
    tape = serving()
    tape.play(55, phase=Phase.STEP, turning=False)
    assert tape.verdicts[-1] == "FLOWING"
    assert not any(judgement.stalled for _, judgement in tape.judgements)
    assert "one step has been running for" in tape.last.explanation


def test_a_long_first_prefill_with_nothing_running_yet_is_no_stall():
    tape = Tape()
    tape.play(3)
    tape.play(40, phase=Phase.STEP, turning=False, running=0, waiting=1)
    assert not any(judgement.stalled for _, judgement in tape.judgements)
    assert tape.last.verdict is Verdict.FLOWING


def test_a_long_step_that_began_before_anything_was_counted_is_flowing_and_not_idle():
    """The page's counts are written when a step ends."""
    tape = Tape()
    tape.play(3)
    tape.play(20, phase=Phase.STEP, turning=False)
    assert tape.verdicts == ["IDLE", "FLOWING"]
    tape.play(45, phase=Phase.STEP, turning=False)
    assert tape.last.verdict is Verdict.ENGINE_HUNG


def test_an_old_phase_with_the_process_alive_is_hung():
    tape = serving()
    tape.play(63, phase=Phase.STEP, turning=False)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.ENGINE_HUNG, True)
    assert "py-spy dump --pid 4711" in tape.last.explanation
    assert tape.since("ENGINE_HUNG") - 22 <= 62


def test_the_threshold_of_a_hung_engine_is_configurable():
    tape = Tape(thresholds=Thresholds(hung_ns=300 * SECOND))
    tape.play(20, tokens=1500, outputs=1500, running=29, waiting=4)
    tape.play(200, phase=Phase.STEP, turning=False)
    assert tape.last.verdict is Verdict.FLOWING


def test_an_idle_engine_that_leaves_questions_unanswered_is_hung():
    tape = Tape()
    tape.play(2)
    tape.play(15, unanswered_since_ns=tape.now_ns)
    assert tape.last.verdict is Verdict.ENGINE_HUNG


def test_a_stopped_process_is_stopped_where_proc_can_be_read_and_hung_where_it_cannot():
    seen, unseen = serving(), serving()
    seen.play(70, phase=Phase.STEP, turning=False, process=Process.STOPPED)
    unseen.play(70, phase=Phase.STEP, turning=False, process=Process.UNREADABLE)
    assert seen.last.verdict is Verdict.ENGINE_STOPPED
    assert "kill -CONT 4711" in seen.last.explanation
    assert unseen.last.verdict is Verdict.ENGINE_HUNG


def test_a_process_that_is_gone_is_dead_whatever_its_page_still_says():
    """vllm#39863: the page survives a SIGKILL and shows a healthy engine."""
    tape = serving()
    tape.play(1, process=Process.GONE, link=Link.REFUSED)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.ENGINE_DEAD, True)


def test_a_refusing_socket_is_dead_where_proc_cannot_be_read():
    tape = serving()
    tape.play(1, process=Process.UNREADABLE, link=Link.REFUSED)
    assert tape.last.verdict is Verdict.ENGINE_DEAD


def test_a_refusing_socket_of_a_living_process_is_judged_by_its_page():
    tape = serving()
    tape.play(2, tokens=1500, outputs=1500, process=Process.RUNNING, link=Link.REFUSED)
    assert tape.last.verdict is Verdict.FLOWING


def test_an_ended_busy_loop_in_a_living_process_is_dead():
    tape = serving()
    tape.play(1, phase=Phase.STOPPED)
    assert tape.last.verdict is Verdict.ENGINE_DEAD


def test_a_page_torn_by_a_stopped_writer_is_unknown_with_the_reason():
    tape = serving()
    tape.play(1, no_page=True, note="engine-0.page: no consistent reading")
    assert tape.last.verdict is Verdict.UNKNOWN
    assert "no consistent reading" in tape.last.explanation


def test_a_busy_engine_stays_alive_while_steps_move_and_nothing_is_answered():
    """vllm#38157: healthy nodes were restarted because a health check was slow."""
    tape = serving()
    tape.play(60, tokens=1500, outputs=1500, unanswered_since_ns=tape.now_ns)
    assert set(tape.verdicts) == {"IDLE", "FLOWING"}


def test_the_two_sets_of_stalled_verdicts_exclude_each_other():
    assert not ALWAYS_STALLED & NEVER_STALLED


def test_a_verdict_without_a_dated_cause_holds_since_it_was_first_given():
    tape = serving()
    tape.play(0.5, process=Process.STOPPED)
    first = tape.now_ns
    tape.play(5, process=Process.STOPPED)
    assert tape.last.since_ns == first


def test_evidence_from_before_the_last_progress_explains_nothing_now():
    tape = deadlocked()
    tape.play(0.5, tokens=500, outputs=10, running=2, waiting=0, deferred=0, holding=0)
    tape.play(7, running=0, waiting=2)
    assert (tape.last.verdict, tape.last.stalled) == (Verdict.UNKNOWN, True)
