"""Resets under load change no token: the fake executor's tokens depend on every block a request reads back."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine_bridge import protocol
from tests.contract.engine_contract import reset_result
from tests.engine.conftest import VllmEngineHarness
from tests.engine.fake_vllm import expected_tokens
from tests.fake_engine.client import BridgeClient

pytestmark = pytest.mark.engine

RUNNING = 8
RESETS = 32
SHARED_PREFIX = list(range(8, 8 + 96))


def prompts(seed: int, count: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[*SHARED_PREFIX, *(dice.randrange(8, 500) for _ in range(dice.randrange(1, 200)))] for _ in range(count)]


def run_under_resets(
    engine: VllmEngineHarness, bridge: BridgeClient, reset: Callable[[BridgeClient, int], protocol.Outcome]
) -> list[protocol.Outcome]:
    """RUNNING requests at a time, a reset after every few tokens, until RESETS were done; every token is checked."""
    waiting = prompts(7, 64)
    answers = {}
    for _ in range(RUNNING):
        prompt = waiting.pop()
        answers[engine.add(prompt, 300)] = prompt
    engine.wait(lambda: all(engine.tokens[name] for name in answers), "a token of each")
    outcomes = []
    for number in range(RESETS):
        before = sum(engine.counts().values())
        outcomes.append(reset(bridge, number))
        engine.wait(lambda: sum(engine.counts().values()) >= before + RUNNING, "tokens after a reset")  # noqa: B023
        while sum(name not in engine.finished for name in answers) < RUNNING:
            prompt = waiting.pop()
            answers[engine.add(prompt, 300)] = prompt
    engine.wait_finished(*answers)
    for name, prompt in answers.items():
        assert engine.tokens[name] == expected_tokens(prompt, 300), name
    return outcomes


def test_keep_interrupts_nobody_and_changes_no_token(shared_engine: VllmEngineHarness) -> None:
    engine = shared_engine
    with engine.bridge() as bridge:
        outcomes = run_under_resets(
            engine, bridge, lambda bridge, number: bridge.reset("keep", reorder=number % 2 == 0)
        )
        assert [outcome.state for outcome in outcomes] == ["done"] * RESETS
        results = [reset_result(outcome) for outcome in outcomes]
        assert sum(result.requests_running >= RUNNING - 1 for result in results) >= RESETS - 4
        assert sum(result.cached_blocks_dropped for result in results) > RESETS
        assert all(result.requests_preempted == 0 for result in results)
        assert bridge.admission().blocks_free == 1023


def test_preempt_loses_and_repeats_no_token(shared_engine: VllmEngineHarness) -> None:
    engine = shared_engine
    with engine.bridge() as bridge:
        outcomes = run_under_resets(engine, bridge, lambda bridge, number: bridge.reset("preempt"))
        assert [outcome.state for outcome in outcomes] == ["done"] * RESETS
        assert sum(reset_result(outcome).requests_preempted for outcome in outcomes) > RESETS
        assert bridge.admission().blocks_free == 1023


def test_after_a_keep_the_next_request_misses_and_the_one_after_it_hits(shared_engine: VllmEngineHarness) -> None:
    engine = shared_engine
    with engine.bridge() as bridge:
        kept = engine.add(SHARED_PREFIX, 400)
        engine.wait_tokens(kept, 3)
        warm = engine.add([*SHARED_PREFIX, 9], 2)
        engine.wait_finished(warm)
        assert engine.cached[warm] == len(SHARED_PREFIX)
        assert bridge.reset("keep").state == "done"
        miss = engine.add([*SHARED_PREFIX, 10], 2)
        engine.wait_finished(miss)
        assert engine.cached[miss] == 0
        hit = engine.add([*SHARED_PREFIX, 11], 2)
        engine.wait_finished(hit)
        assert engine.cached[hit] == len(SHARED_PREFIX)
        engine.wait_finished(kept)
        assert engine.tokens[kept] == expected_tokens(SHARED_PREFIX, 400)
