"""From vLLM's replies to one outcome a rank. Pure.

An outcome is "done" only when every tier that was asked for is known to be cleared. A reply that proves nothing makes
it "partial" with reason UNCONFIRMED, which is no success; a refusal names what vLLM's metrics showed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from engine_bridge import protocol
from sidecar.backends.http.exposition import RankGauges
from sidecar.backends.http.replies import Meaning, Reading, stands_for_all_ranks

BRIDGE_HINT: Final = "install kvctl beside vLLM (the engine bridge attaches by itself)"
NOT_KNOWN: Final = -1
"""In counts: vLLM's routes do not tell."""

_NOT_REQUESTED: Final = protocol.Tier("not_requested")


@dataclass(frozen=True, slots=True)
class Replies:
    """All replies of one reset."""

    prefix: Reading
    connector: Reading | None = None
    multimodal: Reading | None = None
    encoder: Reading | None = None
    version: str = ""
    before: dict[int, RankGauges] = field(default_factory=dict)
    """What /metrics said last before the reset."""


def needs_bridge(mutation: protocol.Mutation) -> str:
    """What of a mutation only the bridge can do; empty when HTTP can do all of it."""
    if not isinstance(mutation, protocol.Reset):
        return type(mutation).__name__.lower()
    if mutation.running == "keep":
        return "reset.keep"
    for wanted, capability in (
        (mutation.quarantine, "reset.quarantine"),
        (mutation.wait_for_idle, "reset.wait_for_idle"),
        (mutation.reorder, "reorder.idle"),
    ):
        if wanted:
            return capability
    return ""


def unsupported(mutation: protocol.Mutation, reason: str, message: str) -> protocol.Outcome:
    """Nothing was sent."""
    name = _OPERATIONS[type(mutation)]
    return protocol.Outcome(mutation.call, mutation.request_id, name, "unsupported", reason, message)


_OPERATIONS: Final[dict[type, Literal["reset", "reorder", "relieve", "pause", "resume"]]] = {
    protocol.Reset: "reset",
    protocol.Reorder: "reorder",
    protocol.Relieve: "relieve",
    protocol.Pause: "pause",
    protocol.Resume: "resume",
}


def reset_outcome(asked: protocol.Reset, replies: Replies, rank: int) -> protocol.Outcome:
    """What the replies mean for one rank."""
    gauges = replies.before.get(rank, RankGauges())
    prefix = _prefix(asked, replies, rank, gauges)
    connector = _connector(asked, replies)
    multimodal = _plain(asked.mm, replies.multimodal, "multimodal")
    encoder = _plain(asked.encoder, replies.encoder, "encoder")
    tiers = (prefix, connector, multimodal, encoder)
    result = protocol.ResetResult(
        prefix=prefix,
        connector=connector,
        multimodal=multimodal,
        encoder=encoder,
        cached_blocks_dropped=NOT_KNOWN,
        requests_running=gauges.running,
        requests_kept=0,
        requests_preempted=NOT_KNOWN if asked.running == "preempt" else 0,
        requests_quarantined=0,
        holders=_holders(gauges),
        prefix_caching=gauges.prefix_caching,
        event_published=False,
        event_tiers=[],
        cost=protocol.PauseCost(),
    )
    state, worst = _overall(prefix, tiers)
    return protocol.Outcome(
        call=asked.call,
        request_id=asked.request_id,
        operation="reset",
        state=state,
        reason=worst.reason if worst is not None else "",
        message=worst.message if worst is not None else "",
        result=result,
        retry_after_ms=1000 if state in ("refused", "pending") else 0,
    )


def _overall(
    prefix: protocol.Tier, tiers: tuple[protocol.Tier, ...]
) -> tuple[protocol.OutcomeState, protocol.Tier | None]:
    """The state of the whole, and the tier that explains it."""
    if prefix.state == "refused":
        return "refused", prefix
    if prefix.state == "failed":
        return "raised", prefix
    for state in ("failed", "pending", "unconfirmed"):
        worst = next((tier for tier in tiers if tier.state == state), None)
        if worst is not None:
            return ("pending" if state == "pending" else "partial"), worst
    return "done", None


def _prefix(asked: protocol.Reset, replies: Replies, rank: int, gauges: RankGauges) -> protocol.Tier:
    reading, ranks = replies.prefix, len(replies.before)
    if reading.meaning is Meaning.SUCCEEDED:
        if not gauges.prefix_caching:
            return protocol.Tier("done", "PREFIX_CACHING_DISABLED", "prefix caching is off: there was nothing to drop")
        if rank > 0 and not stands_for_all_ranks(replies.version, ranks):
            return protocol.Tier(
                "unconfirmed",
                "UNCONFIRMED",
                f"vLLM {replies.version or 'of unknown version'} answers with the first rank's result only, so rank "
                f"{rank} is not known to be reset; {BRIDGE_HINT} to be told per rank",
            )
        return protocol.Tier("done", "", "vLLM confirmed it; how many blocks were cached cannot be known over HTTP")
    if reading.meaning is Meaning.REFUSED:
        return _refused(replies, gauges)
    if reading.meaning is Meaning.RAISED:
        also = (
            "; the running requests were preempted first, and blocks are still held, most likely by remote KV loads"
            if asked.running == "preempt"
            else ""
        )
        return protocol.Tier("failed", "OPERATION_RAISED", f"the reset raised inside vLLM: {reading.text}{also}")
    return protocol.Tier(
        "unconfirmed",
        "UNCONFIRMED",
        f"{reading.text}; whether the cache was reset cannot be known, {BRIDGE_HINT} or vLLM 0.26 or newer",
    )


def _refused(replies: Replies, gauges: RankGauges) -> protocol.Tier:
    ranks = len(replies.before)
    which = "" if ranks <= 1 else f" (vLLM names none of its {ranks} ranks, and the others may have been reset)"
    if max(gauges.running, 0) + max(gauges.waiting, 0) > 0:
        return protocol.Tier(
            "refused",
            "BLOCKS_HELD_BY_REQUESTS",
            f"vLLM refused: blocks are held, with {gauges.running} requests running and {gauges.waiting} waiting when "
            f"last seen{which}; wait until they end, or use PREEMPT",
        )
    if ranks > 1:
        return protocol.Tier("refused", "BLOCKS_HELD_BY_REQUESTS", f"vLLM refused: a rank holds blocks{which}")
    return protocol.Tier(
        "refused",
        "BLOCKS_HELD_BY_TRANSFERS",
        "vLLM refused: blocks are held although no request was running or waiting when last seen, so most likely "
        "transfers hold them; try again shortly",
    )


def _connector(asked: protocol.Reset, replies: Replies) -> protocol.Tier:
    if not asked.connector:
        return _NOT_REQUESTED
    reading = replies.connector
    if reading is None:
        return protocol.Tier("not_run", "", "not attempted: the prefix cache was not reset")
    if reading.meaning is Meaning.REFUSED:
        return protocol.Tier(
            "pending",
            "CONNECTOR_BUSY",
            "the connector did not reset: it is still moving data, or (before vLLM 0.27) none is configured; try again "
            "shortly",
        )
    if reading.meaning is Meaning.SUCCEEDED:
        return protocol.Tier(
            "unconfirmed",
            "UNCONFIRMED",
            "vLLM answers success as well when no connector is configured and when the connector cannot be reset; "
            f"{BRIDGE_HINT} to be told which",
        )
    state: protocol.TierStateName = "failed" if reading.meaning is Meaning.RAISED else "unconfirmed"
    reason = "OPERATION_RAISED" if state == "failed" else "UNCONFIRMED"
    return protocol.Tier(state, reason, reading.text)


def _plain(wanted: bool, reading: Reading | None, name: str) -> protocol.Tier:
    if not wanted:
        return _NOT_REQUESTED
    if reading is None:
        return protocol.Tier("not_run", "", "not attempted: the prefix cache was not reset")
    if reading.meaning is Meaning.NO_ROUTE:
        return protocol.Tier("unsupported", "NEEDS_DEV_MODE", f"this vLLM has no route for the {name} cache")
    if reading.meaning is Meaning.RAISED:
        return protocol.Tier("failed", "OPERATION_RAISED", reading.text)
    return protocol.Tier("unconfirmed", "UNCONFIRMED", reading.text)


def _holders(gauges: RankGauges) -> protocol.Holders:
    free, total = gauges.free_blocks, gauges.usable_blocks
    return protocol.Holders(
        held_blocks=total - free if free >= 0 and total >= 0 else NOT_KNOWN,
        running_requests=gauges.running,
        waiting_requests=NOT_KNOWN if gauges.waiting else 0,
        remote_loads=gauges.loading,
        transfer_blocks=NOT_KNOWN,
    )
