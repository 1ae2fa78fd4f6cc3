"""A real vLLM scheduler on the CPU with no model behind it: the test plays worker and remote.

`World.step()` schedules, pretends that the model ran, and feeds made-up tokens back. The KV connector `Remote` finds as
many tokens "remotely" as the test tells it, loads them asynchronously, and finishes loads when the test says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
MODEL_DIR = Path(__file__).resolve().parents[2] / "sidecar" / "local" / "model"

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK, sha256)


class Remote(KVConnectorBase_V1, SupportsHMA):
    """A connector whose answers the test decides."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hits: dict[str, int] = {}
        """Request id -> prompt tokens the remote has; loaded asynchronously."""
        self.loads: list[str] = []
        """Every load that was started, in order."""
        self.answer: Any = True
        """What `reset_cache` answers, or an exception it raises."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        found = max(0, self.hits.get(request.request_id, 0) - num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def reset_cache(self) -> bool | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class SecondRemote(Remote):
    """Another one, to join with the first."""


def vllm_config(
    *, connector: str | list[str] = "", events: str = "", asynchronous: bool = False, **options: Any
) -> Any:
    """A VllmConfig for a scheduler; `options` are EngineArgs."""
    arguments: dict[str, Any] = {
        "model": str(MODEL_DIR),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 4096,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK,
        "enable_prefix_caching": True,
        **options,
    }
    if connector:
        arguments["kv_transfer_config"] = _transfer(connector)
    if events:
        arguments["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events, topic="kv"
        )
    config = EngineArgs(**arguments).create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous
    return config


OFFLOAD = "SimpleCPUOffloadConnector"
LAZY_OFFLOAD = "lazy SimpleCPUOffloadConnector"
CPU_BLOCKS = 32


def _transfer(connector: str | list[str]) -> KVTransferConfig:
    def one(name: str) -> dict[str, Any]:
        if name in (OFFLOAD, LAZY_OFFLOAD):
            extra = {
                "cpu_bytes_to_use": CPU_BLOCKS * full_attention().page_size_bytes,
                "lazy_offload": name == LAZY_OFFLOAD,
            }
            return {"kv_connector": OFFLOAD, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": __name__}

    if isinstance(connector, str):
        return KVTransferConfig(**one(connector))
    children = {"connectors": [one(name) for name in connector]}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=children)


def _memory(blocks: int) -> KVCacheTensor:
    page = full_attention().page_size_bytes
    return KVCacheTensor(size=blocks * page, layers=["layer0"], layer_stride=blocks * page, block_stride=page)


def full_attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)


def sliding_window(tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=tokens)


def sample(request_id: str, index: int) -> int:
    """The token this world's model says at a position: a function of the request and the position only."""
    return 8 + (hash(request_id) + 31 * index) % 400


class World:
    """A scheduler, and a clockwork that runs it."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        specs: Iterable[Any] = (),
        scheduler_class: type[Scheduler] | None = None,
        config: Any = None,
        **options: Any,
    ) -> None:
        self.config = config or vllm_config(**options)
        self.config.cache_config.num_gpu_blocks = blocks
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs or [full_attention()])]
        cls = scheduler_class or (AsyncScheduler if options.get("asynchronous") else Scheduler)
        self.scheduler = cls(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[_memory(blocks)], kv_cache_groups=groups
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.outputs: dict[str, list[int]] = {}
        self.in_flight: deque[Any] = deque()
        self.zero_steps = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def remote(self) -> Remote:
        return self.scheduler.connector

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 4, **options: Any) -> Request:
        """A request; a number makes a prompt of so many tokens that shares no block with another request's."""
        tokens = prompt if isinstance(prompt, list) else [8 + (hash(request_id) + i) % 400 for i in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        request = Request(
            request_id=request_id,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=options.pop("arrival_time", time.time()),
            block_hasher=_hasher,
            **options,
        )
        self.scheduler.add_request(request)
        self.outputs.setdefault(request_id, [])
        return request

    def schedule(self) -> Any:
        """Schedule one step and leave it in flight."""
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        return output

    def process(self, loaded: Iterable[str] = (), stored: Iterable[int] = ()) -> None:
        """The oldest step in flight has run, and these loads and offload stores have finished."""
        output = self.in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sampled(output, request_id) for request_id in ids]
        runner = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=_transfers(set(loaded), list(stored)),
        )
        for outputs in self.scheduler.update_from_output(output, runner).values():
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids

    def _sampled(self, output: Any, request_id: str) -> list[int]:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return []
        start = next(
            (new.num_computed_tokens for new in output.scheduled_new_reqs if new.req_id == request_id),
            None,
        )
        if start is None:
            cached = output.scheduled_cached_reqs
            start = cached.num_computed_tokens[cached.req_ids.index(request_id)]
        end = start + output.num_scheduled_tokens[request_id]
        position = end - request.num_prompt_tokens
        # A chunk that ends before what is already known (a prompt, or a replay after a preemption) says nothing.
        return [sample(request_id, position)] if end >= request.num_tokens else []

    def step(self, loaded: Iterable[str] = ()) -> Any:
        """One step, scheduled and processed. Returns what was scheduled."""
        output = self.schedule()
        self.process(loaded)
        return output

    def run(self, limit: int = 500) -> int:
        """Steps until nothing is left to do; the number of them. Finishes loads as they come."""
        for count in range(limit):
            if not self.scheduler.requests:
                return count
            self.step(self.loading())
        raise AssertionError(f"not finished after {limit} steps: {list(self.scheduler.requests)}")

    def loading(self) -> list[str]:
        """Requests whose load is in flight."""
        return [
            request_id
            for request_id, request in self.scheduler.requests.items()
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            and request_id not in self.scheduler.finished_recving_kv_req_ids
        ]

    def hit_tokens(self, tokens: list[int]) -> int:
        """How many tokens of a prompt the local cache would serve now."""
        request = Request(
            request_id="probe",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=_hasher,
        )
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def assert_sound(self) -> None:
        """Every block is either free, once and in both directions, or held."""
        for pool in {id(g.block_pool): g.block_pool for g in self.groups}.values():
            assert_queue_sound(pool)

    @property
    def groups(self) -> Any:
        return self.scheduler.kv_cache_manager.coordinator.single_type_managers

    def assert_empty(self) -> None:
        """No request is left, and no block is held."""
        self.assert_sound()
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert not any(group.req_to_blocks for group in self.groups)


def _transfers(loaded: set[str], stored: list[int]) -> KVConnectorOutput | None:
    if not loaded and not stored:
        return None
    done = SimpleCPUOffloadWorkerMetadata(completed_store_events=dict.fromkeys(stored, 1)) if stored else None
    return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=done)


def queue_ids(pool: Any) -> list[int]:
    """Ids in the free queue, from its front."""
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def assert_queue_sound(pool: Any) -> None:
    """The pool's own invariants, read off its links."""
    queue = pool.free_block_queue
    forward, backward = [], []
    block = queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail:
        forward.append(block)
        assert len(forward) <= pool.num_gpu_blocks, "the free queue runs in a circle"
        block = block.next_free_block
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backward.append(block)
        assert len(backward) <= pool.num_gpu_blocks
        block = block.prev_free_block
    ids = [block.block_id for block in forward]
    assert ids == [block.block_id for block in reversed(backward)]
    assert len(ids) == len(set(ids)) == queue.num_free_blocks
    free = set(ids)
    for block in pool.blocks:
        linked = block.next_free_block is not None
        assert linked == (block.prev_free_block is not None)
        assert linked == (block.block_id in free)
        assert not block.is_null or not linked
        assert not linked or block.ref_cnt == 0
        assert linked or block.ref_cnt > 0 or block.is_null
    for entry in pool.cached_block_hash_to_block._cache.items():
        key, found = entry
        for cached in found.values() if isinstance(found, dict) else [found]:
            others = pool.cached_block_hashes_by_block.get(cached.block_id, ())
            assert cached.block_hash == key or key in others
