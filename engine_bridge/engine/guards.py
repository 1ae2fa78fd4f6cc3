"""What must hold after a keep reset, where vLLM takes for granted that a held block keeps its hash.

Two guards, each on the instance and never on a class (see `in_force`):

* An offload store that completes after the reset. `simple_kv_offload` holds a reference on a GPU block while it copies
  it, then asserts that the block still has its hash. The guard completes the store for blocks that have one, and for
  the others only gives both references back.
* Quarantine. After a weight update, what a kept request goes on to compute mixes old and new weights and must never
  become a cache hit. While any request is in quarantine, its blocks are not given a hash; it leaves quarantine when its
  blocks are freed, that is when it ends or is preempted and will be recomputed from nothing. While nobody is in
  quarantine, nothing is wrapped.

The third thing vLLM takes for granted, that no auxiliary output is in flight when its generation changes, needs no
wrap: a keep reset leaves that generation alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from engine_bridge.engine.in_force import Layer

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

_SAVES_ONLY_CACHED_BLOCKS = frozenset({"SimpleCPUOffloadConnector"})
"""Connectors that pick what they save by the hash of the GPU block, so that a block without one is never saved."""


class Guards:
    """The guards on one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Use `install`."""
        self._scheduler = scheduler
        self._quarantine = Quarantine(scheduler)
        self._completions: list[Layer] = []
        self.problems: dict[str, str] = {}
        """Capability -> why it cannot be guarded on this engine; such a capability must stay off."""

    def lacking(self) -> dict[str, str]:
        """A copy of `problems`."""
        return dict(self.problems)

    def quarantine_running(self) -> int:
        """Bar what every request that holds KV now fills from here on. Returns how many requests."""
        self.keep_in_force()
        return self._quarantine.add(request.request_id for request in _requests_with_kv(self._scheduler))

    def quarantined(self) -> int:
        """Requests in quarantine."""
        return len(self._quarantine)

    def keep_in_force(self) -> None:
        """Before every step: what others have covered or taken away since is laid on top again."""
        for layer in self._completions:
            layer.lay()
        self._quarantine.keep_in_force()

    def remove(self) -> None:
        """Take the guard on offload stores out: nobody will reset this engine any more. Who is in quarantine stays in
        it, and the last one to leave takes its guard along.
        """
        for layer in self._completions:
            layer.lift()
        self._completions = []


def install(scheduler: Scheduler) -> Guards:
    """Put the guards on one scheduler, before its first keep reset."""
    guards = Guards(scheduler)
    for connector in connectors(scheduler.connector):
        manager = getattr(connector, "scheduler_manager", None)
        if not type(connector).__name__.startswith("SimpleCPUOffload") or manager is None:
            continue
        if hasattr(manager, "_process_store_completion"):
            guards._completions.append(_guard_store_completion(manager))
        else:
            name = type(manager).__name__
            guards.problems["reset.keep"] = f"{name} completes its stores in a way this bridge does not know"
    reason = _quarantine_missing(scheduler)
    if reason:
        guards.problems["reset.quarantine"] = reason
    return guards


def connectors(connector: object) -> Iterator[object]:
    """A KV connector, or those that a MultiConnector joins."""
    if connector is None:
        return
    children = getattr(connector, "_connectors", None)
    if isinstance(children, list):
        for child in children:
            yield from connectors(child)
    else:
        yield connector


# --- an offload store that completes after a keep reset -------------------------------------------------------------


def _guard_store_completion(manager: SimpleCPUOffloadScheduler) -> Layer:
    def complete_what_is_still_cached(
        complete: Callable[..., None],
        gpu_block_ids: list[int],
        cpu_block_ids: list[int],
        block_meta: list[Any] | None = None,
    ) -> None:
        gpu, cpu = manager._gpu_block_pool, manager.cpu_block_pool
        # 0.29 notes the hash on the CPU block when the store starts, later versions read it off the GPU block.
        lost = [
            gpu.blocks[gpu_id].block_hash is None and cpu.blocks[cpu_id].block_hash is None
            for gpu_id, cpu_id in zip(gpu_block_ids, cpu_block_ids, strict=True)
        ]
        rest = () if block_meta is None else (block_meta,)
        if not any(lost):
            complete(gpu_block_ids, cpu_block_ids, *rest)
            return
        cpu.free_blocks([cpu.blocks[block_id] for block_id, gone in zip(cpu_block_ids, lost, strict=True) if gone])
        gpu.free_blocks([gpu.blocks[block_id] for block_id, gone in zip(gpu_block_ids, lost, strict=True) if gone])
        complete(_kept(gpu_block_ids, lost), _kept(cpu_block_ids, lost), *(_kept(meta, lost) for meta in rest))

    layer = Layer(manager, "_process_store_completion", complete_what_is_still_cached)
    layer.lay()
    return layer


def _kept(values: list[Any], lost: list[bool]) -> list[Any]:
    return [value for value, gone in zip(values, lost, strict=True) if not gone]


# --- quarantine -----------------------------------------------------------------------------------------------------


class Quarantine:
    """Requests whose blocks get no hash.

    Every block that a request fills gets its hash in `coordinator.cache_blocks`, and every way to end or restart a
    request goes through `coordinator.free` or `coordinator.pop_blocks_for_free`. Skipping the first leaves a request
    as one that has filled no block yet, which vLLM's bookkeeping knows from every short request.
    """

    NEEDED = ("cache_blocks", "free", "pop_blocks_for_free")

    def __init__(self, scheduler: Scheduler) -> None:
        """Empty; nothing is laid over anything."""
        self._scheduler = scheduler
        self._guarded: KVCacheCoordinator | None = None
        self._layers: list[Layer] = []
        self._ids: set[str] = set()

    def __len__(self) -> int:
        """Requests in quarantine."""
        return len(self._ids)

    def add(self, request_ids: Iterator[str]) -> int:
        """Put requests into quarantine; returns how many are in it now. RuntimeError when they cannot be barred."""
        ids = set(request_ids)
        if ids:
            self._lay()
        self._ids |= ids
        return len(self._ids)

    def keep_in_force(self) -> None:
        """While anybody is in quarantine: be what is called."""
        if not self._ids or self._in_force():
            return
        # Whoever ended meanwhile was not seen to.
        self._ids &= self._scheduler.requests.keys()
        if self._ids:
            self._lay()
        else:
            self._lift()

    def _in_force(self) -> bool:
        same = self._guarded is self._scheduler.kv_cache_manager.coordinator
        return same and all(layer.on_top for layer in self._layers)

    def _lay(self) -> None:
        # Asked for anew: others may have replaced it.
        coordinator = self._scheduler.kv_cache_manager.coordinator
        if coordinator is not self._guarded:
            self._lift()
            self._guarded = coordinator
            self._layers = [
                Layer(coordinator, "cache_blocks", self._cache_unless_barred),
                Layer(coordinator, "free", self._free_and_release),
                Layer(coordinator, "pop_blocks_for_free", self._free_and_release),
            ]
        for layer in self._layers:
            layer.lay()

    def _lift(self) -> None:
        for layer in self._layers:
            layer.lift()

    def _cache_unless_barred(
        self, cache_blocks: Callable[..., Any], request: Request, *args: object, **kwargs: object
    ) -> None:
        if request.request_id not in self._ids:
            cache_blocks(request, *args, **kwargs)

    def _free_and_release(self, free: Callable[..., Any], request_id: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401 - passes on what vLLM returns
        freed = free(request_id, *args, **kwargs)
        self._ids.discard(request_id)
        if not self._ids:
            self._lift()
        return freed


def _requests_with_kv(scheduler: Scheduler) -> Iterator[Request]:
    """Live requests that hold KV, or have blocks that a load is writing into."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    for request in scheduler.requests.values():
        if RequestStatus.is_finished(request.status):
            continue
        if any(group.req_to_blocks.get(request.request_id) for group in groups):
            yield request


def _quarantine_missing(scheduler: Scheduler) -> str:
    """Why blocks of a kept request could enter a cache by another way; empty when they cannot."""
    coordinator = scheduler.kv_cache_manager.coordinator
    for name in Quarantine.NEEDED:
        if not callable(getattr(coordinator, name, None)):
            return f"this vLLM's cache coordinator has no {name}"
    if any(hasattr(group, "publish_blocks") for group in coordinator.single_type_managers):
        return "this model's host pool (HiSparse) publishes blocks later and by another way"
    transfer = scheduler.vllm_config.kv_transfer_config
    if transfer is None or not transfer.is_kv_producer:
        return ""
    for connector in connectors(scheduler.connector):
        name = type(connector).__name__
        if name not in _SAVES_ONLY_CACHED_BLOCKS:
            return f"{name} may save what kept requests compute, to a tier that quarantine does not reach; use preempt"
    return ""
