"""Verdicts of engines that move tokens: healthy, saturated, slow. Numbers like vllm#45414 name the public report."""

from __future__ import annotations

import pytest

from engine_bridge.page import Phase
from sidecar.replica.history import SECOND, Verdict
from tests.unit.histories.deadlock import serving
from tests.unit.histories.tape import Tape, evidence, head

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
