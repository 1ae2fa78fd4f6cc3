"""The tiers beside the prefix cache, on vLLM's own encoder cache manager: cleared on both sides or not at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from engine_bridge.engine import tiers
from tests.engine.scheduler_world import World

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
