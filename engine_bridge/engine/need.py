"""How many blocks a waiting request must find free to be scheduled, computed without asking the scheduler to do it.

What `KVCacheManager.allocate_slots` demands of a waiting request is the larger of two numbers: with
`scheduler_reserve_full_isl` the whole sequence, capped for groups that recycle blocks; and the next chunk, uncapped.
The first is the estimate that goes wrong in groups with a window, and then the second decides.

The same functions of vLLM's cache managers are called that the scheduler calls, with one care: the manager of "align"
Mamba groups writes down a checkpoint unless the cap is asked for, which it does not have. So the cap is asked for
wherever there is none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

MAX_LOOKUP: Final = 2048
"""Longest hash chain that is looked up, in hashes. For a longer prompt no hit is assumed: a hit on a free block needs
that block just the same, so only hits on blocks that others hold make a difference.
"""

UNKNOWN: Final = -1


def next_chunk_tokens(scheduler: Scheduler, request: Request) -> int:
    """Tokens `schedule()` would give a waiting request with the whole budget of a step."""
    config = scheduler.scheduler_config
    tokens: int = request.num_tokens - _computed(scheduler, request)[0]
    threshold = int(config.long_prefill_token_threshold)
    eligible = sum(scheduler.get_request_counts())
    if threshold > 0 and getattr(scheduler, "adaptive_long_prefill_threshold", False):
        threshold = max(threshold, int(config.max_num_batched_tokens) // max(1, eligible))
    if 0 < threshold < tokens and eligible > 1:
        tokens = threshold
    budget = min(int(scheduler.max_num_scheduled_tokens), int(config.max_num_batched_tokens))
    return max(1, min(tokens, budget))


def blocks_needed(scheduler: Scheduler, request: Request, chunk_tokens: int) -> int:
    """Blocks that must be free for `chunk_tokens` more tokens of a waiting request. UNKNOWN for HiSparse models, whose
    groups answer with a sentinel.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    if any(hasattr(group, "publish_blocks") for group in coordinator.single_type_managers):
        return UNKNOWN
    computed, hits = _computed(scheduler, request)
    limit = scheduler.max_model_len
    with_chunk = min(computed + chunk_tokens, limit)
    needed = _demand(scheduler, request, hits, computed, with_chunk, capped=False)
    if getattr(scheduler, "scheduler_reserve_full_isl", False):
        whole = min(request.num_tokens, limit)
        needed = max(needed, _demand(scheduler, request, hits, computed, whole, capped=True))
    return needed + (scheduler.kv_cache_manager.watermark_blocks if scheduler.running else 0)


def _computed(scheduler: Scheduler, request: Request) -> tuple[int, tuple[Sequence[KVCacheBlock], ...]]:
    """Tokens that need no computing, and the cached blocks that stand for them if the request holds none yet."""
    coordinator = scheduler.kv_cache_manager.coordinator
    nothing: tuple[Sequence[KVCacheBlock], ...] = tuple(() for _ in coordinator.single_type_managers)
    if request.num_computed_tokens > 0:
        # A request whose prompt was loaded whole computes its last token again.
        return min(request.num_computed_tokens, request.num_tokens - 1), nothing
    if not _may_look_up(scheduler, request):
        return 0, nothing
    found = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return found[1], found[0]


def _may_look_up(scheduler: Scheduler, request: Request) -> bool:
    if not scheduler.kv_cache_manager.enable_caching or request.skip_reading_prefix_cache:
        return False
    # A Mamba group refuses, by a sentinel, what was cached in the step before; its hits are left out.
    return len(request.block_hashes) <= MAX_LOOKUP and not getattr(scheduler, "has_mamba_layers", False)


def _demand(
    scheduler: Scheduler,
    request: Request,
    hits: tuple[Sequence[KVCacheBlock], ...],
    computed: int,
    num_tokens: int,
    *,
    capped: bool,
) -> int:
    """Blocks to allocate so that the request has `num_tokens` slots."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    slots = num_tokens if capped else min(num_tokens + scheduler.num_lookahead_tokens, scheduler.max_model_len)
    total = 0
    for group, hit in zip(groups, hits, strict=True):
        had = request.request_id in group.req_to_blocks
        total += _ask(
            group.get_num_blocks_to_allocate,
            request_id=request.request_id,
            num_tokens=_encoder_tokens(request) if _is_cross_attention(group) else slots,
            new_computed_blocks=hit,
            total_computed_tokens=0 if _is_cross_attention(group) else computed,
            num_local_computed_tokens=0 if _is_cross_attention(group) else computed,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=capped or _cap(group) is None,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        if not had:
            # Some groups look their table up in a way that makes an empty one.
            group.req_to_blocks.pop(request.request_id, None)
    return total


def _cap(group: SingleTypeKVCacheManager) -> int | None:
    name = "max_admission_blocks_per_request"
    cap: int | None = getattr(group, name, None) or getattr(group, f"_{name}", None)
    return cap


def _is_cross_attention(group: SingleTypeKVCacheManager) -> bool:
    return type(group).__name__ == "CrossAttentionManager"


def _encoder_tokens(request: Request) -> int:
    return sum(request.get_num_encoder_embeds(index) for index in range(len(request.mm_features)))


def _ask(function: Callable[..., int], **arguments: Any) -> int:  # noqa: ANN401 - passed on as they are
    """Call with those arguments that this vLLM's function takes."""
    known = _parameters(function.__func__)  # type: ignore[attr-defined]
    return function(**{name: value for name, value in arguments.items() if name in known})


@lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
