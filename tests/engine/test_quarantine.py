"""Quarantine: what a kept request computes after a reset is never a hit for anybody else."""

from __future__ import annotations

from typing import Any

import pytest

from engine_bridge.engine import guards, pools
from tests.engine.scheduler_world import BLOCK, SecondRemote, World, full_attention, sample, sliding_window

pytestmark = pytest.mark.engine

PROMPT = [8 + i % 400 for i in range(10 * BLOCK)]
SPECS = {"full": [full_attention()], "windowed": [full_attention(), sliding_window(2 * BLOCK)]}


def keep_reset(world: World, *, quarantine: bool) -> guards.Guards:
    """A weight update: hashes are dropped while everything runs on."""
    installed = guards.install(world.scheduler)
    if quarantine:
        installed.quarantine_running()
    pools.drop_prefix_cache(world.scheduler)
    return installed


def everything_said(world: World, request_id: str) -> list[int]:
    return PROMPT + world.outputs[request_id]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_without_quarantine_a_kept_request_refills_the_cache_and_with_it_does_not(asynchronous: bool) -> None:
    """Chunked prefill: the reset comes when 3 blocks of the prompt are computed. Somebody else computes these 3 again
    with the new weights, and the chain of hashes is whole, but for what the kept request filled.
    """
    hits = {}
    for quarantine in (False, True):
        world = World(blocks=256, asynchronous=asynchronous, max_num_batched_tokens=3 * BLOCK)
        world.add("kept", PROMPT, max_tokens=4)
        world.step()
        installed = keep_reset(world, quarantine=quarantine)
        world.add("rebuilds", PROMPT[: 3 * BLOCK + 1], max_tokens=1)
        for _ in range(12):
            world.step()
        hits[quarantine] = world.hit_tokens([*PROMPT, 7])
        assert installed.quarantined() == 0 or "kept" in world.scheduler.requests
        world.run()
        world.assert_empty()
    assert hits == {False: 10 * BLOCK, True: 3 * BLOCK}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decoded_blocks_of_a_quarantined_request_are_never_hit(asynchronous: bool, specs: list[Any]) -> None:
    world = World(blocks=256, specs=specs, asynchronous=asynchronous)
    world.add("kept", PROMPT, max_tokens=5 * BLOCK)
    world.step()
    world.step()
    installed = keep_reset(world, quarantine=True)
    assert installed.quarantined() == 1
    while "kept" in world.scheduler.requests:
        world.step()
        assert pools.cached_blocks([world.pool]) == 0
    assert world.hit_tokens(everything_said(world, "kept")) == 0
    assert installed.quarantined() == 0
    world.assert_empty()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_preempted_request_leaves_quarantine_and_what_it_recomputes_is_cached(asynchronous: bool) -> None:
    world = World(blocks=256, asynchronous=asynchronous)
    request = world.add("kept", PROMPT, max_tokens=40)
    world.step()
    world.step()
    installed = keep_reset(world, quarantine=True)
    if asynchronous:
        world.schedule()  # output in flight while it is preempted
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)
    assert installed.quarantined() == 0
    assert pools.cached_blocks([world.pool]) == 0
    while world.in_flight:
        world.process()
    assert pools.cached_blocks([world.pool]) == 0, "output that was in flight registered blocks that are freed"
    world.run()
    assert len(world.outputs["kept"]) == 40
    assert world.hit_tokens([*PROMPT, 7]) == 10 * BLOCK
    world.assert_empty()


def test_a_preempted_request_does_not_hit_what_other_quarantined_requests_hold() -> None:
    world = World(blocks=256)
    first = world.add("first", PROMPT, max_tokens=40)
    world.add("second", PROMPT, max_tokens=40)
    world.step()
    world.step()
    installed = keep_reset(world, quarantine=True)
    assert installed.quarantined() == 2
    for _ in range(20):
        world.step()
    world.scheduler.running.remove(first)
    world.scheduler._preempt_request(first, 0.0)
    assert installed.quarantined() == 1
    output = world.step()
    assert output.num_scheduled_tokens["first"] > 10 * BLOCK, "recomputed from nothing"
    world.run()
    world.assert_empty()


def test_a_load_that_was_in_flight_at_the_reset_brings_nothing_into_the_cache() -> None:
    for quarantine, expected in ((False, 9 * BLOCK), (True, 0)):
        world = World(blocks=256, connector="Remote")
        world.remote.hits["loads"] = 9 * BLOCK
        world.add("loads", PROMPT, max_tokens=4)
        world.step()
        installed = guards.install(world.scheduler)
        assert "may save what kept requests compute" in installed.problems["reset.quarantine"]
        keep_reset(world, quarantine=quarantine)
        world.step(world.loading())
        world.step()
        assert min(world.hit_tokens([*PROMPT, 7]), 9 * BLOCK) == expected
        world.run()
        world.assert_empty()


def test_requests_that_hold_nothing_are_not_quarantined() -> None:
    world = World(blocks=256, max_num_seqs=1)
    world.add("runs", PROMPT)
    world.step()
    world.add("waits", PROMPT)
    installed = keep_reset(world, quarantine=True)
    assert installed.quarantined() == 1
    world.run()
    world.assert_empty()


def test_an_aborted_request_leaves_quarantine() -> None:
    from vllm.v1.request import RequestStatus

    world = World(blocks=256)
    world.add("kept", PROMPT, max_tokens=40)
    world.step()
    installed = keep_reset(world, quarantine=True)
    world.scheduler.finish_requests("kept", RequestStatus.FINISHED_ABORTED)
    assert installed.quarantined() == 0
    world.step()
    world.assert_empty()


def test_nothing_is_wrapped_before_and_after() -> None:
    world = World(blocks=256)
    coordinator = world.scheduler.kv_cache_manager.coordinator
    before = dict(vars(coordinator))
    world.add("kept", PROMPT, max_tokens=8)
    world.step()
    installed = keep_reset(world, quarantine=True)
    assert vars(coordinator) != before
    installed.quarantine_running()
    assert installed.quarantined() == 1
    world.run()
    assert dict(vars(coordinator)) == before


def test_a_second_reset_without_quarantine_frees_nobody_from_it() -> None:
    world = World(blocks=256)
    world.add("kept", PROMPT, max_tokens=40)
    world.step()
    installed = keep_reset(world, quarantine=True)
    pools.drop_prefix_cache(world.scheduler)
    world.step()
    assert installed.quarantined() == 1
    world.run()
    assert world.hit_tokens(everything_said(world, "kept")) == 0


def test_tokens_are_the_same_with_and_without_quarantine() -> None:
    world = World(blocks=256)
    world.add("kept", PROMPT, max_tokens=40)
    world.step()
    keep_reset(world, quarantine=True)
    world.run()
    assert world.outputs["kept"] == [sample("kept", index) for index in range(40)]


def test_a_quarantined_request_that_had_not_filled_a_block_grows_soundly() -> None:
    world = World(blocks=256, specs=SPECS["windowed"])
    world.add("short", PROMPT[:5], max_tokens=10 * BLOCK)
    world.step()
    keep_reset(world, quarantine=True)
    world.run()
    assert len(world.outputs["short"]) == 10 * BLOCK
    world.assert_empty()


def test_connectors_that_would_save_stale_kv_switch_quarantine_off_and_readers_do_not() -> None:
    saver = World(blocks=64, connector=["Remote", SecondRemote.__name__])
    assert "Remote may save" in guards.install(saver.scheduler).problems["reset.quarantine"]
    reader = World(blocks=64, connector="Remote")
    reader.scheduler.vllm_config.kv_transfer_config.kv_role = "kv_consumer"
    assert guards.install(reader.scheduler).problems == {}
    assert guards.install(World(blocks=64).scheduler).problems == {}
