"""vLLM's own pauses, sleeps and shutdown, arriving while operations of ours are under way or a lease is held."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineShutdownState

from engine_bridge import protocol
from engine_bridge.page import FLAG_WOKE_WITHOUT_RESET
from tests.engine.fake_vllm import expected_tokens
from tests.engine.moves import HOUR_NS, Caller
from tests.engine.stepped_engine import Loop

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(100)]
TOKENS = 60


class Driven:
    """A loop, a client of the bridge, and what came out of both."""

    def __init__(self, **options: Any) -> None:
        self.loop = Loop(**{"asynchronous": False, "connector": False, "blocks": 64, "max_model_len": 480, **options})
        self.caller = Caller(self.loop)
        self.said: dict[str, list[int]] = {}
        self.heard: list[Any] = []

    def add(self, name: str) -> None:
        self.said[name] = []
        self.loop.add(name, PROMPT, TOKENS)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            if not self.loop.turn():
                break
            for output in self.loop.outputs():
                self.said[output.request_id] += output.new_token_ids
        self.heard += self.caller.hear()

    def ask(self, request: protocol.Request) -> Any:
        """Its answer, or None while it is under way."""
        before = len(self.heard)
        self.caller.say(request)
        for _ in range(6):
            self.turn()
            if len(self.heard) > before:
                return self.heard[-1]
        return None

    def pause(self, lease_ns: int = HOUR_NS, *, whole: bool = False) -> str:
        request_id = str(uuid.uuid4())
        outcome = self.ask(protocol.Pause(0, request_id, self.deadline, lease_ns))
        assert outcome.state == "done", outcome
        if whole:
            assert self.ask(protocol.Renew(0, request_id, lease_ns, True)).state == "done"
        return request_id

    def last_words(self) -> protocol.Outcome:
        """The one outcome that an engine has told, also in its last moment."""
        try:
            while True:
                self.heard.append(self.caller.read())
        except (BlockingIOError, EOFError):
            (outcome,) = (reply for reply in self.heard if isinstance(reply, protocol.Outcome))
            return outcome

    @property
    def deadline(self) -> int:
        return self.loop.clock.now + HOUR_NS

    def evidence(self) -> protocol.Evidence:
        evidence = self.ask(protocol.Admission(0))
        assert isinstance(evidence, protocol.Evidence)
        return evidence

    def finish(self) -> None:
        """Everything that was asked for comes out as if nothing had been."""
        for _ in range(2000):
            if all(len(tokens) == TOKENS for tokens in self.said.values()):
                break
            self.turn()
        for tokens in self.said.values():
            assert tokens == expected_tokens(PROMPT, TOKENS)


@pytest.fixture
def driven() -> Iterator[Driven]:
    driven = Driven()
    driven.turn(2)
    yield driven
    driven.caller.close()
    driven.loop.close()


@pytest.fixture
def draining() -> Iterator[Driven]:
    """A preempt must wait here for steps in flight: two batches are, and frees are put off until they have ended."""
    driven = Driven(asynchronous=True, connector=True)
    driven.add("runs")
    driven.turn(6)
    assert driven.loop.scheduler.defer_block_free
    yield driven
    driven.caller.close()
    driven.loop.close()


def preempt(driven: Driven) -> protocol.Reset:
    """Asked for, and waiting for the steps in flight."""
    reset = protocol.Reset(0, str(uuid.uuid4()), driven.deadline, "preempt")
    driven.caller.say(reset)
    driven.loop.bridge.boundary()
    driven.loop.bridge.boundary()
    assert driven.loop.bridge.waits_for_step
    assert driven.loop.scheduler.pause_state == PauseState.PAUSED_ALL
    return reset


@pytest.mark.parametrize("level", [0, 1])
def test_a_lease_that_runs_out_while_the_engine_sleeps_leaves_it_asleep(driven: Driven, level: int) -> None:
    driven.add("runs")
    driven.turn(5)
    driven.pause(10**9, whole=True)
    driven.loop.utility("sleep", level, "keep")
    driven.turn(3)
    driven.loop.clock.now += 2 * 10**9
    driven.turn(3)
    assert driven.loop.bridge._dispatcher.memory.lease is None
    assert driven.loop.executor.is_sleeping == bool(level)
    assert driven.loop.scheduler.pause_state == PauseState.PAUSED_ALL
    evidence = driven.evidence()
    assert (evidence.paused, evidence.sleeping) == ("all", bool(level))
    driven.loop.utility("wake_up", ["scheduling"] if level == 0 else None)
    driven.finish()
    assert driven.evidence().scheduling == "running"


def test_an_owner_that_resumes_a_sleeping_engine_is_refused_and_may_do_so_once_it_is_awake(driven: Driven) -> None:
    lease = driven.pause()
    driven.loop.utility("sleep", 1, "keep")
    driven.turn(3)
    refused = driven.ask(protocol.Resume(0, str(uuid.uuid4()), driven.deadline, lease))
    assert (refused.state, refused.reason) == ("refused", "ENGINE_SLEEPING")
    assert driven.loop.executor.is_sleeping
    driven.loop.utility("wake_up", None)
    driven.turn(3)
    assert driven.evidence().scheduling == "running"


def test_a_sleep_that_waits_for_requests_is_neither_resumed_nor_paused_over(driven: Driven) -> None:
    driven.add("runs")
    driven.turn(5)
    driven.loop.utility("sleep", 1, "wait")
    driven.turn(3)
    assert driven.loop.engine._idle_state_callbacks
    for force in (False, True):
        refused = driven.ask(protocol.Resume(0, str(uuid.uuid4()), driven.deadline, force=force))
        assert (refused.state, refused.reason) == ("refused", "WRONG_SCHEDULING_STATE")
    refused = driven.ask(protocol.Pause(0, str(uuid.uuid4()), driven.deadline, HOUR_NS))
    assert (refused.state, refused.reason) == ("refused", "WRONG_SCHEDULING_STATE")
    assert driven.loop.scheduler.pause_state == PauseState.PAUSED_NEW
    driven.finish()
    driven.turn(3)
    assert driven.loop.executor.is_sleeping
    driven.loop.utility("wake_up", None)
    driven.turn(3)


@pytest.mark.parametrize(("mode", "left"), [("keep", PauseState.PAUSED_ALL), ("wait", PauseState.PAUSED_NEW)])
def test_a_pause_that_arrives_while_a_preempt_drains_is_kept(draining: Driven, mode: str, left: PauseState) -> None:
    reset = preempt(draining)
    draining.loop.utility("pause_scheduler", mode, False)
    while not draining.heard or not isinstance(draining.heard[-1], protocol.Outcome):
        draining.turn()
    assert (draining.heard[-1].request_id, draining.heard[-1].state) == (reset.request_id, "done")
    assert draining.loop.scheduler.pause_state == left
    draining.loop.utility("resume_scheduler")
    draining.finish()


def test_a_resume_that_arrives_while_a_preempt_drains_is_kept(draining: Driven) -> None:
    draining.loop.utility("pause_scheduler", "wait", False)
    draining.turn()
    preempt(draining)
    draining.loop.utility("resume_scheduler")
    draining.turn(6)
    assert draining.heard[-1].state == "done"
    assert draining.loop.scheduler.pause_state == PauseState.UNPAUSED
    draining.finish()


def test_a_held_scheduler_is_paused_for_nobody_to_see(draining: Driven) -> None:
    preempt(draining)
    draining.caller.say(protocol.Admission(0))
    draining.loop.bridge.boundary()
    (evidence,) = (reply for reply in draining.caller.hear() if isinstance(reply, protocol.Evidence))
    assert (evidence.paused, evidence.scheduling) == ("", "running")
    draining.finish()


def test_a_transfer_that_does_not_end_keeps_neither_a_preempt_nor_a_pause_waiting(draining: Driven) -> None:
    """While a connector sends what a request left behind, vLLM schedules one step without tokens after the other."""
    connector = draining.loop.scheduler.connector
    connector.request_finished_all_groups = lambda request, block_ids: (True, None)
    draining.said["sends"] = []
    draining.loop.add("sends", PROMPT[:20], 1)
    draining.turn(8)
    assert len(draining.said.pop("sends")) == 1
    assert "sends" in draining.loop.scheduler.requests
    refused = draining.ask(protocol.Reset(0, str(uuid.uuid4()), draining.deadline, "preempt"))
    assert (refused.state, refused.reason) == ("refused", "BLOCKS_HELD_BY_TRANSFERS")
    assert draining.loop.scheduler.pause_state == PauseState.UNPAUSED
    lease = draining.pause()
    assert draining.loop.engine.has_work(), "the transfer goes on"
    assert draining.ask(protocol.Resume(0, str(uuid.uuid4()), draining.deadline, lease)).state == "done"
    draining.finish()


def test_whoever_ends_a_pause_of_vllms_own_ends_all_of_it(driven: Driven) -> None:
    """Since 0.33 such a pause also turns new requests away."""
    pause = "pause_generation" if hasattr(driven.loop.engine, "pause_generation") else "pause_scheduler"
    driven.loop.utility(pause, "wait", False)
    driven.turn(3)
    assert driven.evidence().scheduling == "paused"
    assert driven.ask(protocol.Resume(0, str(uuid.uuid4()), driven.deadline)).state == "done"
    driven.add("comes")
    driven.finish()


@pytest.mark.parametrize("timeout", [0, 60], ids=["abort", "drain"])
def test_an_engine_that_shuts_down_while_a_preempt_drains_ends_and_answers(draining: Driven, timeout: int) -> None:
    preempt(draining)
    draining.loop.engine.vllm_config.shutdown_timeout = timeout
    draining.loop.engine.shutdown_state = EngineShutdownState.REQUESTED
    for _ in range(2000):
        if not draining.loop.engine._handle_shutdown():
            break
        draining.turn()
    else:
        raise AssertionError("the engine does not end")
    draining.loop.bridge.close()
    assert draining.last_words().state in ("done", "stopping")
    assert draining.loop.scheduler.pause_state == PauseState.UNPAUSED
    if timeout:
        assert draining.said["runs"] == expected_tokens(PROMPT, TOKENS)


def test_an_engine_that_shuts_down_while_a_reset_waits_for_an_idle_moment_ends_and_answers(driven: Driven) -> None:
    driven.add("runs")
    driven.turn(5)
    reset = protocol.Reset(0, str(uuid.uuid4()), driven.deadline, "fail", wait_for_idle=True)
    assert driven.ask(reset) is None
    driven.loop.engine.shutdown_state = EngineShutdownState.REQUESTED
    while driven.loop.engine._handle_shutdown():
        driven.turn()
    driven.loop.bridge.close()
    outcome = driven.last_words()
    assert (outcome.state, outcome.reason) == ("stopping", "ENGINE_STOPPING")


def test_waking_with_hashes_of_lost_memory_is_told_though_nobody_looked_while_it_slept(driven: Driven) -> None:
    driven.add("runs")
    driven.finish()
    assert not driven.evidence().woke_without_reset
    driven.turn(3)
    assert driven.loop.blocked
    # As a vLLM that keeps its hashes through a sleep, at the moment its own sleep takes hold.
    driven.loop.executor.sleep(1)
    driven.loop.utility("wake_up", None)
    driven.turn(3)
    assert driven.loop.bridge.counters.flags & FLAG_WOKE_WITHOUT_RESET
    assert driven.evidence().woke_without_reset
    assert driven.ask(protocol.Reset(0, str(uuid.uuid4()), driven.deadline, "fail")).state == "done"
    assert not driven.evidence().woke_without_reset
    assert not driven.loop.bridge.counters.flags & FLAG_WOKE_WITHOUT_RESET


def test_vllm_itself_says_that_the_weights_of_an_abandoned_update_are_unknown_until_they_are_named(
    driven: Driven,
) -> None:
    """A trainer reads the version from the outputs of the engine, not from us."""
    driven.loop.utility("set_weight_version", "step-1")
    driven.add("runs")
    driven.turn(5)
    assert driven.loop.engine.get_weight_version() == "step-1"
    driven.pause(10**9)
    driven.loop.clock.now += 2 * 10**9
    driven.turn(3)
    evidence = driven.evidence()
    assert (evidence.scheduling, evidence.weight_version) == ("abandoned_update", "unknown")
    assert driven.loop.engine.get_weight_version() == "unknown"
    driven.loop.utility("resume_scheduler")
    driven.finish()
    assert driven.evidence().weight_version == "unknown"
    driven.loop.utility("set_weight_version", "step-2")
    driven.turn()
    assert driven.evidence().weight_version == "step-2"


def test_a_version_told_to_vllm_itself_outlives_a_lease_that_ends_with_whole_weights(driven: Driven) -> None:
    lease = driven.pause()
    driven.loop.utility("set_weight_version", "theirs")
    driven.turn()
    assert driven.ask(protocol.Renew(0, lease, 10**9, True)).state == "done"
    driven.loop.clock.now += 2 * 10**9
    driven.turn(3)
    evidence = driven.evidence()
    assert (evidence.scheduling, evidence.weight_version) == ("running", "theirs")


@pytest.fixture
def large() -> Iterator[Driven]:
    """So many blocks that every walk over them takes many slices."""
    driven = Driven(blocks=20_000)
    driven.loop.clock.pace = 2_000_000
    yield driven
    driven.caller.close()
    driven.loop.close()


def test_requests_that_come_and_go_between_slices_do_not_disturb_a_reorder(large: Driven) -> None:
    large.add("runs")
    large.turn(8)
    large.caller.say(protocol.Reorder(0, str(uuid.uuid4()), large.deadline, "all_free"))
    large.turn(2)
    assert large.loop.bridge.wants_turn
    large.add("comes")
    large.add("goes")
    large.turn(2)
    assert large.loop.bridge.wants_turn
    large.loop.abort(["goes"])
    for _ in range(1000):
        if any(isinstance(reply, protocol.Outcome) for reply in large.heard):
            break
        large.turn()
    (outcome,) = (reply for reply in large.heard if isinstance(reply, protocol.Outcome))
    assert isinstance(outcome.result, protocol.ReorderResult)
    assert outcome.result.cost.slices > 4
    del large.said["goes"]
    large.finish()
