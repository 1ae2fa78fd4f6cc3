"""A block pool, requests and a connector, just real enough for the operations to decide over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine_bridge import protocol
from engine_bridge.page import FLAG_WOKE_WITHOUT_RESET, Counters
from engine_bridge.port import Work

RequestState = Literal["running", "waiting", "loading", "loaded"]
ConnectorAnswer = Literal["absent", "true", "false", "none", "raise"]

METHODS_WITH_EFFECT = ("drop_prefix_cache", "preempt_running", "reorder", "relieve_one", "pause", "resume")


@dataclass
class FakeRequest:
    """A request and the blocks it holds."""

    request_id: str
    state: RequestState
    blocks: list[int]
    arrived_ns: int


@dataclass
class FakeIdentity:
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    vllm_version: str = "0.32.0-fake"
    model: str = "fake-model"
    block_size: int = 16
    blocks: int = 128
    prefix_caching: bool = True

    @property
    def local_ranks(self) -> list[int]:
        return list(range(self.data_parallel_size)) if self.data_parallel_size > 1 else []


@dataclass
class FakeEngine:
    """Implements EnginePort. Fields are the levers tests pull, on the engine's thread."""

    identity: FakeIdentity = field(default_factory=FakeIdentity)
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    transfers: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    connector: ConnectorAnswer = "absent"
    multimodal: protocol.Tier = field(default_factory=lambda: protocol.Tier("not_configured"))
    encoder: protocol.Tier = field(default_factory=lambda: protocol.Tier("not_configured"))
    events_configured: bool = False
    lacking: dict[str, str] = field(default_factory=dict)
    raise_in: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    stuck: bool = False
    steps_in_flight: int = 0
    needs_settling: bool = False
    deadlocked: bool = False
    asleep: bool = False
    sleep_waits: bool = False
    """A sleep of vLLM's own waits for steps."""
    woke: bool = False
    """Woken up with hashes of memory that is gone."""
    pause_owner: Literal["", "kvctl", "vllm"] = ""
    held: bool = False
    version: str = ""
    quarantined: int = 0
    preemptions: int = 0
    tokens: int = 0
    note_effect: Callable[[str, int], None] = lambda effect, count: None
    before_effect: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        taken = {block for request in self.requests.values() for block in request.blocks}
        self.free = [block for block in range(1, self.identity.blocks + 1) if block not in taken]
        self._named = 0

    # --- levers --------------------------------------------------------------------------------------------------

    def add(self, state: RequestState, blocks: int) -> str:
        """A new request that holds `blocks` blocks."""
        self._named += 1
        name = f"request-{self._named}"
        if len(self.free) < blocks:
            raise ValueError(f"{blocks} blocks wanted, {len(self.free)} are free")
        taken, self.free = self.free[:blocks], self.free[blocks:]
        self.cached -= set(taken)
        self.requests[name] = FakeRequest(name, state, taken, time.monotonic_ns())
        return name

    def end(self, request_id: str) -> None:
        """A request ends; its blocks become free in reverse, as vLLM frees them, and stay cached."""
        request = self.requests.pop(request_id)
        self.cached |= set(request.blocks)
        self.free += reversed(request.blocks)

    def hold_transfer(self, blocks: int) -> None:
        """Blocks held by no request."""
        self.transfers += self.free[:blocks]
        self.free = self.free[blocks:]

    def end_transfers(self) -> None:
        """They become free."""
        self.free += self.transfers
        self.transfers = []

    def step(self) -> int:
        """One engine step; returns tokens scheduled."""
        self.steps_in_flight = max(0, self.steps_in_flight - 1)
        if self.pause_owner or self.held:
            return 0
        tokens = sum(request.state == "running" for request in self.requests.values())
        self.tokens += tokens
        return tokens

    def has_work(self) -> bool:
        """Whether the loop would step."""
        if self.steps_in_flight:
            return True
        return not (self.pause_owner or self.held) and self._count("running") > 0

    def read_counters(self, counters: Counters, now_ns: int) -> None:
        """Counts for the page."""
        counters.running = self._count("running")
        counters.waiting = len(self.requests) - counters.running
        counters.holding = sum(r.state != "running" and bool(r.blocks) for r in self.requests.values())
        counters.deferred = self._count("loading")
        counters.paused = 2 if self.pause_owner else 0
        counters.sleeping = int(self.asleep)
        flags = counters.flags & ~FLAG_WOKE_WITHOUT_RESET
        counters.flags = flags | (FLAG_WOKE_WITHOUT_RESET if self.woke else 0)
        counters.blocks_free = len(self.free)
        counters.blocks_cached = len(self.cached)
        counters.preemptions = self.preemptions
        if self.tokens > counters.tokens_scheduled:
            counters.last_progress_ns = now_ns
            counters.outputs += self.tokens - counters.tokens_scheduled
        counters.tokens_scheduled = self.tokens

    def _count(self, state: RequestState) -> int:
        return sum(request.state == state for request in self.requests.values())

    def _enter(self, method: str) -> None:
        if method in METHODS_WITH_EFFECT:
            self.before_effect()
        time.sleep(self.slow.get(method, 0))
        if method in self.raise_in:
            raise RuntimeError(self.raise_in[method])

    # --- EnginePort ----------------------------------------------------------------------------------------------

    def capabilities(self) -> dict[str, str]:
        return {name: self.lacking.get(name, "") for name in protocol.CAPABILITIES}

    def holders(self) -> protocol.Holders:
        self._enter("holders")
        waiting = [r for r in self.requests.values() if r.state != "running" and r.blocks]
        return protocol.Holders(
            held_blocks=self.held_blocks(),
            running_requests=self._count("running"),
            waiting_requests=len(waiting),
            remote_loads=self._count("loading"),
            transfer_blocks=len(self.transfers),
            paused=bool(self.pause_owner),
        )

    def held_blocks(self) -> int:
        return self.identity.blocks - len(self.free)

    def running_requests(self) -> int:
        return self._count("running")

    def cached_blocks(self) -> int:
        return len(self.cached)

    def evidence(self, call: int, contiguity_blocks: int) -> protocol.Evidence:
        self._enter("evidence")
        waiting = [r for r in self.requests.values() if r.state != "running"]
        now = time.monotonic_ns()
        head = None
        if waiting:
            first = waiting[0]
            needed = self.identity.blocks + 1 if self.deadlocked else 1
            head = protocol.HeadOfQueue(
                first.request_id, first.state.upper(), needed, 16, len(first.blocks), now - first.arrived_ns
            )
        holders = [
            protocol.Holder(r.request_id, r.state.upper(), len(r.blocks), r.state == "loaded")
            for r in waiting
            if r.blocks
        ]
        return protocol.Evidence(
            call=call,
            monotonic_ns=now,
            running=self._count("running"),
            waiting=len(waiting),
            waiting_remote_kv=self._count("loading"),
            load_finished=self._count("loaded"),
            waiting_other=0,
            waiting_holding_blocks=len(holders),
            blocks_total=self.identity.blocks,
            blocks_free=len(self.free),
            blocks_cached=len(self.cached),
            blocks_orphaned=len(self.transfers),
            head=head,
            holders=sorted(holders, key=lambda holder: -holder.blocks_held)[:16],
            oldest_waiting_ns=max((now - r.arrived_ns for r in waiting), default=0),
            paused="all" if self.pause_owner else "",
            sleeping=self.asleep,
            woke_without_reset=self.woke,
            scheduling="running",
            weight_version=self.version,
            contiguity=_contiguity(self.free[:contiguity_blocks]) if contiguity_blocks else None,
            quarantined_requests=self.quarantined,
            truncated=False,
            verdict="HELD_BLOCKS_DEADLOCK" if self.deadlocked else "",
        )

    def preempt_running(self) -> int:
        self._enter("preempt_running")
        running = [r for r in self.requests.values() if r.state == "running"]
        for request in running:
            self.free += reversed(request.blocks)
            request.blocks = []
            request.state = "waiting"
        self.preemptions += len(running)
        self.note_effect("preempt", len(running))
        return len(running)

    def blocks_after_preempt(self) -> int:
        running = sum(len(r.blocks) for r in self.requests.values() if r.state == "running")
        return self.held_blocks() - running

    def must_settle(self, encoder: bool) -> bool:
        return self.needs_settling and self.in_flight()

    def in_flight(self) -> bool:
        return self.steps_in_flight > 0

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def drop_prefix_cache(self) -> int:
        self._enter("drop_prefix_cache")
        dropped, self.cached = len(self.cached), set()
        self.woke = False
        self.note_effect("reset", dropped)
        return dropped

    def bump_aux_generation(self) -> None:
        self._enter("bump_aux_generation")

    def quarantine_running(self) -> int:
        self._enter("quarantine_running")
        self.quarantined = sum(bool(request.blocks) for request in self.requests.values())
        return self.quarantined

    def reset_connector(self) -> protocol.Tier:
        self._enter("reset_connector")
        match self.connector:
            case "absent":
                return protocol.Tier("not_configured", message="no connector is configured")
            case "true":
                return protocol.Tier("done")
            case "false":
                return protocol.Tier("pending", "CONNECTOR_BUSY", "transfers are in flight")
            case "none":
                return protocol.Tier("unsupported", "TIER_UNSUPPORTED", "the connector has no reset")
            case "raise":
                raise RuntimeError("the connector raised")

    def reset_multimodal(self) -> protocol.Tier:
        self._enter("reset_multimodal")
        return self.multimodal

    def reset_encoder(self) -> protocol.Tier:
        self._enter("reset_encoder")
        return self.encoder

    def publish_cleared(self) -> tuple[bool, list[str]]:
        self._enter("publish_cleared")
        return (True, ["GPU"]) if self.events_configured else (False, [])

    def contiguity(self) -> Work[protocol.Contiguity]:
        self._enter("contiguity")
        yield None
        return _contiguity(self.free)

    def reorder(self, scope: Literal["uncached", "all_free"]) -> Work[int]:
        self._enter("reorder")
        while self.stuck:
            time.sleep(0.001)
            yield None
        before = list(self.free)
        if scope == "all_free":
            self.free.sort()
        else:
            bare = sorted(block for block in self.free if block not in self.cached)
            self.free = [*bare, *(block for block in self.free if block in self.cached)]
        yield None
        moved = sum(a != b for a, b in zip(before, self.free, strict=True))
        self.note_effect("reorder", moved)
        return moved

    def deadlock(self) -> str:
        return "" if self.deadlocked else "requests flow"

    def tokens_scheduled(self) -> int:
        return self.tokens

    def relieve_one(self) -> tuple[str, int]:
        self._enter("relieve_one")
        loaded = [r for r in self.requests.values() if r.state == "loaded" and r.blocks]
        if not loaded:
            raise LookupError("no waiting request whose load has finished holds blocks")
        youngest = loaded[-1]
        freed = len(youngest.blocks)
        self.free += reversed(youngest.blocks)
        youngest.blocks, youngest.state = [], "waiting"
        self.deadlocked = False
        self.note_effect("relieve", freed)
        return youngest.request_id, freed

    def pause(self) -> None:
        self._enter("pause")
        self.pause_owner = "kvctl"
        self.note_effect("pause", 1)

    def synchronize(self) -> None:
        self._enter("synchronize")

    def resume(self) -> None:
        self._enter("resume")
        self.pause_owner = ""
        self.note_effect("resume", 1)

    def paused(self) -> bool:
        return bool(self.pause_owner)

    def paused_by_vllm(self) -> bool:
        return self.pause_owner == "vllm"

    def sleep_pending(self) -> bool:
        return self.sleep_waits

    def sleeping(self) -> bool:
        return self.asleep

    def sleep(self, on: bool) -> None:
        """The executor sleeps, or wakes with an empty KV memory."""
        self.woke = self.asleep and not on and bool(self.cached)
        self.asleep = on

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def weight_version(self) -> str:
        return self.version


def _contiguity(free: list[int]) -> protocol.Contiguity:
    adjacent = sum(abs(a - b) == 1 for a, b in itertools.pairwise(free))
    return protocol.Contiguity(len(free), adjacent, len(free) - adjacent)
