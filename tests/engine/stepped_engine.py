"""vLLM's real EngineCoreProc on the test's own thread: loop, bridge, socket and waker, without a second of real time.

An engine that blocks, a waker thread and a clock make runs that nobody can repeat. Here the loop's body is called turn
by turn; a queue that would block says so instead, and the next turn goes on inside vLLM's own loop where it had
blocked; the waker is a script that wakes the engine exactly when the real one would; and time is a number that moves
when it is read (`pace`) or told to. So an engine that blocks with nobody watching is seen as what it is: wedged.

`Loader` is a connector that finds prefixes "remotely" and `LoadingExecutor` the worker that loads them when told to.
"""

from __future__ import annotations

import queue
import select
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from engine_bridge import attach, listener
from engine_bridge.engine import hooks
from tests.engine import fake_vllm
from tests.engine.conftest import engine_config
from tests.engine.fake_vllm import FakeExecutor, _Later
from tests.engine.scheduler_world import Remote

SPINS = 5_000
"""Wake-ups without a step after which an engine is said to spin."""


# --- a remote that finds prefixes, and a worker that loads them -------------------------------------------------------


@dataclass
class Load:
    request_id: str
    tokens: list[int]
    """Of the whole prompt, from position 0."""
    start: int
    blocks: list[int]


@dataclass
class Loads(KVConnectorMetadata):
    started: list[Load] = field(default_factory=list)


class Loader(Remote):
    """`hits` says how many tokens of a prompt the remote has."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._started: list[Load] = []
        self._computed: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._computed[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        start = self._computed[request.request_id]
        tokens = list(request.prompt_token_ids[: start + num_external_tokens])
        self._started.append(Load(request.request_id, tokens, start, list(blocks.get_block_ids()[0])))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        started, self._started = self._started, []
        return Loads(started)


class LoadingExecutor(FakeExecutor):
    """Loads are under way until `landing` says how many of the oldest end with the next step."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.loads: list[Load] = []
        self.landing = 0

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        metadata = getattr(scheduler_output, "kv_connector_metadata", None)
        if isinstance(metadata, Loads):
            self.loads += metadata.started
        ended, self.loads = self.loads[: self.landing], self.loads[self.landing :]
        self.landing = 0
        for load in ended:
            for position in range(load.start, len(load.tokens)):
                block = load.blocks[position // self._block_size]
                self._memory[block, position % self._block_size] = load.tokens[position]
        result = super().execute_model(scheduler_output, non_block)
        if not ended:
            return result
        output = KVConnectorOutput(finished_recving={load.request_id for load in ended})
        if self._sampled is not None:
            self._sampled.kv_connector_output = output
            return result
        empty = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)
        return _Later(empty, 0) if non_block else empty


# --- time, the queue and the waker ------------------------------------------------------------------------------------


class Clock:
    """Stands in for the module `time` where the bridge reads it."""

    def __init__(self) -> None:
        self.now = 10**12
        self.pace = 1_000
        """Nanoseconds that pass with every look at the clock."""

    def monotonic_ns(self) -> int:
        self.now += self.pace
        return self.now


class WouldBlockError(Exception):
    """The engine waits for something to happen."""


class ScriptedQueue(queue.Queue):  # type: ignore[type-arg]
    """An input queue on which nobody waits."""

    taken = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.taken += 1
        assert self.taken < SPINS, "the engine spins on wake-ups and never steps"
        try:
            return super().get(block=False)
        except queue.Empty:
            if block:
                raise WouldBlockError from None
            raise


class ScriptedWaker:
    """What `engine_bridge.waker.Waker` does, when it is asked to `look` instead of all the time."""

    def __init__(self, watched_fd: int, wake: Callable[[], None]) -> None:
        self._watched = watched_fd
        self._wake = wake
        self._armed = False
        self._wake_at_ns = 0

    def arm(self, wake_at_ns: int, *, at_once: bool = False) -> None:
        if at_once:
            self._wake()
            return
        self._armed = True
        self._wake_at_ns = wake_at_ns

    def look(self, now_ns: int) -> None:
        readable = False
        if self._armed:
            poll = select.poll()
            poll.register(self._watched, select.POLLIN)
            readable = bool(poll.poll(0))
        due = bool(self._wake_at_ns) and now_ns >= self._wake_at_ns
        if readable:
            self._armed = False
        if due:
            self._wake_at_ns = 0
        if readable or due:
            self._wake()

    def close(self) -> None:
        self._armed = False
        self._wake_at_ns = 0

    close_inherited = close


# --- the engine -------------------------------------------------------------------------------------------------------


class SteppedEngine(EngineCoreProc):
    """An engine core process without the process: no client sockets and no threads, all else is vLLM's."""

    def __init__(self, config: Any) -> None:
        self.input_queue = ScriptedQueue()
        self.output_queue = queue.Queue()
        self.engine_index = 0
        self.engines_running = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.reject_new_requests = False
        self.tensor_ipc_receiver = None
        self.has_coordinator = self.publish_dp_lb_stats = self.enable_fault_tolerance = False
        self.last_counts = (0, 0)
        self.process_input_queue_block = True
        self.paused_by_client: PauseState | None = None
        """How vLLM's own client has paused it, if it has and nobody has resumed it since."""
        self._not_cleared: Exception | None = None
        EngineCore.__init__(self, config, Executor.get_class(config), True)

    def pause_scheduler(self, mode: Any = "abort", clear_cache: bool = True) -> Any:
        self.paused_by_client = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        return super().pause_scheduler(mode, clear_cache)

    def resume_scheduler(self) -> None:
        self.paused_by_client = None
        super().resume_scheduler()

    def _reset_caches(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._reset_caches(*args, **kwargs)
        except Exception as error:
            self._not_cleared = error
            raise

    def _notify_idle_state_callbacks(self) -> None:
        """Up to 0.30, a sleep that waited for requests kills its engine when vLLM cannot clear the caches afterwards: a
        load holds blocks, or the connector raises. Nobody else has a hand in that; every other death must be seen.
        """
        try:
            super()._notify_idle_state_callbacks()
        except Exception as error:
            if error is not self._not_cleared:
                raise


class Loop:
    """One engine with its bridge. `close` it whatever happens."""

    def __init__(
        self, *, asynchronous: bool, connector: bool, blocks: int, engine_class: Any = SteppedEngine, **options: Any
    ) -> None:
        self.clock = Clock()
        self.blocked = False
        self.directory = Path(tempfile.mkdtemp(prefix="kv"))
        self._patch = pytest.MonkeyPatch()
        self._patch.setenv("KVCTL_ENGINE_DIR", str(self.directory))
        self._patch.setenv("KVCTL_FAKE_BLOCKS", str(blocks))
        self._patch.setattr(attach, "time", self.clock)
        self._patch.setattr(listener, "time", self.clock)
        self._patch.setattr(attach, "Waker", ScriptedWaker)
        self._patch.setattr(fake_vllm, "spend", lambda seconds: None)
        # Every run makes an engine of its own. What vLLM does to the heap at both ends of a process costs more than it.
        self._patch.setattr(vllm_core, "freeze_gc_heap", lambda: None)
        self._patch.setattr(vllm_core, "cleanup_dist_env_and_memory", lambda *args, **kwargs: None)
        if connector:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="Loader", kv_role="kv_consumer", kv_connector_module_path=__name__
            )
        options.setdefault("distributed_executor_backend", f"{__name__}.{LoadingExecutor.__name__}")
        try:
            self.engine: Any = engine_class(engine_config(asynchronous=asynchronous, **options))
            self.bridge: Any = hooks.attach_to_process(self.engine)
            assert self.bridge is not None
        except BaseException:
            # No engine after this one would have a waker that wakes.
            self._patch.undo()
            raise
        resume = self.bridge._port.resume

        def noticed() -> None:
            assert not self.executor.is_sleeping, "scheduling was resumed underneath a sleep"
            assert not self.engine._idle_state_callbacks, "scheduling was resumed underneath a sleep that is to come"
            resume()
            self.engine.paused_by_client = None

        self.bridge._port.resume = noticed

    @property
    def scheduler(self) -> Any:
        return self.engine.scheduler

    @property
    def executor(self) -> LoadingExecutor:
        executor: LoadingExecutor = self.engine.model_executor
        return executor

    @property
    def socket(self) -> Path:
        return self.directory / f"{self.bridge.name}.sock"

    def turn(self) -> bool:
        """Once round vLLM's loop, or as far as it gets before it blocks. False when nothing wakes it."""
        self.bridge._waker.look(self.clock.now)
        inbox = self.engine.input_queue
        inbox.taken = 0
        if self.blocked and inbox.empty():
            return False
        try:
            if self.blocked:
                # The hooks of this round are over: it goes on inside vLLM's own method.
                EngineCoreProc._process_input_queue(self.engine)
            else:
                self.engine._process_input_queue()
        except WouldBlockError:
            self.blocked = True
            return True
        self.blocked = False
        self.engine._process_engine_step()
        return True

    def add(self, name: str, prompt: list[int], max_tokens: int, *, priority: int = 0, remote_tokens: int = 0) -> None:
        if remote_tokens and self.scheduler.connector is not None:
            self.scheduler.connector.hits[name] = remote_tokens
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=self.clock.now / 1e9,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=priority,
        )
        self.engine.input_queue.put_nowait((EngineCoreRequestType.ADD, self.engine.preprocess_add_request(request)))

    def abort(self, names: list[str]) -> None:
        self.engine.aborts_queue.put_nowait(names)
        self.engine.input_queue.put_nowait((EngineCoreRequestType.ABORT, names))

    def utility(self, method: str, *args: Any) -> None:
        """What vLLM's own client asks for; its answer is vLLM's business."""
        self.engine.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 0, method, args)))

    def outputs(self) -> list[Any]:
        found = []
        while not self.engine.output_queue.empty():
            _, outputs = self.engine.output_queue.get_nowait()
            found += outputs.outputs
        return found

    def close(self) -> None:
        self.bridge.close()
        self.engine.shutdown()
        self._patch.undo()
        shutil.rmtree(self.directory)


# --- what must hold between two turns ---------------------------------------------------------------------------------


def assert_references_sound(scheduler: Any) -> None:
    """A block's reference count is the number of those who hold it: requests, and frees that wait for a step. A block
    that carries a hash is found by it.
    """
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    tables = [table for group in groups for table in group.req_to_blocks.values()]
    tables += [blocks for _, blocks in scheduler.deferred_frees]
    pool = scheduler.kv_cache_manager.block_pool
    counted = numpy.zeros(pool.num_gpu_blocks, dtype=int)
    for table in tables:
        for block in table:
            counted[block.block_id] += 1
    for block in pool.blocks:
        assert block.is_null or block.ref_cnt == counted[block.block_id], (block, int(counted[block.block_id]))
    for block in pool.blocks:
        if block.block_hash is not None:
            found = pool.cached_block_hash_to_block._cache.get(block.block_hash, {})
            assert block is found or block.block_id in found, f"a hash that nobody finds: {block}"
