"""One rank of a lockstep data parallel group, without the others: what it must not do on its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from engine_bridge import protocol
from tests.engine.fake_vllm import expected_tokens
from tests.engine.moves import HOUR_NS, Caller, ask
from tests.engine.stepped_engine import Loop, SteppedEngine

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(100)]
TOKENS = 60


class Rank(SteppedEngine, DPEngineCoreProc):
    """vLLM's own engine core of a mixture-of-experts rank; the test speaks for its peers."""

    def __init__(self, config: Any) -> None:
        self.dp_group = object()
        self.dp_rank, self.dp_size = 0, 2
        self.step_counter = self.current_wave = 0
        self.prefill_schedule_interval, self.dp_sync_interval = 1, 32
        self.pending_pause = self.ignore_start_dp_wave = False
        self.eep_scaling_state = None
        super().__init__(config)

    def shutdown(self) -> None:
        EngineCoreProc.shutdown(self)  # there is no group to leave

    def the_others_agree(self) -> None:
        """What the collective brings about once every rank has asked for a pause."""
        self.pending_pause, self.ignore_start_dp_wave, self.engines_running = False, True, False


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(asynchronous=True, connector=False, blocks=64, max_model_len=480, engine_class=Rank)
    try:
        yield loop
    finally:
        loop.close()


def test_a_rank_is_reset_at_once_and_neither_held_nor_paused_nor_resumed_alone(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, said = Caller(loop), list[int]()
    deadline = loop.clock.now + HOUR_NS

    def mutate(kind: Any, *arguments: Any, **options: Any) -> Any:
        return ask(loop, caller, kind(0, str(uuid.uuid4()), deadline, *arguments, **options), said)

    monkeypatch.setattr(
        "vllm.v1.engine.core.ParallelConfig.has_unfinished_dp", lambda dp_group, has_unfinished: has_unfinished
    )
    assert "pause together" in loop.bridge._port.capabilities()["pause"]
    loop.add("runs", PROMPT, TOKENS)
    for _ in range(8):
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    assert loop.engine.batch_queue
    for running in ("keep", "preempt"):
        caller.say(protocol.Reset(0, str(uuid.uuid4()), deadline, running))  # type: ignore[arg-type]
        loop.bridge.boundary()
        assert not loop.bridge.waits_for_step, "a rank that stops scheduling leaves the others in a collective"
        assert loop.scheduler.pause_state == PauseState.UNPAUSED
        assert [reply.state for reply in caller.hear() if isinstance(reply, protocol.Outcome)] == ["done"]
    assert mutate(protocol.Pause, HOUR_NS).state == "unsupported"

    loop.utility("pause_scheduler", "keep", False)
    for _ in range(6):
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    assert loop.engine.pending_pause
    assert loop.engine.has_work(), "a rank that waits for the others takes part in their batches"
    refused = mutate(protocol.Resume, force=True)
    assert (refused.state, refused.reason) == ("refused", "WRONG_SCHEDULING_STATE")

    loop.engine.the_others_agree()
    for _ in range(3):
        loop.turn()
    assert mutate(protocol.Resume, force=True).state == "unsupported"
    assert loop.scheduler.pause_state == PauseState.PAUSED_ALL
    assert mutate(protocol.Reset, "keep", reorder=True).state == "done"
    evidence = ask(loop, caller, protocol.Admission(0), said)
    assert (evidence.paused, evidence.running + evidence.waiting) == ("all", 1)

    loop.utility("resume_scheduler")
    for _ in range(2000):
        if len(said) == TOKENS:
            break
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    assert said == expected_tokens(PROMPT, TOKENS)
    caller.close()
