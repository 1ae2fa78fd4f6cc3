"""A real vLLM engine process that two requests bring into the deadlock of finished loads, and that relief brings out.

Its scheduler, block pool and loop are vLLM's own. The model behind it is made up (`tests.engine.fake_vllm`), with one
layer of full attention and one with a sliding window; its KV connector finds the first 1024 tokens of a long prompt
"remotely". 160 blocks: both requests are admitted, and then no chunk of either fits (test_deadlock_relief).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.engine.conftest import VllmEngineHarness, engine_process
from tests.engine.stepped_engine import Loader, LoadingExecutor

BLOCKS = 160
PROMPT = 1280
FOUND = 1024
"""Tokens of a prompt that the remote has."""


class FindsLongPrompts(Loader):
    """Of whatever is as long as the two, the remote has the beginning."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if len(request.prompt_token_ids) >= PROMPT:
            self.hits[request.request_id] = FOUND
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class LoadsTheFirstTwoTogether(LoadingExecutor):
    """The first load ends with the second, so that both requests are in; every later one ends with the next step."""

    together = 2

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        full = FullAttentionSpec(self._block_size, num_kv_heads=1, head_size=4, dtype=torch.float32)
        window = SlidingWindowSpec(
            self._block_size, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=32
        )
        return [{"layer.0": full, "layer.1": window}]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        first, *others = (group.kv_cache_spec for group in kv_cache_configs[0].kv_cache_groups)
        assert isinstance(first, FullAttentionSpec), "the worker reads its memory through the first group's blocks"
        assert len(others) == 1
        super().initialize_from_config(kv_cache_configs)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if len(self.loads) >= self.together:
            self.landing, self.together = len(self.loads), 1
        return super().execute_model(scheduler_output, non_block)


@contextmanager
def deadlockable_engine(directory: Path) -> Iterator[VllmEngineHarness]:
    """Healthy until `deadlock` is called with it."""
    transfer = KVTransferConfig(
        kv_connector=FindsLongPrompts.__name__, kv_role="kv_consumer", kv_connector_module_path=__name__
    )
    options = {
        "kv_transfer_config": transfer,
        "distributed_executor_backend": f"{__name__}.{LoadsTheFirstTwoTogether.__name__}",
        "max_model_len": 2048,
        "disable_hybrid_kv_cache_manager": False,
    }
    with engine_process(directory, step_ms=2, blocks=BLOCKS, **options) as engine:
        yield engine


def deadlock(engine: VllmEngineHarness) -> tuple[str, str]:
    """Add the two requests; they end when one has been relieved."""
    first = engine.add([8 + i % 400 for i in range(PROMPT)], 4)
    second = engine.add([9 + i % 401 for i in range(PROMPT)], 4)
    return first, second
