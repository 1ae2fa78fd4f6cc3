"""The tiers beside the prefix cache, on vLLM's own encoder cache manager: cleared on both sides or not at all."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from engine_bridge import protocol
from engine_bridge.engine import tiers, versions
from tests.engine.fake_vllm import expected_tokens
from tests.engine.moves import HOUR_NS, Caller, ask
from tests.engine.scheduler_world import World
from tests.engine.stepped_engine import Loop

pytestmark = pytest.mark.engine


def engine_of(world: World, *, multimodal: bool = False, cache_gb: float = 4) -> Any:
    settings = SimpleNamespace(mm_processor_cache_gb=cache_gb, mm_processor_cache_type="lru")
    model = SimpleNamespace(supports_multimodal_inputs=multimodal, get_multimodal_config=lambda: settings)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model), scheduler=world.scheduler, resets=0)

    def reset_encoder_cache() -> None:
        world.scheduler.encoder_cache_manager.reset()
        engine.resets += 1

    engine.reset_encoder_cache = reset_encoder_cache
    return engine


def with_encoder(world: World) -> Any:
    world.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    return engine_of(world, multimodal=True)


def test_a_text_model_has_neither_tier_and_says_so() -> None:
    world = World(blocks=64)
    world.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=0)
    engine = engine_of(world)
    assert tiers.reset_multimodal(engine).state == "not_configured"
    assert tiers.reset_encoder(engine).state == "not_configured"
    assert engine.resets == 0


def test_a_multimodal_cache_whose_other_half_is_elsewhere_is_left_whole_and_the_way_to_clear_it_is_told() -> None:
    tier = tiers.reset_multimodal(engine_of(World(blocks=64), multimodal=True))
    assert (tier.state, tier.reason) == ("unsupported", "TIER_UNSUPPORTED")
    assert "reset_mm_cache" in tier.message


def test_a_multimodal_model_without_a_cache_has_nothing_to_clear() -> None:
    assert tiers.reset_multimodal(engine_of(World(blocks=64), multimodal=True, cache_gb=0)).state == "not_configured"


def test_the_encoder_cache_is_cleared_on_both_sides_while_nobody_needs_it() -> None:
    engine = with_encoder(World(blocks=64))
    assert tiers.reset_encoder(engine).state == "done"
    assert engine.resets == 1


@pytest.mark.parametrize("needed", ["computed", "in flight"])
def test_the_encoder_cache_is_kept_while_a_request_still_needs_what_is_in_it(needed: str) -> None:
    world = World(blocks=64)
    engine = with_encoder(world)
    request = world.add("sees", 40)
    request.mm_features = [SimpleNamespace()]
    assert tiers.reset_encoder(engine).state == "done", "it has not been started"
    if needed == "computed":
        request.num_computed_tokens = 16
    else:
        request.num_in_flight_tokens = 16
    tier = tiers.reset_encoder(engine)
    assert (tier.state, tier.reason) == ("refused", "BLOCKS_HELD_BY_REQUESTS")
    assert engine.resets == 1


def test_an_encoder_cache_that_a_connector_would_fill_again_is_left_whole_and_says_so() -> None:
    class Store:
        """An encoder cache connector."""

    world = World(blocks=64)
    engine = with_encoder(world)
    world.scheduler.ec_connector = Store()
    tier = tiers.reset_encoder(engine)
    assert (tier.state, tier.reason) == ("unsupported", "TIER_UNSUPPORTED")
    assert "Store keeps encoder outputs of its own" in tier.message
    assert versions.encoder_unsupported(engine) == tier.message
    assert engine.resets == 0


def test_a_preempt_lets_steps_that_read_encoder_outputs_run_out_and_then_clears_these() -> None:
    """Two batches are in flight all the time: without a pause between them there is no moment to clear anything."""
    prompt = [8 + i % 400 for i in range(40)]
    loop = Loop(asynchronous=True, connector=False, blocks=64, max_model_len=480)
    caller = Caller(loop)
    try:
        loop.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
        loop.scheduler.max_num_encoder_input_tokens = 64
        said: list[int] = []
        loop.add("sees", prompt, 60)
        for _ in range(6):
            loop.turn()
        picture = MultiModalFeatureSpec(
            data=None, modality="image", identifier="picture", mm_position=PlaceholderRange(offset=0, length=4)
        )
        loop.scheduler.requests["sees"].mm_features = [picture]
        deadline = loop.clock.now + HOUR_NS
        reset = protocol.Reset(0, str(uuid.uuid4()), deadline, "preempt", encoder=True)
        outcome = ask(loop, caller, reset, said)
        assert (outcome.state, outcome.result.encoder.state) == ("done", "done")
        assert outcome.result.requests_preempted == 1
        for _ in range(200):
            loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
        assert said == expected_tokens(prompt, 60)
    finally:
        caller.close()
        loop.close()
