"""The messages between a sidecar and one engine process, over a Unix SEQPACKET socket.

One message is one msgpack frame of at most MAX_FRAME_BYTES; SEQPACKET keeps the borders. A connection starts with the
client's Hello, answered by Welcome or Goodbye. Then the client sends requests, each with a `call` number of its own
choosing, and every reply repeats that number. Replies may come in another order than the requests.

Times are CLOCK_MONOTONIC nanoseconds of this machine: both ends share a kernel, and a deadline must still mean the
same instant after the message lay in a socket buffer while the engine was stopped.

Strings instead of enums: an unknown value from a newer peer must reach the code that can name it in an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

PROTOCOL_VERSION: Final = 1
"""Version this code speaks. A peer that cannot speak it is told so in words, never guessed at."""

MAX_FRAME_BYTES: Final = 64 * 1024
"""Largest frame either end sends or accepts, well under the default socket buffer of 208 KiB."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""Linux's limit on a Unix socket path (sun_path without its terminating zero)."""


def default_engine_dir() -> Path:
    """Where engines and sidecars meet when KVCTL_ENGINE_DIR is not set: both ends must decide alike.

    /run/kvctl when this user can write there or make it, else the user's runtime directory, else /tmp/kvctl-<uid>.
    """
    configured = os.environ.get("KVCTL_ENGINE_DIR")
    if configured:
        return Path(configured)
    system = Path("/run/kvctl")
    if os.access(system if system.is_dir() else system.parent, os.W_OK | os.X_OK):
        return system
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "kvctl") if runtime else Path(f"/tmp/kvctl-{os.getuid()}")  # noqa: S108 - 0700, owner checked


RunningMode = Literal["fail", "preempt", "keep"]
Scope = Literal["idle", "uncached", "all_free"]
TierStateName = Literal[
    "done",
    "refused",
    "pending",
    "not_configured",
    "unsupported",
    "not_requested",
    "not_run",
    "failed",
    "unconfirmed",  # only over HTTP: the call was accepted, its effect was not shown
]
OutcomeState = Literal[
    "done",  # everything asked for happened
    "refused",  # a precondition did not hold; nothing was changed
    "pending",  # a tier is still moving data; the rest happened
    "partial",  # some tiers happened, another failed or is unsupported; the result says which
    "busy",  # another operation runs on this engine: `other_request_id`
    "mismatch",  # the request id is on record with other arguments
    "expired",  # the deadline passed before it started: never executed
    "withdrawn",  # cancelled or out of time while waiting to start: never executed
    "unsupported",  # this engine cannot do it: nothing was changed
    "invalid",  # the request makes no sense
    "raised",  # the operation raised; the engine goes on
    "stopping",  # the engine is shutting down: nothing was changed
]


# --- handshake ---------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First frame of a client."""

    min_version: int
    max_version: int
    client: str
    """For logs, e.g. "kvctl-sidecar/0.1.0"."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Who this engine is and what it can do."""

    version: int
    incarnation: str
    """32 hex digits, drawn when the bridge attached."""
    pid: int
    process_start_ticks: int
    """Field 22 of /proc/self/stat: with `pid` it names one process even after the pid is reused. 0 if unreadable."""
    data_parallel_rank: int
    data_parallel_size: int
    vllm_version: str
    bridge_version: str
    model: str
    block_size: int
    """Tokens in a block."""
    blocks: int
    """Usable blocks over all distinct pools, without null blocks."""
    prefix_caching: bool
    capabilities: dict[str, str]
    """Every capability this bridge knows -> "" when available, else the reason. See CAPABILITIES."""
    monotonic_ns: int
    """The engine's clock when this was written."""
    local_ranks: list[int] = []
    """Data-parallel ranks that run beside this one, itself among them; empty when unknown."""


class Goodbye(msgspec.Struct, tag="goodbye", frozen=True):
    """The engine closes the connection, and why."""

    reason: str


CAPABILITIES: Final = (
    "reset.fail",
    "reset.preempt",
    "reset.keep",
    "reset.wait_for_idle",
    "reset.quarantine",
    "reset.connector",
    "reset.mm",
    "reset.encoder",
    "events.publish",
    "reorder.idle",
    "reorder.uncached",
    "reorder.all_free",
    "admission",
    "relieve",
    "pause",
)


# --- requests ----------------------------------------------------------------------------------------------------


class Reset(msgspec.Struct, tag="reset", frozen=True):
    """Forget every cached prefix."""

    call: int
    request_id: str
    deadline_ns: int
    running: RunningMode
    connector: bool = False
    mm: bool = False
    encoder: bool = False
    reorder: bool = False
    wait_for_idle: bool = False
    quarantine: bool = False


class Reorder(msgspec.Struct, tag="reorder", frozen=True):
    """Put free blocks into block-id order."""

    call: int
    request_id: str
    deadline_ns: int
    scope: Scope


class Relieve(msgspec.Struct, tag="relieve", frozen=True):
    """Give back the blocks of one waiting holder, if admissions are deadlocked."""

    call: int
    request_id: str
    deadline_ns: int


class Pause(msgspec.Struct, tag="pause", frozen=True):
    """Stop scheduling under a lease named by `request_id`; running requests stay."""

    call: int
    request_id: str
    deadline_ns: int
    lease_ns: int
    """Length of the lease, nanoseconds."""
    resume_when_abandoned: bool = False
    """What to do after an expired lease has reset the caches: resume, or stay paused."""


class Renew(msgspec.Struct, tag="renew", frozen=True):
    """Extend a lease; `weights_complete` is sticky."""

    call: int
    pause_request_id: str
    lease_ns: int
    weights_complete: bool = False


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Schedule again."""

    call: int
    request_id: str
    deadline_ns: int
    pause_request_id: str = ""
    """Lease to end; empty ends a pause without a live lease, and with `force` any."""
    weight_version: str = ""
    force: bool = False
    """End also a live lease that is not named."""


class Admission(msgspec.Struct, tag="admission", frozen=True):
    """Ask for evidence. Changes nothing, may run beside an operation."""

    call: int
    contiguity_blocks: int = 4096
    """Free blocks to look at from the head of the queue; 0 skips it."""


class Lookup(msgspec.Struct, tag="lookup", frozen=True):
    """Ask for the recorded outcome of a request id."""

    call: int
    request_id: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Withdraw an operation that has not had an effect yet."""

    call: int
    request_id: str


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Ask for a sign of life from the engine thread."""

    call: int


Mutation = Reset | Reorder | Relieve | Pause | Resume
Request = Hello | Reset | Reorder | Relieve | Pause | Renew | Resume | Admission | Lookup | Cancel | Ping


# --- results -----------------------------------------------------------------------------------------------------


class Tier(msgspec.Struct, frozen=True):
    """What became of one cache tier."""

    state: TierStateName
    reason: str = ""
    """UPPER_SNAKE, one of proto/kvctl/v1/errors.proto without the prefix."""
    message: str = ""


class Holders(msgspec.Struct, frozen=True):
    """Who holds blocks; blocks are distinct blocks over all pools, without null blocks."""

    held_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    remote_loads: int = 0
    transfer_blocks: int = 0
    paused: bool = False


class Contiguity(msgspec.Struct, frozen=True):
    """Order of the free queue; neighbours are adjacent when their ids differ by 1 in either direction."""

    free_blocks: int
    adjacent_pairs: int
    runs: int
    sampled: bool = False


class PauseCost(msgspec.Struct, frozen=True):
    """What the engine thread paid, microseconds."""

    longest_us: int = 0
    total_us: int = 0
    slices: int = 0


class ReorderResult(msgspec.Struct, tag="reorder", frozen=True):
    """What a reorder did."""

    scope: Scope
    blocks_moved: int
    before: Contiguity
    after: Contiguity
    holders: Holders
    cost: PauseCost


class ResetResult(msgspec.Struct, tag="reset", frozen=True):
    """What a reset did."""

    prefix: Tier
    connector: Tier
    multimodal: Tier
    encoder: Tier
    cached_blocks_dropped: int
    requests_running: int
    requests_kept: int
    requests_preempted: int
    requests_quarantined: int
    holders: Holders
    prefix_caching: bool
    event_published: bool
    event_tiers: list[str]
    cost: PauseCost
    reorder: ReorderResult | None = None


class RelieveResult(msgspec.Struct, tag="relieve", frozen=True):
    """What a relief did."""

    verdict_before: str
    """Verdict name from the engine's own evidence, e.g. "HELD_BLOCKS_DEADLOCK"."""
    request_ids: list[str]
    blocks_freed: int
    attempts: int
    max_attempts: int
    cost: PauseCost


class SchedulingResult(msgspec.Struct, tag="scheduling", frozen=True):
    """State of the scheduler after a pause, renewal or resume."""

    state: Literal["running", "paused", "abandoned_update"]
    weight_version: str
    lease_remaining_ns: int = 0
    ended_by_lease: bool = False


Result = ResetResult | ReorderResult | RelieveResult | SchedulingResult


class Outcome(msgspec.Struct, tag="outcome", frozen=True):
    """Final word on a mutation (or on a Renew, whose request id is the pause's)."""

    call: int
    request_id: str
    operation: Literal["reset", "reorder", "relieve", "pause", "renew", "resume"]
    state: OutcomeState
    reason: str = ""
    message: str = ""
    result: Result | None = None
    replayed: bool = False
    """True when this was recorded earlier for the same request id and nothing ran now."""
    other_request_id: str = ""
    """With state "busy": the operation in the way."""
    retry_after_ms: int = 0
    """A hint, 0 when there is none."""


class Found(msgspec.Struct, tag="found", frozen=True):
    """Answer to a Lookup. `outcome` is None while it runs or waits, and when nothing is on record."""

    call: int
    request_id: str
    known: bool
    outcome: Outcome | None = None


class Cancelled(msgspec.Struct, tag="cancelled", frozen=True):
    """Answer to a Cancel."""

    call: int
    request_id: str
    cancelled: bool
    message: str = ""


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answer to a Ping."""

    call: int
    monotonic_ns: int


class Fault(msgspec.Struct, tag="fault", frozen=True):
    """A request that could not be read or answered; `call` is -1 when it could not even be told which."""

    call: int
    message: str


class HeadOfQueue(msgspec.Struct, frozen=True):
    """The request admissions wait for."""

    request_id: str
    status: str
    blocks_needed: int
    next_chunk_tokens: int
    blocks_held: int
    waiting_ns: int


class Holder(msgspec.Struct, frozen=True):
    """A waiting request that holds blocks."""

    request_id: str
    status: str
    blocks_held: int
    load_finished: bool


class Evidence(msgspec.Struct, tag="evidence", frozen=True):
    """Everything a verdict needs, read at one step boundary."""

    call: int
    monotonic_ns: int
    running: int
    waiting: int
    waiting_remote_kv: int
    """Loads truly in flight: not in the set of finished ones."""
    load_finished: int
    waiting_other: int
    waiting_holding_blocks: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_orphaned: int
    """Held by no live request. -1 when it could not be counted within the bound."""
    head: HeadOfQueue | None
    holders: list[Holder]
    """Largest first, at most 16."""
    oldest_waiting_ns: int
    paused: Literal["", "new", "all"]
    sleeping: bool
    woke_without_reset: bool
    """True from a wake-up that brought back an empty KV cache until the next reset."""
    scheduling: Literal["running", "paused", "abandoned_update"]
    weight_version: str
    contiguity: Contiguity | None
    quarantined_requests: int
    truncated: bool
    """True when the waiting queue was longer than the bound and counts cover its front only."""
    verdict: str = ""
    """What the engine itself makes of it when admissions are deadlocked now ("HELD_BLOCKS_DEADLOCK"), else empty."""


Reply = Welcome | Goodbye | Outcome | Found | Cancelled | Pong | Fault | Evidence

request_decoder: Final = msgspec.msgpack.Decoder(Request)
reply_decoder: Final = msgspec.msgpack.Decoder(Reply)
encoder: Final = msgspec.msgpack.Encoder()
