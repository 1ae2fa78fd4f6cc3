"""What a connector answers to a reset, and resets repeated while its transfers are abandoned."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.engine import guards, pools
from engine_bridge.engine.connector import connector_tier
from tests.engine.scheduler_world import World
from tests.engine.test_offload_guard import PROMPT, finish, offload, storing_world, used_on_cpu

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (True, "done", ""),
        (False, "pending", "CONNECTOR_BUSY"),
        (None, "unsupported", "TIER_UNSUPPORTED"),
        (RuntimeError("the store is gone"), "failed", "OPERATION_RAISED"),
    ],
    ids=["true", "false", "none", "raises"],
)
def test_each_answer_is_read_for_what_it_is(answer: Any, state: str, reason: str) -> None:
    world = World(blocks=64, connector="Remote")
    world.remote.answer = answer
    tier = connector_tier(world.scheduler)
    assert (tier.state, tier.reason) == (state, reason)
    assert state == "done" or "Remote" in tier.message
    assert state != "failed" or "the store is gone" in tier.message


def test_no_connector_is_no_failure() -> None:
    assert connector_tier(World(blocks=64).scheduler).state == "not_configured"


def test_vllm_itself_takes_no_answer_for_success() -> None:
    """Why the connector is asked directly. If this fails, vLLM has been mended."""
    world = World(blocks=64, connector="Remote")
    world.remote.answer = None
    assert world.scheduler.reset_connector_cache() is True


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (True, True, "done"),
        (True, None, "unsupported"),
        (False, True, "pending"),
        (False, None, "unsupported"),
        (ValueError("broken"), False, "failed"),
    ],
)
def test_of_connectors_joined_in_one_the_worst_answer_counts_and_all_are_asked(
    first: Any, second: Any, state: str
) -> None:
    world = World(blocks=64, connector=["Remote", "SecondRemote"])
    asked = []
    for child, answer in zip(world.scheduler.connector._connectors, (first, second), strict=True):
        child.answer = answer
        original = child.reset_cache
        child.reset_cache = lambda original=original, child=child: (asked.append(child), original())[1]
    assert connector_tier(world.scheduler).state == state
    assert asked == world.scheduler.connector._connectors


def test_stats_are_told_only_of_a_reset_that_happened() -> None:
    world = World(blocks=64, connector="Remote")
    stats = world.scheduler.connector_prefix_cache_stats
    world.remote.answer = False
    connector_tier(world.scheduler)
    assert not stats.reset
    world.remote.answer = True
    connector_tier(world.scheduler)
    assert stats.reset


def test_resets_repeated_while_a_store_is_abandoned_free_its_blocks_once() -> None:
    world, event = storing_world()
    guards.install(world.scheduler)
    held = pools.held_blocks([world.pool])
    for _ in range(5):
        pools.drop_prefix_cache(world.scheduler)
        assert connector_tier(world.scheduler).state == "pending"
        assert pools.held_blocks([world.pool]) == held
        world.assert_sound()
    world.schedule()
    world.process(stored=[event])
    assert used_on_cpu(world) == 0
    world.schedule()
    world.process(stored=[event])
    for _ in range(3):
        assert connector_tier(world.scheduler).state == "done"
    finish(world)
    world.assert_empty()
    assert used_on_cpu(world) == 0


def test_resets_repeated_while_a_load_is_abandoned_free_its_blocks_once() -> None:
    world, event = storing_world()
    guards.install(world.scheduler)
    world.schedule()
    world.process(stored=[event])
    finish(world)
    pools.drop_prefix_cache(world.scheduler)
    world.add("again", [*PROMPT, 7], max_tokens=4)
    world.schedule()
    world.process()
    assert world.loading() == ["again"]
    for _ in range(5):
        pools.drop_prefix_cache(world.scheduler)
        assert connector_tier(world.scheduler).state == "pending"
        world.assert_sound()
    finish(world)
    assert connector_tier(world.scheduler).state == "done"
    world.assert_empty()
    assert used_on_cpu(world) == 0
    assert not offload(world)._abandoned_reqs_to_load


def test_a_preempt_between_resets_leaks_nothing() -> None:
    world, event = storing_world()
    guards.install(world.scheduler)
    request = world.scheduler.running[0]
    connector_tier(world.scheduler)
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)
    assert pools.held_blocks([world.pool]) > 0, "the store still holds its blocks"
    connector_tier(world.scheduler)
    # The request hits its own blocks and stores them anew at once.
    again = world.schedule().kv_connector_metadata.store_event
    assert again > event
    world.process(stored=[event, again])
    finish(world)
    world.assert_empty()
    assert used_on_cpu(world) == 0


def test_the_cpu_tier_survives_a_reset_that_does_not_ask_for_it() -> None:
    world, event = storing_world()
    guards.install(world.scheduler)
    world.schedule()
    world.process(stored=[event])
    finish(world)
    pools.drop_prefix_cache(world.scheduler)
    world.add("again", [*PROMPT, 7], max_tokens=1)
    world.schedule()
    world.process()
    assert world.loading() == ["again"]
    finish(world)
