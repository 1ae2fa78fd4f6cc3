"""The port, implemented on one vLLM engine core."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from vllm.v1.core.sched.interface import PauseState
from vllm.version import __version__ as vllm_version

from engine_bridge import protocol
from engine_bridge.engine import evidence, guards, pools, relief, siblings, tiers, versions
from engine_bridge.engine import scheduler as requests
from engine_bridge.engine.connector import connector_tier, start_lazy_walks_over
from engine_bridge.operations.pause import LONGEST_WEIGHT_VERSION
from engine_bridge.port import Work

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

TIDY_NS: Final = 500_000
"""Time one step gives to taking down lookup maps that are out of use, nanoseconds."""


@dataclass(frozen=True)
class EngineIdentity:
    """See port.Identity."""

    data_parallel_rank: int
    data_parallel_size: int
    local_ranks: tuple[int, ...]
    vllm_version: str
    model: str
    block_size: int
    blocks: int
    prefix_caching: bool


def rank_of(engine: EngineCore) -> int:
    """Data-parallel rank. Dense models run each rank as an engine of its own that thinks it is rank 0 of 1; the index
    keeps the true rank.
    """
    parallel = engine.vllm_config.parallel_config
    return int(getattr(engine, "engine_index", None) or getattr(parallel, "data_parallel_index", 0) or 0)


def _identity(engine: EngineCore) -> EngineIdentity:
    config = engine.vllm_config
    rank = rank_of(engine)
    served = getattr(config.model_config, "served_model_name", None) or config.model_config.model
    return EngineIdentity(
        data_parallel_rank=rank,
        data_parallel_size=max(int(config.parallel_config.data_parallel_size), rank + 1),
        local_ranks=siblings.local_ranks(rank),
        vllm_version=vllm_version,
        model=served if isinstance(served, str) else served[0],
        block_size=int(config.cache_config.block_size),
        blocks=pools.usable_blocks(pools.distinct_pools(engine.scheduler)),
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
    )


class VllmEngine:
    """Implements port.EnginePort; delegates to the modules of this package."""

    def __init__(self, engine: EngineCore) -> None:
        """Install the guards, so that a later keep reset finds them in place. AttributeError on a vLLM that is too
        different from those this was written against.
        """
        self._engine = engine
        self._scheduler = engine.scheduler
        self._pools = pools.distinct_pools(engine.scheduler)
        self._identity = _identity(engine)
        self._capabilities = versions.capabilities(engine)
        self._guards = guards.install(engine.scheduler)
        self._capabilities.update(self._guards.lacking())
        self._capabilities["relieve"] = self._capabilities["relieve"] or relief.missing(engine.scheduler)
        self._attic: pools.Attic = []
        self._remembered = evidence.Remembered()
        self._paused_by_us = False
        self._setting = False
        """Whether it is us who set the pause state."""
        self._before_hold: PauseState | None = None
        """While held: the pause state to go back to."""
        self.steps = requests.Steps(engine, self._pause_state)

    @property
    def identity(self) -> EngineIdentity:
        """See port.EnginePort."""
        return self._identity

    def capabilities(self) -> dict[str, str]:
        """See port.EnginePort."""
        return dict(self._capabilities)

    def keep_guards(self) -> None:
        """Before every step: the guards are in force, whatever others have laid over them."""
        self._guards.keep_in_force()

    def remove_guards(self) -> None:
        """Nobody will use this port any more."""
        self._guards.remove()

    def tidy(self) -> None:
        """Before every step: take down some of what resets left behind, faster than a step can fill a new map. The
        answers have long been given.
        """
        if not self._attic:
            return
        until = time.monotonic_ns() + TIDY_NS
        for _ in pools.give_back(self._attic):
            if time.monotonic_ns() >= until:
                return

    # --- reading -------------------------------------------------------------------------------------------------

    def holders(self) -> protocol.Holders:
        """See port.EnginePort."""
        return evidence.holders(self._scheduler)

    def held_blocks(self) -> int:
        """See port.EnginePort."""
        return pools.held_blocks(self._pools)

    def running_requests(self) -> int:
        """See port.EnginePort."""
        return len(self._scheduler.running)

    def cached_blocks(self) -> int:
        """See port.EnginePort."""
        return pools.cached_blocks(self._pools)

    def evidence(self, call: int, contiguity_blocks: int) -> protocol.Evidence:
        """See port.EnginePort."""
        self.steps.look()
        found = evidence.read_evidence(self._engine, self._guards, call, contiguity_blocks, self._remembered)
        return msgspec.structs.replace(
            found,
            woke_without_reset=self.steps.woke_without_reset,
            paused=evidence.PAUSED[self._pause_state()],
        )

    # --- resetting -----------------------------------------------------------------------------------------------

    def preempt_running(self) -> int:
        """See port.EnginePort."""
        self._remembered.forget()
        return requests.preempt_running(self._scheduler)

    def blocks_after_preempt(self) -> int:
        """See port.EnginePort."""
        return requests.blocks_after_preempt(self._scheduler)

    def must_settle(self, encoder: bool) -> bool:
        """See port.EnginePort. Frees are deferred while steps are in flight when a connector may write into freed
        blocks out of order; the aux output connector's worker asserts that nothing is pending when it is reset; a step
        that still reads encoder outputs fails when they are gone.
        """
        scheduler = self._scheduler
        waits = (
            getattr(scheduler, "defer_block_free", False)
            or _aux_connector(scheduler) is not None
            or (encoder and tiers.encoder_outputs_in_flight(scheduler))
        )
        return waits and self.in_flight() and not versions.is_lockstep(self._engine)

    def in_flight(self) -> bool:
        """See port.EnginePort. A step without tokens is none: while a connector has something to send, vLLM schedules
        one after the other, also when it is paused, and the queue never runs out.
        """
        return any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in self._engine.batch_queue or ())

    def hold(self) -> None:
        """See port.EnginePort."""
        self._before_hold = self._scheduler.pause_state
        self._set_pause_state(PauseState.PAUSED_ALL)

    def release(self) -> None:
        """See port.EnginePort."""
        before, self._before_hold = self._before_hold, None
        if before is not None:
            self._set_pause_state(before)

    def drop_prefix_cache(self) -> int:
        """See port.EnginePort."""
        dropped = pools.drop_prefix_cache(self._scheduler, self._attic)
        self.steps.own_reset()
        return dropped

    def bump_aux_generation(self) -> None:
        """See port.EnginePort."""
        connector = _aux_connector(self._scheduler)
        if connector is not None and not self.in_flight():
            connector.reset()

    def quarantine_running(self) -> int:
        """See port.EnginePort."""
        return self._guards.quarantine_running()

    def reset_connector(self) -> protocol.Tier:
        """See port.EnginePort."""
        return connector_tier(self._scheduler)

    def reset_multimodal(self) -> protocol.Tier:
        """See port.EnginePort."""
        return tiers.reset_multimodal(self._engine)

    def reset_encoder(self) -> protocol.Tier:
        """See port.EnginePort."""
        return tiers.reset_encoder(self._engine)

    def publish_cleared(self) -> tuple[bool, list[str]]:
        """See port.EnginePort."""
        return requests.publish_cleared(self._scheduler)

    # --- free queue ----------------------------------------------------------------------------------------------

    def contiguity(self) -> Work[protocol.Contiguity]:
        """See port.EnginePort."""
        return pools.contiguity(self._pools)

    def reorder(self, scope: Literal["uncached", "all_free"]) -> Work[int]:
        """See port.EnginePort."""
        try:
            return (yield from pools.reorder(self._pools, scope))
        finally:
            # Also where it is left half done: the order is another one by then.
            self._remembered.forget()
            start_lazy_walks_over(self._scheduler)

    # --- relief --------------------------------------------------------------------------------------------------

    def deadlock(self) -> str:
        """See port.EnginePort."""
        return relief.deadlock(self._scheduler)

    def tokens_scheduled(self) -> int:
        """See port.EnginePort."""
        return self.steps.tokens

    def relieve_one(self) -> tuple[str, int]:
        """See port.EnginePort."""
        self._remembered.forget()
        return relief.relieve_one(self._scheduler)

    # --- scheduling ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """See port.EnginePort."""
        self._set_pause_state(PauseState.PAUSED_ALL)
        self._paused_by_us = True

    def synchronize(self) -> None:
        """See port.EnginePort."""
        self._engine._finish_pause(clear_cache=False)

    def resume(self) -> None:
        """See port.EnginePort. By vLLM's own method: since 0.33 a pause of its own also turns new requests away."""
        self._setting = True
        try:
            self._engine.resume_scheduler()
        finally:
            self._setting = False
        self._paused_by_us = False

    def paused(self) -> bool:
        """See port.EnginePort."""
        return bool(self._pause_state() != PauseState.UNPAUSED)

    def paused_by_vllm(self) -> bool:
        """See port.EnginePort."""
        return self.paused() and not self._paused_by_us

    def sleep_pending(self) -> bool:
        """See port.EnginePort. A lockstep rank waits for the others' consent as well."""
        engine = self._engine
        return bool(getattr(engine, "_idle_state_callbacks", None)) or bool(getattr(engine, "pending_pause", False))

    def sleeping(self) -> bool:
        """See port.EnginePort."""
        return bool(self._engine.model_executor.is_sleeping)

    def pause_state_is_set(self, set_pause_state: Callable[[PauseState], None], state: PauseState) -> None:
        """Somebody sets the pause state. Another than us: the pause is no longer ours, and what they ask for outlives a
        hold of ours.
        """
        if not self._setting:
            self._paused_by_us = False
            if self._before_hold is not None:
                self._before_hold = state
                state = PauseState.PAUSED_ALL
        set_pause_state(state)

    def _pause_state(self) -> PauseState:
        """As others than us know it: a hold is not theirs to see."""
        return self._scheduler.pause_state if self._before_hold is None else self._before_hold

    def _set_pause_state(self, state: PauseState) -> None:
        self._setting = True
        try:
            self._scheduler.set_pause_state(state)
        finally:
            self._setting = False

    def set_weight_version(self, version: str) -> None:
        """See port.EnginePort."""
        self._engine.set_weight_version(version)

    def weight_version(self) -> str:
        """See port.EnginePort. vLLM's name for none is "default"; the length of one set by others has no limit."""
        version = str(self._engine.get_weight_version())[:LONGEST_WEIGHT_VERSION]
        return "" if version == "default" else version


def _aux_connector(scheduler: Scheduler) -> AuxOutputSchedulerConnector | None:
    return getattr(scheduler, "aux_output_connector", None)
