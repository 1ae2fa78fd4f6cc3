"""One engine over two workers: the bridge is in the engine core, the model and its memory are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.engine_contract import reset_result
from tests.engine.conftest import BOOT_SECONDS, engine_process, eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3 * BOOT_SECONDS)]

PROMPT = list(range(8, 136))
TOKENS = 150


def test_two_workers_keep_their_tokens_through_every_kind_of_reset(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A core each; by itself vLLM wants a NUMA node for each worker.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "block_size": 32}
    with (
        engine_process(engine_dir, kv_cache_memory_bytes=16 << 20, **options) as engine,
        engine.bridge() as bridge,
    ):
        undisturbed = engine.add(PROMPT, TOKENS)
        engine.wait_finished(undisturbed)
        idle = bridge.reset("fail", reorder=True, seconds=60)
        assert idle.state == "done", idle
        assert reset_result(idle).cached_blocks_dropped > 0
        disturbed = engine.add(PROMPT, TOKENS)
        engine.wait_tokens(disturbed, 5)
        assert bridge.reset("fail", seconds=60).reason == "BLOCKS_HELD_BY_REQUESTS"
        assert reset_result(bridge.reset("keep", quarantine=True, seconds=60)).requests_quarantined == 1
        assert bridge.admission().running == 1
        assert reset_result(bridge.reset("preempt", reorder=True, seconds=60)).requests_preempted == 1
        engine.wait_finished(disturbed)
        assert engine.tokens[disturbed] == engine.tokens[undisturbed]
        eventually(lambda: bridge.reorder("idle", seconds=60).state, lambda state: state == "done", 60)
