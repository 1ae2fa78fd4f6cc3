"""An executor without a model, for vLLM's real engine core and real scheduler.

It keeps a "KV memory": what it is told to compute it writes into the slots that the block tables name, and each token
it samples is a function of everything read back through the block table. So a block that was handed out twice, lost,
or served from a cache it should not be in, changes the tokens. Sampling is greedy and repeatable: a request's tokens
depend on its prompt alone, as long as the engine's bookkeeping is right.

Environment: KVCTL_FAKE_BLOCKS (blocks, default 256), KVCTL_FAKE_STEP_MS (time of a step, default 0),
KVCTL_FAKE_HOLD_GIL=1 (a step holds the GIL all that time, as a bad extension would).
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

VOCABULARY = 500
FIRST_TOKEN = 8


def next_token(read_back: numpy.ndarray) -> int:
    return FIRST_TOKEN + zlib.crc32(numpy.ascontiguousarray(read_back).tobytes()) % (VOCABULARY - FIRST_TOKEN)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed engine answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(numpy.array(tokens, dtype=numpy.int32)))
    return tokens[len(prompt) :]


def spend(seconds: float) -> None:
    """The time of a step."""
    if os.environ.get("KVCTL_FAKE_HOLD_GIL") == "1":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL, other than CDLL, keeps the GIL
    else:
        time.sleep(seconds)


@dataclass
class _Request:
    tokens: list[int]
    prompt: int
    blocks: list[int]


class _Later(Future):  # type: ignore[type-arg]
    """A result that takes as long as a step."""

    def __init__(self, value: Any, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.set_result(value)

    def result(self, timeout: float | None = None) -> Any:
        if self._seconds:
            spend(self._seconds)
        return super().result(timeout)


class FakeExecutor(Executor):
    def _init_executor(self) -> None:
        self._block_size = self.cache_config.block_size
        self._memory = numpy.zeros((0, self._block_size), dtype=numpy.int32)
        self._requests: dict[str, _Request] = {}
        self._sampled: ModelRunnerOutput | None = None
        self._seconds = float(os.environ.get("KVCTL_FAKE_STEP_MS", "0")) / 1000

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    # --- boot ----------------------------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [{"layer.0": FullAttentionSpec(self._block_size, num_kv_heads=1, head_size=4, dtype=torch.float32)}]

    def determine_available_memory(self) -> list[int]:
        page = self.get_kv_cache_specs()[0]["layer.0"].page_size_bytes
        return [page * int(os.environ.get("KVCTL_FAKE_BLOCKS", "256"))]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self._memory = numpy.zeros((kv_cache_configs[0].num_blocks, self._block_size), dtype=numpy.int32)

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> Any:
        answers = {"get_supported_tasks": [("generate",)], "supports_draft_weight_updates": [False]}
        return answers.get(method, [None])

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    # --- steps ---------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        self._learn(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return _Later(EMPTY_MODEL_RUNNER_OUTPUT, 0) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        self._sampled = self._run(scheduler_output)
        return _Later(None, 0) if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        sampled, self._sampled = self._sampled, None
        if non_block:
            return _Later(sampled, self._seconds)
        spend(self._seconds)
        return sampled

    def _learn(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            tokens = list(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            self._requests[new.req_id] = _Request(tokens, len(new.prompt_token_ids), list(new.block_ids[0]))
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self._requests[request_id]
            resumed = request_id in cached.resumed_req_ids
            blocks = cached.new_block_ids[index]
            if resumed:
                request.blocks = []
            if blocks is not None:
                request.blocks += blocks[0]
            if request_id in cached.all_token_ids:
                request.tokens = list(cached.all_token_ids[request_id])
            # What was sampled ahead of a preemption was dropped by the scheduler, so it was never said.
            del request.tokens[request.prompt + cached.num_output_tokens[index] :]
            missing = request.prompt + cached.num_output_tokens[index] - len(request.tokens)
            assert missing == 0, f"{request_id}: {missing} tokens that this worker never sampled"

    def _run(self, scheduler_output: Any) -> ModelRunnerOutput:
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, sampled = [], []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            start = computed[request_id]
            end = start + count
            for position in range(start, end):
                block = request.blocks[position // self._block_size]
                self._memory[block, position % self._block_size] = request.tokens[position]
            ids.append(request_id)
            if end < len(request.tokens):
                # More of the prompt, or of what a preempted request had said already, is still to come.
                sampled.append([])
                continue
            table = request.blocks[: -(-end // self._block_size)]
            token = next_token(self._memory[table].reshape(-1)[:end])
            request.tokens.append(token)
            sampled.append([token])
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)}, sampled_token_ids=sampled
        )
