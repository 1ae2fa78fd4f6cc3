"""What an operation did at one replica, in one phrase: the right-hand column of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import grpc
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.cli.printers.style import count, seconds

_CODES: Final = {code.value[0]: code.name for code in grpc.StatusCode}

Detail = Literal["full", "short", "least"]
"""How much of what happened there is room for: in words, in fewer words, or without the time that an engine stood:
812 blocks dropped, 3 requests kept.
"""

DETAILS: Final[tuple[Detail, ...]] = ("full", "short", "least")

TIERS: Final = ("prefix_cache", "connector", "multimodal", "encoder")

TIER_WORDS: Final = {
    types_pb2.TIER_STATE_DONE: "done",
    types_pb2.TIER_STATE_REFUSED: "refused",
    types_pb2.TIER_STATE_PENDING: "still moving data",
    types_pb2.TIER_STATE_NOT_CONFIGURED: "not configured",
    types_pb2.TIER_STATE_UNSUPPORTED: "not supported",
    types_pb2.TIER_STATE_NOT_REQUESTED: "not asked for",
    types_pb2.TIER_STATE_NOT_RUN: "not run",
    types_pb2.TIER_STATE_FAILED: "failed",
    types_pb2.TIER_STATE_UNCONFIRMED: "accepted, not confirmed",
}


def tier_word(state: types_pb2.TierState.ValueType) -> str:
    """What became of a tier; a state of a newer replica by its number."""
    return TIER_WORDS.get(state, f"in state {state}")


def code_name(number: int) -> str:
    """Canonical name of a code."""
    return _CODES.get(number, "UNKNOWN")


def of_row(row: fleet_pb2.TargetResult, spec: fleet_pb2.OperationSpec | None = None, detail: Detail = "full") -> str:
    """The effect at one replica, engines taken together; empty when nothing is known of one."""
    match row.WhichOneof("result"):
        case "reset":
            engines = [engine for engine in row.reset.engines if engine.status.code == 0]
            if row.reset.validate_only:
                return would_reset(engines, spec.reset if spec else replica_pb2.ResetPrefixCacheRequest())
            return reset(engines, detail=detail)
        case "reorder":
            return reorder([e for e in row.reorder.engines if e.status.code == 0], row.reorder.validate_only, detail)
        case "relieve":
            return relieve([e for e in row.relieve.engines if e.status.code == 0], row.relieve.validate_only)
        case "pause":
            return scheduling([engine for engine in row.pause.engines if engine.status.code == 0])
        case "resume":
            return scheduling([engine for engine in row.resume.engines if engine.status.code == 0])
    return ""


def would_reset(engines: Sequence[types_pb2.EngineReset], asked: replica_pb2.ResetPrefixCacheRequest) -> str:
    """What a dry run foresees: would restart 3 running requests, then reset."""
    if not engines:
        return ""
    running = count(sum(engine.requests_running for engine in engines), "running request")
    held = count(sum(engine.holders.held_blocks for engine in engines), "block")
    match asked.running_requests:
        case types_pb2.RUNNING_REQUESTS_PREEMPT:
            text = f"would restart {running}, then reset"
        case types_pb2.RUNNING_REQUESTS_KEEP:
            text = f"would reset; {running} would go on undisturbed"
        case _ if asked.wait_for_idle and any(engine.holders.held_blocks for engine in engines):
            text = f"would wait for an idle moment, then reset: {running} and {held} held now"
        case _ if any(engine.requests_running or engine.holders.held_blocks for engine in engines):
            text = f"would reset if no block is held then; {running} now"
        case _:
            text = "would reset: nothing runs now and no block is held"
    return _together(len(engines), [text])


def would_restart(operation: fleet_pb2.FleetOperation) -> int:
    """Running requests that a preempt would restart on the whole fleet, by its dry run."""
    if operation.spec.reset.running_requests != types_pb2.RUNNING_REQUESTS_PREEMPT:
        return 0
    engines = [engine for row in operation.results if row.reset.validate_only for engine in row.reset.engines]
    return sum(engine.requests_running for engine in engines if engine.status.code == 0)


def reset(engines: Sequence[types_pb2.EngineReset], *, with_tiers: bool = True, detail: Detail = "full") -> str:
    """As in: 812 cached blocks dropped, 3 requests kept, engine paused 0.40 ms."""
    if not engines:
        return ""
    parts = [_dropped(engines, detail)]
    counted = False
    for name in ("kept", "preempted", "quarantined"):
        numbers = [getattr(engine, f"requests_{name}") for engine in engines]
        if min(numbers) < 0:
            parts.append(f"number of requests {name} not known")
        elif sum(numbers):
            many = count(sum(numbers), "request") if detail == "full" or not counted else str(sum(numbers))
            parts.append(f"{many} {name}")
            counted = True
    if with_tiers:
        parts += _other_tiers(engines, detail)
    moved = [engine.reorder for engine in engines if engine.HasField("reorder")]
    if moved:
        parts.append(_contiguity(moved))
    parts.append(_pause((engine.pause for engine in engines), detail))
    return _together(len(engines), parts)


def reorder(engines: Sequence[types_pb2.EngineReorder], validate_only: bool = False, detail: Detail = "full") -> str:
    """As in: 4000 blocks moved, contiguity 0.08 -> 1.00, engine paused 27 ms."""
    if not engines:
        return ""
    if validate_only:
        return "would run: the request is accepted"
    moved = sum(engine.blocks_moved for engine in engines)
    parts = [
        f"{count(moved, 'block')} moved",
        _contiguity(engines),
        _pause((engine.pause for engine in engines), detail),
    ]
    return _together(len(engines), parts)


def relieve(engines: Sequence[types_pb2.EngineRelief], validate_only: bool = False) -> str:
    """As in: 1 waiting request gave back 84 blocks (attempt 1 of 3)."""
    if not engines:
        return ""
    if validate_only:
        return "would run: the request is accepted"
    freed = sum(engine.blocks_freed for engine in engines)
    requests = sum(len(engine.request_ids) for engine in engines)
    tries = max(engines, key=lambda engine: engine.attempts)
    parts = [f"{count(requests, 'waiting request')} gave back {count(freed, 'block')}"]
    if tries.max_attempts:
        parts.append(f"attempt {tries.attempts} of {tries.max_attempts}")
    return _together(len(engines), parts)


def scheduling(engines: Sequence[types_pb2.EngineScheduling]) -> str:
    """As in: paused, lease 30.0 s" or "running, weights step-12."""
    if not engines:
        return ""
    states = sorted({_SCHEDULING.get(engine.state, f"state {engine.state}") for engine in engines})
    parts = [" and ".join(states)]
    lease = min((_duration(engine) for engine in engines), default=0.0)
    if lease > 0:
        parts.append(f"lease {seconds(lease)}")
    if versions := sorted({engine.weight_version for engine in engines if engine.weight_version}):
        parts.append(f"weights {', '.join(versions)}")
    if any(engine.ended_by_lease for engine in engines):
        parts.append("ended by its lease")
    return _together(len(engines), parts)


_SCHEDULING: Final = {
    types_pb2.SCHEDULING_STATE_UNSPECIFIED: "unknown",
    types_pb2.SCHEDULING_STATE_RUNNING: "running",
    types_pb2.SCHEDULING_STATE_PAUSED: "paused",
    types_pb2.SCHEDULING_STATE_ABANDONED_UPDATE: "paused, weight update abandoned",
}


def tiers(engine: types_pb2.EngineReset) -> str:
    """Every tier that was asked for, with its state: "prefix done, connector still moving data"."""
    found = []
    for name in TIERS:
        tier = getattr(engine, name)
        if tier.state not in (types_pb2.TIER_STATE_NOT_REQUESTED, types_pb2.TIER_STATE_UNSPECIFIED):
            found.append(f"{name.removesuffix('_cache')} {tier_word(tier.state)}")
    return ", ".join(found)


def _dropped(engines: Sequence[types_pb2.EngineReset], detail: Detail) -> str:
    if not any(engine.prefix_caching_enabled for engine in engines):
        return "prefix caching is off: nothing to drop"
    dropped = sum(engine.cached_blocks_dropped for engine in engines)
    if any(engine.prefix_cache.state == types_pb2.TIER_STATE_UNCONFIRMED for engine in engines):
        return "accepted, its effect was not confirmed"
    if any(engine.cached_blocks_dropped < 0 for engine in engines):
        return "reset, number of cached blocks dropped not known"
    what = "block" if detail == "least" else "cached block"
    return f"{count(dropped, what)} dropped" if dropped else "0 blocks were cached"


def _other_tiers(engines: Sequence[types_pb2.EngineReset], detail: Detail) -> list[str]:
    """In fewer words those of one state together: connector/encoder not configured."""
    found: dict[str, list[str]] = {}
    for name in TIERS[1:]:
        states = {getattr(engine, name).state for engine in engines}
        states -= {types_pb2.TIER_STATE_NOT_REQUESTED, types_pb2.TIER_STATE_UNSPECIFIED}
        if states:
            found.setdefault(" / ".join(tier_word(state) for state in sorted(states)), []).append(name)
    if detail != "full":
        return [f"{'/'.join(names)} {word}" for word, names in found.items()]
    return [f"{name} {word}" for name in TIERS for word, names in found.items() if name in names]


def _contiguity(engines: Sequence[types_pb2.EngineReorder]) -> str:
    before = sum(engine.before.ratio for engine in engines) / len(engines)
    after = sum(engine.after.ratio for engine in engines) / len(engines)
    return f"contiguity {before:.2f} -> {after:.2f}"


def _pause(costs: Iterable[types_pb2.EnginePause], detail: Detail) -> str:
    longest = max(cost.longest_us for cost in costs)
    if not longest or detail == "least":  # 0: nobody measured it
        return ""
    return f"{'engine ' if detail == 'full' else ''}paused {seconds(longest / 1e6)}"


def _together(engines: int, parts: Sequence[str]) -> str:
    text = ", ".join(part for part in parts if part)
    return f"{engines} engines: {text}" if engines > 1 else text


def _duration(engine: types_pb2.EngineScheduling) -> float:
    return float(engine.lease_remaining.seconds) + engine.lease_remaining.nanos / 1e9
