"""The relief operation over the real scheduler: one holder a call, bounded within a stall, refused elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_bridge import protocol
from engine_bridge.engine import relief
from engine_bridge.operations import Context, Memory, Verdict
from engine_bridge.operations.relieve import MAX_ATTEMPTS, relieve
from tests.engine.scheduler_world import World, full_attention, sliding_window
from tests.engine.test_deadlock_relief import deadlocked_world

pytestmark = pytest.mark.engine


class Port:
    """The part of the port that relief needs, on a real scheduler."""

    def __init__(self, world: World) -> None:
        self.scheduler = world.scheduler
        self.tokens = 0

    def capabilities(self) -> dict[str, str]:
        return {"relieve": relief.missing(self.scheduler)}

    def tokens_scheduled(self) -> int:
        return self.tokens

    def deadlock(self) -> str:
        return relief.deadlock(self.scheduler)

    def relieve_one(self) -> tuple[str, int]:
        return relief.relieve_one(self.scheduler)


def ask(port: Any, memory: Memory) -> Verdict:
    request = protocol.Relieve(call=1, request_id="", deadline_ns=1 << 62)
    work = relieve(port, request, Context(clock=lambda: 0, deadline_ns=1 << 62, memory=memory))
    try:
        next(work)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("relief is done at one boundary")


def test_one_holder_is_relieved_and_the_answer_says_whom_and_how_much() -> None:
    world = deadlocked_world()
    verdict = ask(Port(world), Memory())
    assert verdict.state == "done"
    assert verdict.result.request_ids == ["second"]
    assert verdict.result.blocks_freed > 0
    assert (verdict.result.attempts, verdict.result.max_attempts) == (1, MAX_ATTEMPTS)
    assert verdict.result.verdict_before == "HELD_BLOCKS_DEADLOCK"
    world.run()
    world.assert_empty()


def test_it_is_refused_where_admissions_flow_and_says_what_was_found() -> None:
    world = World(blocks=64)
    world.add("a", 100)
    world.step()
    verdict = ask(Port(world), Memory())
    assert (verdict.state, verdict.reason) == ("refused", "NOT_DEADLOCKED")
    assert "1 requests are running" in verdict.message
    assert world.scheduler.requests["a"].num_preemptions == 0


def test_within_one_stall_attempts_are_bounded_and_progress_starts_another() -> None:
    port = SimpleNamespace(
        tokens=5,
        capabilities=lambda: {"relieve": ""},
        deadlock=lambda: "",
        relieve_one=lambda: ("a", 1),
        tokens_scheduled=lambda: port.tokens,
    )
    memory = Memory()
    states = [ask(port, memory).state for _ in range(MAX_ATTEMPTS + 2)]
    assert states == ["done"] * MAX_ATTEMPTS + ["refused"] * 2
    assert ask(port, memory).reason == "RELIEF_EXHAUSTED"
    port.tokens += 1
    assert ask(port, memory).result.attempts == 1


def test_a_long_run_of_deadlocks_is_relieved_to_its_end_within_the_bound() -> None:
    world = World(blocks=160, specs=[full_attention(), sliding_window(32)], connector="Remote")
    for index in range(6):
        world.remote.hits[f"r{index}"] = 1024
        world.add(f"r{index}", 1280)
    port, memory = Port(world), Memory()
    for _ in range(400):
        if not world.scheduler.requests:
            break
        port.tokens += world.step(world.loading()).total_num_scheduled_tokens
        verdict = ask(port, memory)
        assert verdict.reason in ("", "NOT_DEADLOCKED")
    world.assert_empty()
