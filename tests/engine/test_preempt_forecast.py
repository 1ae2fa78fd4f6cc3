"""What a preempt would leave held is known before anything is preempted."""

from __future__ import annotations

import pytest

from engine_bridge.engine import pools, scheduler
from tests.engine.scheduler_world import BLOCK, World, full_attention, sliding_window

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("lost", [0, 3])
def test_the_forecast_is_what_a_preempt_then_leaves(windowed: bool, lost: int) -> None:
    """With blocks that one request has alone, that several share, that sliding windows have given up, and that nobody
    has any more.
    """
    world = World(blocks=256, specs=[full_attention(), sliding_window(2 * BLOCK)] if windowed else [full_attention()])
    shared = [8 + i % 400 for i in range(6 * BLOCK)]
    world.add("first", shared, max_tokens=50)
    world.step()
    for name in ("second", "third"):
        world.add(name, [*shared, *range(9, 9 + 3 * BLOCK)], max_tokens=50)
    for _ in range(4):
        world.step()
    world.pool.get_new_blocks(lost)
    assert len(world.scheduler.running) == 3
    forecast = scheduler.blocks_after_preempt(world.scheduler)
    assert scheduler.preempt_running(world.scheduler) == 3
    assert pools.held_blocks([world.pool]) == forecast == lost
