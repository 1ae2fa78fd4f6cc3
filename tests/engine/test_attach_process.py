"""The bridge in an engine core process."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_bridge.page import PageReader, Phase
from tests.engine.conftest import engine_process, eventually
from tests.engine.fake_vllm import expected_tokens

pytestmark = pytest.mark.engine


def test_an_engine_process_answers_on_its_socket_and_cleans_up_when_it_ends(engine_dir: Path) -> None:
    with engine_process(engine_dir) as engine:
        with engine.bridge() as bridge:
            assert bridge.welcome is not None
            assert bridge.welcome.data_parallel_rank == 0
            assert bridge.welcome.prefix_caching
            assert bridge.welcome.blocks == 255
            name = engine.add(list(range(8, 72)), 20)
            engine.wait_finished(name)
            assert engine.tokens[name] == expected_tokens(list(range(8, 72)), 20)
            outcome = bridge.reset("fail")
            assert outcome.state == "done", outcome
            assert outcome.result is not None
            assert outcome.result.cached_blocks_dropped > 0
        page = PageReader(engine.sockets()[0].with_suffix(".page"))
        counters = eventually(lambda: page.read().counters, lambda counters: counters.phase == Phase.IDLE)
        assert counters.steps >= 20
        assert counters.tokens_scheduled >= 64 + 19
        assert counters.outputs >= 20
    assert list(engine_dir.iterdir()) == []
