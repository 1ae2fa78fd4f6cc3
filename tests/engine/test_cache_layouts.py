"""Engines whose models keep more than one kind of state: sliding windows, and Mamba states beside attention. Each is
attached to and driven once through its socket, by real scheduler and real block pool.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from engine_bridge import protocol
from tests.engine.fake_vllm import expected_tokens
from tests.engine.moves import HOUR_NS, Caller, ask
from tests.engine.scheduler_world import assert_queue_sound
from tests.engine.stepped_engine import LoadingExecutor, Loop, assert_references_sound

pytestmark = pytest.mark.engine

BLOCK = 16
PROMPT = [8 + i % 400 for i in range(100)]
TOKENS = 80


class WindowedExecutor(LoadingExecutor):
    """One layer sees everything, the other the last 32 tokens."""

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        window = SlidingWindowSpec(BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32, sliding_window=32)
        full = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
        return [{"layer.0": full, "layer.1": window}]


MAMBA_CACHE_MODE = "align" if Version(vllm.__version__).release >= (0, 33) else "all"
"""Since 0.33 the only mode that can be cached; before, it takes more than a spec to have it."""


class HybridExecutor(LoadingExecutor):
    """One layer attends, the other keeps a Mamba state of the same size."""

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        full = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
        values = full.page_size_bytes // 4
        state = MambaSpec(BLOCK, shapes=((values,),), dtypes=(torch.float32,), mamba_cache_mode=MAMBA_CACHE_MODE)
        return [{"layer.0": full, "layer.1": state}]


@pytest.fixture(params=[WindowedExecutor, HybridExecutor], ids=["windowed", "hybrid"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    loop = Loop(
        asynchronous=False,
        connector=False,
        blocks=200,
        max_model_len=480,
        distributed_executor_backend=f"{__name__}.{request.param.__name__}",
    )
    try:
        yield loop
    finally:
        loop.close()


def test_every_operation_on_a_model_with_several_kinds_of_state(loop: Loop) -> None:
    caller, said = Caller(loop), list[int]()

    def reset(running: protocol.RunningMode, **options: bool) -> Any:
        deadline = loop.clock.now + HOUR_NS
        return ask(loop, caller, protocol.Reset(0, str(uuid.uuid4()), deadline, running, **options), said)

    assert len(loop.scheduler.kv_cache_manager.coordinator.single_type_managers) == 2
    loop.add("runs", PROMPT, TOKENS)
    for _ in range(8):
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    assert reset("fail").reason == "BLOCKS_HELD_BY_REQUESTS"
    kept = reset("keep", quarantine=True, reorder=True)
    assert kept.state == "done", kept
    assert kept.result.requests_quarantined == 1
    for _ in range(20):
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    evidence = ask(loop, caller, protocol.Admission(0), said)
    assert (evidence.running, evidence.blocks_cached, evidence.quarantined_requests) == (1, 0, 1)
    preempted = reset("preempt")
    assert preempted.state == "done", preempted
    assert preempted.result.requests_preempted == 1
    assert_references_sound(loop.scheduler)
    while len(said) < TOKENS:
        loop.turn()
        said += [token for output in loop.outputs() for token in output.new_token_ids]
    assert said == expected_tokens(PROMPT, TOKENS)
    for _ in range(3):
        loop.turn()
    deadline = loop.clock.now + HOUR_NS
    reorder = ask(loop, caller, protocol.Reorder(0, str(uuid.uuid4()), deadline, "idle"), said)
    assert reorder.state == "done", reorder
    assert reorder.result.after.runs == 1
    assert reset("fail").result.cached_blocks_dropped > 0
    assert reset("fail").result.cached_blocks_dropped == 0
    assert_queue_sound(loop.scheduler.kv_cache_manager.block_pool)
    assert_references_sound(loop.scheduler)
    caller.close()


def test_a_kept_reset_with_a_reorder_leaves_the_free_blocks_in_order_while_serving(loop: Loop) -> None:
    caller, said = Caller(loop), list[int]()
    for number in range(4):
        loop.add(f"short {number}", [*PROMPT, number], 3 + number)
    loop.add("runs", PROMPT, TOKENS)
    while len(loop.scheduler.requests) != 1 or not loop.scheduler.running:
        loop.turn()
    queue = loop.scheduler.kv_cache_manager.block_pool.free_block_queue
    assert [block.block_id for block in queue.get_all_free_blocks()] != sorted(
        block.block_id for block in queue.get_all_free_blocks()
    )
    request = protocol.Reset(0, str(uuid.uuid4()), loop.clock.now + HOUR_NS, "keep", reorder=True)
    outcome = ask(loop, caller, request, said)
    assert outcome.state == "done"
    assert outcome.result.requests_kept == 1
    assert outcome.result.reorder.after.runs < outcome.result.reorder.before.runs
    assert "runs" in loop.scheduler.requests
    ids = [block.block_id for block in queue.get_all_free_blocks()]
    gaps = sum(after != before + 1 for before, after in itertools.pairwise(ids))
    assert gaps <= 2, "it holds blocks in between"
    caller.close()
