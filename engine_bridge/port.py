"""What an operation may ask of an engine, and nothing more.

`engine_bridge.engine` implements this on vLLM; tests implement it on a model of a block pool, behind the same
dispatcher and the same socket. Every method is called on the engine's own thread, between two steps, so no method
blocks, and each one that walks blocks does a bounded piece at a time.

Long work is a generator (type Work): each `yield` is a point where every structure of the engine is valid and the
engine may run a step before the work goes on. The dispatcher decides when that is needed; `yield "step"` says that
going on is pointless before the engine has been round its loop once more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Literal, Protocol, TypeVar

from engine_bridge import protocol

T = TypeVar("T")
Work = Generator[Literal["step"] | None, None, T]


class Identity(Protocol):
    """Facts that do not change while the engine lives; they go into the Welcome."""

    @property
    def data_parallel_rank(self) -> int:
        """From 0."""
        ...

    @property
    def data_parallel_size(self) -> int:
        """Ranks known to this engine, at least its own."""
        ...

    @property
    def local_ranks(self) -> Sequence[int]:
        """Ranks that run beside this one, itself among them, whether or not they have a bridge; empty when unknown."""
        ...

    @property
    def vllm_version(self) -> str:
        """As vLLM says it."""
        ...

    @property
    def model(self) -> str:
        """Name as served."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def blocks(self) -> int:
        """Usable blocks over all distinct pools, without null blocks."""
        ...

    @property
    def prefix_caching(self) -> bool:
        """Whether it is switched on."""
        ...


class EnginePort(Protocol):
    """One engine core, as operations see it."""

    @property
    def identity(self) -> Identity:
        """Facts for the Welcome."""
        ...

    def capabilities(self) -> dict[str, str]:
        """Every name in protocol.CAPABILITIES -> "" or the reason it is switched off on this engine."""
        ...

    # --- reading -------------------------------------------------------------------------------------------------

    def holders(self) -> protocol.Holders:
        """Who holds blocks now. O(waiting)."""
        ...

    def held_blocks(self) -> int:
        """Blocks that are not free, over all pools, without null blocks. O(pools): looked at every step while an
        operation waits for an idle moment.
        """
        ...

    def running_requests(self) -> int:
        """Requests in the running set."""
        ...

    def cached_blocks(self) -> int:
        """Blocks that carry a hash, over all pools."""
        ...

    def evidence(self, call: int, contiguity_blocks: int) -> protocol.Evidence:
        """Everything a verdict needs. O(waiting), bounded; no side effect on vLLM's structures."""
        ...

    # --- resetting -----------------------------------------------------------------------------------------------

    def preempt_running(self) -> int:
        """Preempt every running request as vLLM's own reset does; returns how many. The caller has checked that
        nothing will still be held afterwards, see `blocks_after_preempt`.
        """
        ...

    def blocks_after_preempt(self) -> int:
        """Blocks that would still be held if every running request were preempted now. 0 means a preempt works."""
        ...

    def must_settle(self, encoder: bool) -> bool:
        """Whether a preempt or an aux output bump now would meet a model step in flight that it must not meet: blocks
        whose free is put off until that step ends, output that the worker has not handed over or, where the `encoder`
        tier is to be cleared too, encoder outputs that the step reads.
        """
        ...

    def in_flight(self) -> bool:
        """Whether a model step with tokens has been scheduled and not processed yet."""
        ...

    def hold(self) -> None:
        """Schedule nothing until `release`, so that the steps in flight run out. Not a pause: nobody is told."""
        ...

    def release(self) -> None:
        """End a `hold`: the scheduling state is what it was before, or what others have asked for meanwhile."""
        ...

    def drop_prefix_cache(self) -> int:
        """Forget every hash in every distinct pool, whatever is held: vLLM's own reset body without its refusal.
        Returns blocks that carried a hash. Held blocks, the free queue and GPU memory stay as they are.
        """
        ...

    def bump_aux_generation(self) -> None:
        """What vLLM does with its aux output connector after a reset; never called while output is in flight."""
        ...

    def quarantine_running(self) -> int:
        """Bar the blocks that requests now holding KV fill from here on from ever entering the cache, until each
        ends or is recomputed from scratch. Returns how many requests.
        """
        ...

    def reset_connector(self) -> protocol.Tier:
        """Clear the KV connector's tier, reading its answer for what it is (True, False, None, raised, absent)."""
        ...

    def reset_multimodal(self) -> protocol.Tier:
        """Clear the multimodal cache on both sides, or say why that cannot be done from here."""
        ...

    def reset_encoder(self) -> protocol.Tier:
        """Clear the encoder cache in the scheduler and in the workers, or say why that cannot be done from here."""
        ...

    def publish_cleared(self) -> tuple[bool, list[str]]:
        """Hand AllBlocksCleared to the event publisher now, also on an idle engine. Returns whether it was handed
        over, and the tiers it stands for. (False, []) when events are not configured.
        """
        ...

    # --- free queue ----------------------------------------------------------------------------------------------

    def contiguity(self) -> Work[protocol.Contiguity]:
        """Walk the whole free queue, in slices."""
        ...

    def reorder(self, scope: Literal["uncached", "all_free"]) -> Work[int]:
        """Relink free blocks into block-id order in place, in slices; the queue is valid at every yield. Returns
        blocks moved. ("idle" is "all_free" after the caller has checked that nothing is held.)
        """
        ...

    # --- relief --------------------------------------------------------------------------------------------------

    def deadlock(self) -> str:
        """Empty when admissions are deadlocked on blocks held by waiting requests right now, else what was found."""
        ...

    def tokens_scheduled(self) -> int:
        """Tokens scheduled since the bridge attached; it stands still while admissions do."""
        ...

    def relieve_one(self) -> tuple[str, int]:
        """Give back the blocks of the youngest waiting holder whose load has finished; it is recomputed later.
        Returns its request id and the blocks freed. LookupError when there is no such holder.
        """
        ...

    # --- scheduling ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Schedule nothing more; requests stay where they are. Steps in flight still run out."""
        ...

    def synchronize(self) -> None:
        """After a pause, with no step in flight: wait until the device is idle, as vLLM's own pause does."""
        ...

    def paused(self) -> bool:
        """Whether the scheduler is paused by anybody."""
        ...

    def sleeping(self) -> bool:
        """Whether the executor sleeps: weights or KV memory are gone."""
        ...

    def resume(self) -> None:
        """Schedule again."""
        ...

    def paused_by_vllm(self) -> bool:
        """Whether the scheduler is paused and not by us, or not by us alone."""
        ...

    def sleep_pending(self) -> bool:
        """Whether a pause or sleep of vLLM's own still waits for steps to run out: it will take hold of the engine
        later, whatever becomes of the scheduling state until then.
        """
        ...

    def set_weight_version(self, version: str) -> None:
        """Record a weight version at the engine."""
        ...

    def weight_version(self) -> str:
        """The engine's weight version: empty when none was ever set, "unknown" after a weight update whose end left
        nobody who could name them.
        """
        ...
