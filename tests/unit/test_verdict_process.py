"""Verdicts of engines that are paused, asleep, starting, hung, stopped or dead."""

from __future__ import annotations

from engine_bridge.page import FLAG_ABANDONED_UPDATE, FLAG_WOKE_WITHOUT_RESET, Phase
from sidecar.replica.history import SECOND, Link, Process, Verdict
from sidecar.replica.judgement import ALWAYS_STALLED, NEVER_STALLED, Thresholds
from tests.unit.histories.deadlock import serving
from tests.unit.histories.tape import Tape

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
