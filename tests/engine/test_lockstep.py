"""Mixture-of-experts data parallel: ranks that step together, an idle one with dummy batches beside a busy one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from engine_bridge import protocol
from engine_bridge.page import PageReader
from tests.contract.engine_contract import reset_result
from tests.engine.conftest import BOOT_SECONDS, engine_config, eventually
from tests.engine.fake_vllm import expected_tokens
from tests.fake_engine.client import BridgeClient, deadline, new_id

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3 * BOOT_SECONDS)]

T = TypeVar("T")
PROMPT = list(range(8, 72))
TOKENS = 2000
PATIENCE_S = 60.0

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


class Ranks:
    """vLLM's own client of two ranks, on this event loop, and a client of each rank's bridge."""

    def __init__(self, client: Any, directory: Path) -> None:
        self.client = client
        self.directory = directory
        self.tokens: list[int] = []
        self.bridges: list[BridgeClient] = []

    async def pump(self) -> None:
        while True:
            outputs = await self.client.get_output_async()
            for output in outputs.outputs:
                self.tokens += output.new_token_ids

    async def until(self, condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(eventually, condition, bool, PATIENCE_S)

    async def connect(self) -> None:
        look = lambda: sorted(self.directory.glob("*.sock"))  # noqa: E731
        paths = await asyncio.to_thread(eventually, look, lambda found: len(found) == 2, BOOT_SECONDS)
        self.bridges = [await asyncio.to_thread(BridgeClient, path, timeout=PATIENCE_S) for path in paths]

    async def each(self, ask: Callable[[BridgeClient], T]) -> list[T]:
        """Off the event loop: the ranks wait for each other, and for messages of vLLM's client that it carries."""
        return [await asyncio.to_thread(ask, bridge) for bridge in self.bridges]

    async def reset(self, running: protocol.RunningMode, **options: bool) -> list[protocol.Outcome]:
        return await self.each(lambda bridge: bridge.reset(running, seconds=PATIENCE_S, **options))

    def steps(self, rank: int) -> int:
        reader = PageReader(sorted(self.directory.glob("*.page"))[rank])
        try:
            return reader.read().counters.steps
        finally:
            reader.close()


@asynccontextmanager
async def ranks_in_lockstep(directory: Path, model: Path) -> AsyncIterator[Ranks]:
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    config = engine_config(model=str(model), data_parallel_size=2, max_model_len=8192)
    client = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=True)
    ranks = Ranks(client, directory)
    pump = asyncio.create_task(ranks.pump())
    try:
        await ranks.connect()
        yield ranks
    finally:
        pump.cancel()
        for bridge in ranks.bridges:
            bridge.close()
        client.shutdown()


async def add(ranks: Ranks) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    await ranks.client.add_request_async(
        EngineCoreRequest(
            request_id="on rank 0",
            prompt_token_ids=PROMPT,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=0,
        )
    )


def test_ranks_in_lockstep_are_driven_and_an_idle_one_goes_on_with_dummy_batches(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_ENGINE_DIR", str(engine_dir))
    monkeypatch.setenv("KVCTL_FAKE_STEP_MS", "2")
    monkeypatch.setenv("KVCTL_FAKE_BLOCKS", "1024")

    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))

    async def drive() -> None:
        async with ranks_in_lockstep(engine_dir, tmp_path) as ranks:
            welcomes = [bridge.welcome for bridge in ranks.bridges]
            assert [(w.data_parallel_rank, w.data_parallel_size) for w in welcomes if w] == [(0, 2), (1, 2)]
            assert all("pause together" in w.capabilities["pause"] for w in welcomes if w)
            await add(ranks)
            await ranks.until(lambda: len(ranks.tokens) > 5)
            assert [outcome.state for outcome in await ranks.reset("fail")] == ["refused", "done"]
            kept = await ranks.reset("keep", quarantine=True)
            assert [reset_result(outcome).requests_kept for outcome in kept] == [1, 0]
            preempted = await ranks.reset("preempt")
            assert [reset_result(outcome).requests_preempted for outcome in preempted] == [1, 0]
            reordered = await ranks.each(lambda bridge: bridge.reorder("all_free", seconds=PATIENCE_S))
            assert [outcome.state for outcome in reordered] == ["done", "done"]
            assert [found.running for found in await ranks.each(lambda bridge: bridge.admission())] == [1, 0]
            before = ranks.steps(1)
            await ranks.until(lambda: ranks.steps(1) > before + 20)
            await a_pause_of_vllms_own(ranks)
            await ranks.until(lambda: len(ranks.tokens) >= TOKENS)
            assert ranks.tokens == expected_tokens(PROMPT, TOKENS)
            idle = await ranks.reset("fail", reorder=True, wait_for_idle=True)
            assert [outcome.state for outcome in idle] == ["done", "done"]

    asyncio.run(drive())


async def a_pause_of_vllms_own(ranks: Ranks) -> None:
    """Both ranks pause by consent; one is neither paused nor resumed by us alone."""
    await asyncio.wait_for(ranks.client.pause_scheduler_async("keep", False), PATIENCE_S)
    assert [found.paused for found in await ranks.each(lambda bridge: bridge.admission())] == ["all", "all"]
    assert [outcome.state for outcome in await ranks.reset("keep")] == ["done", "done"]
    resumed = await ranks.each(
        lambda bridge: bridge.mutate(lambda call: protocol.Resume(call, new_id(), deadline(PATIENCE_S), force=True))
    )
    assert [outcome.state for outcome in resumed] == ["unsupported", "unsupported"]
    said = len(ranks.tokens)
    await asyncio.wait_for(ranks.client.resume_scheduler_async(), PATIENCE_S)
    await ranks.until(lambda: len(ranks.tokens) > said)
