"""Other plugins hook what we hook: quarantine stays in force, counts go on, and nothing of theirs is taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from engine_bridge import protocol
from engine_bridge.engine import guards, pools
from tests.engine.fake_vllm import expected_tokens
from tests.engine.moves import Caller
from tests.engine.scheduler_world import BLOCK, World
from tests.engine.stepped_engine import Loop

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(10 * BLOCK)]


class Plugin:
    """Wraps a method of an instance, and counts."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.calls = 0
        self.found = getattr(owner, name)
        self.laid: Callable[..., Any] = self._call
        setattr(owner, name, self.laid)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.found(*args, **kwargs)

    @property
    def in_place(self) -> bool:
        return vars(self.owner).get(self.name) is self.laid


def kept_in_quarantine(world: World) -> guards.Guards:
    world.add("kept", PROMPT, max_tokens=3 * BLOCK)
    world.step()
    installed = guards.install(world.scheduler)
    installed.quarantine_running()
    pools.drop_prefix_cache(world.scheduler)
    return installed


@pytest.mark.parametrize("name", guards.Quarantine.NEEDED)
def test_a_plugin_that_came_first_does_not_keep_quarantine_from_taking_hold(name: str) -> None:
    world = World(blocks=256)
    plugin = Plugin(world.scheduler.kv_cache_manager.coordinator, name)
    installed = kept_in_quarantine(world)
    world.run()
    assert world.hit_tokens(PROMPT + world.outputs["kept"]) == 0
    assert installed.quarantined() == 0
    assert plugin.in_place


@pytest.mark.parametrize("name", guards.Quarantine.NEEDED)
def test_a_plugin_that_came_later_stays_when_quarantine_ends_and_its_next_one_takes_hold_again(name: str) -> None:
    world = World(blocks=256)
    coordinator = world.scheduler.kv_cache_manager.coordinator
    installed = kept_in_quarantine(world)
    plugin = Plugin(coordinator, name)
    world.run()
    assert installed.quarantined() == 0
    assert plugin.in_place
    assert world.hit_tokens(PROMPT) == 0
    world.add("rebuilds", PROMPT, max_tokens=1)
    world.run()
    assert world.hit_tokens([*PROMPT, 7]) == 10 * BLOCK, "quarantine outlived its requests"
    world.add("next", PROMPT, max_tokens=3 * BLOCK)
    world.step()
    installed.quarantine_running()
    pools.drop_prefix_cache(world.scheduler)
    world.run()
    assert world.hit_tokens(PROMPT + world.outputs["next"]) == 0
    assert installed.quarantined() == 0
    assert plugin.in_place
    assert plugin.calls or name == "pop_blocks_for_free", "frees are not put off here"


@pytest.mark.parametrize("name", guards.Quarantine.NEEDED)
def test_quarantine_that_others_have_taken_away_is_laid_again_before_the_next_step(name: str) -> None:
    world = World(blocks=256)
    coordinator = world.scheduler.kv_cache_manager.coordinator
    installed = kept_in_quarantine(world)
    while "kept" in world.scheduler.requests:
        vars(coordinator).pop(name, None)
        installed.keep_in_force()
        world.step()
        assert pools.cached_blocks([world.pool]) == 0
    assert installed.quarantined() == 0
    world.assert_empty()


def test_who_ended_while_others_had_taken_the_guard_away_is_not_barred_for_ever() -> None:
    world = World(blocks=256)
    coordinator = world.scheduler.kv_cache_manager.coordinator
    installed = kept_in_quarantine(world)
    for name in guards.Quarantine.NEEDED:
        delattr(coordinator, name)
    world.scheduler.finish_requests("kept", RequestStatus.FINISHED_ABORTED)
    world.step()
    assert installed.quarantined() == 1
    installed.keep_in_force()
    assert installed.quarantined() == 0
    assert not vars(coordinator).keys() & set(guards.Quarantine.NEEDED)


# --- hooks on the engine ------------------------------------------------------------------------------------------

HOOKED = [
    ("engine", "_process_input_queue"),
    ("engine", "_handle_client_request"),
    ("engine", "step_fn"),
    ("scheduler", "schedule"),
    ("scheduler", "set_pause_state"),
]


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(asynchronous=False, connector=False, blocks=64, max_model_len=480)
    try:
        yield loop
    finally:
        loop.close()


def owner_of(loop: Loop, owner: str) -> Any:
    return loop.engine if owner == "engine" else loop.scheduler


def run_one(loop: Loop, name: str) -> list[int]:
    said: list[int] = []
    loop.add(name, PROMPT[:40], 5)
    for _ in range(200):
        if not loop.turn():
            break
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    return said


@pytest.mark.parametrize(("owner", "name"), HOOKED)
def test_counts_and_answers_go_on_when_others_wrap_our_hooks_or_take_them_away(
    loop: Loop, owner: str, name: str
) -> None:
    counters, caller = loop.bridge.counters, Caller(loop)
    original = vars(owner_of(loop, owner))[name]
    for number, disturb in enumerate(("wrap", "drop")):
        if disturb == "wrap":
            Plugin(owner_of(loop, owner), name)
        elif name == "step_fn":
            owner_of(loop, owner).step_fn = loop.engine.step
        else:
            delattr(owner_of(loop, owner), name)
        steps, tokens, outputs = counters.steps, counters.tokens_scheduled, counters.outputs
        assert run_one(loop, f"request-{number}") == expected_tokens(PROMPT[:40], 5)
        assert counters.tokens_scheduled - tokens in (44, 44 - 32), "40 or, after a hit, 8 of the prompt, and 4 more"
        # What was taken from an engine that was blocked already is laid again after its first step.
        assert counters.outputs - outputs >= 4
        assert counters.steps - steps >= 4
        caller.say(protocol.Ping(0))
        for _ in range(20):
            loop.turn()
        assert any(isinstance(reply, protocol.Pong) for reply in caller.hear())
        assert not loop.bridge.closed
    assert original
    caller.close()


@pytest.mark.parametrize(("owner", "name"), HOOKED)
def test_a_bridge_that_breaks_down_takes_its_own_hooks_out_and_leaves_theirs(loop: Loop, owner: str, name: str) -> None:
    plugin = Plugin(owner_of(loop, owner), name)
    loop.bridge.page.publish = None
    assert run_one(loop, "first") == expected_tokens(PROMPT[:40], 5)
    assert loop.bridge.closed
    # Ours stays for wake-ups that are under way, on top or not; theirs is called beneath it.
    assert plugin.in_place or name == "_handle_client_request"
    assert run_one(loop, "second") == expected_tokens(PROMPT[:40], 5)
    loop.utility("pause_scheduler", "keep", False)
    loop.turn()
    loop.utility("resume_scheduler")
    assert run_one(loop, "third") == expected_tokens(PROMPT[:40], 5)
    assert plugin.calls
