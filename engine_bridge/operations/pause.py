"""Pause under a lease: a lost client must never strand an engine, nor let half-written weights serve.

A pause names a lease that its owner renews. Once the owner has said that the weights are whole, a lease that runs out
resets every tier and resumes. Before that the weights may be half written, so the engine resets, stays paused and says
"abandoned_update" until a person or a new update resolves it, unless the owner chose otherwise when it paused.

A lease that ends without a name for the weights leaves UNKNOWN_VERSION at the engine, whose own outputs carry it too:
the old version would be a lie. It stays until somebody names one, here or to vLLM itself.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

from engine_bridge import protocol
from engine_bridge.operations import Context, Lease, Memory, Verdict
from engine_bridge.operations.reset import reset_for_lease
from engine_bridge.port import EnginePort, Work

logger = logging.getLogger("vllm.kvctl")

_WRONG = "WRONG_SCHEDULING_STATE"
_PENDING = (
    "a pause or sleep of vLLM's own still waits for model steps and requests to run out; wait until it has taken hold "
    "and end it there"
)

LONGEST_LEASE_NS: Final = 2**62
"""More makes sums that no frame can carry; the sidecar allows far less."""
LONGEST_WEIGHT_VERSION: Final = 256
"""Characters. It comes back with every answer, which must still fit a frame."""
UNKNOWN_VERSION: Final = "unknown"
"""Not the empty one: that means that no version was ever set, so that the weights are those of the start."""


def scheduling_state(port: EnginePort, memory: Memory) -> Literal["running", "paused", "abandoned_update"]:
    """Whether the engine schedules, and if not, whether a weight update was abandoned."""
    if not port.paused():
        return "running"
    return "abandoned_update" if memory.abandoned else "paused"


def forget_what_others_ended(port: EnginePort, memory: Memory) -> None:
    """A resume by vLLM itself may have ended a pause of ours: neither lease nor abandonment outlives it."""
    if not port.paused():
        if memory.lease is not None:
            # Whoever resumes by vLLM's own means names the weights there as well, if at all.
            _doubt_weights(port, memory.lease, whole=True)
        memory.lease = None
        memory.abandoned = ""


def _doubt_weights(port: EnginePort, lease: Lease, *, whole: bool) -> None:
    """A lease has ended and its owner has not named the weights. Only where they are `whole` can they be known all the
    same: somebody has named them to vLLM itself since the pause took hold.
    """
    if lease.version_before is None or (whole and port.weight_version() != lease.version_before):
        return
    port.set_weight_version(UNKNOWN_VERSION)


def pause(port: EnginePort, request: protocol.Pause, context: Context) -> Work[Verdict]:
    """Stop scheduling, wait for the steps in flight, take the lease."""
    memory = context.memory
    lacking = port.capabilities().get("pause", "unknown")
    if lacking:
        return Verdict("unsupported", reason="ENGINE_LACKS_CAPABILITY", message=f"pause: {lacking}")
    if not 0 < request.lease_ns <= LONGEST_LEASE_NS:
        return Verdict("invalid", reason="INVALID_FIELD", message="lease_ns must be positive and at most 2**62")
    if port.sleeping():
        return Verdict("refused", reason="ENGINE_SLEEPING", message="the engine sleeps; wake it first")
    if port.sleep_pending():
        return _wrong(_PENDING)
    if memory.lease is not None:
        return _wrong(f"pause {memory.lease.request_id} already holds the lease on this engine")
    if port.paused_by_vllm():
        return _wrong("the scheduler is paused by vLLM itself (its /pause or a sleep); resume it there first")
    before = memory.abandoned
    memory.abandoned = ""
    lease = Lease(request.request_id, context.clock() + request.lease_ns, request.resume_when_abandoned)
    memory.lease = lease
    port.pause()
    entered = late = ours = False
    try:
        while (ours := _is_ours(port)) and port.in_flight() and not late:
            yield "step"
            late = context.clock() >= context.deadline_ns
        if ours and not late:
            port.synchronize()
            entered = True
    finally:
        if not entered:
            # Not paused as asked: leave nothing behind that would act on its own later, and others' pause to them.
            memory.lease, memory.abandoned = None, before
            if not before and _is_ours(port):
                port.resume()
    if not ours:
        how = "paused" if port.paused() else "resumed"
        return _wrong(f"vLLM itself {how} scheduling while model steps in flight were running out; its word stands")
    if late:
        message = "the deadline passed while model steps in flight were running out; scheduling goes on"
        return Verdict("withdrawn", reason="NOT_EXECUTED", message=message)
    lease.expires_ns = context.clock() + request.lease_ns
    lease.version_before = port.weight_version()
    return Verdict("done", _result(port, memory, context.clock()))


def _is_ours(port: EnginePort) -> bool:
    """Whether a pause of ours is in force and nobody else has paused, slept or resumed since."""
    return port.paused() and not port.paused_by_vllm() and not port.sleeping() and not port.sleep_pending()


def renew(port: EnginePort, request: protocol.Renew, memory: Memory, now_ns: int) -> Verdict:
    """Extend the lease; a length of 0 or less ends it at the next step boundary."""
    if request.lease_ns > LONGEST_LEASE_NS:
        return Verdict("invalid", reason="INVALID_FIELD", message="lease_ns must be at most 2**62")
    forget_what_others_ended(port, memory)
    lease = memory.lease
    if lease is None or lease.request_id != request.pause_request_id:
        found = f"pause {lease.request_id} holds the lease" if lease else "no lease is held on this engine"
        ended = memory.ended_by_lease == request.pause_request_id
        message = "the lease ended and the engine resumed by itself" if ended else found
        if memory.abandoned == request.pause_request_id:
            message = "the lease ran out or was cancelled before the weights were whole; the engine stays paused"
        result = _result(port, memory, now_ns, ended_by_lease=ended)
        return Verdict("refused", result, _WRONG, message)
    lease.expires_ns = now_ns + request.lease_ns
    lease.weights_complete = lease.weights_complete or request.weights_complete
    return Verdict("done", _result(port, memory, now_ns))


def resume(port: EnginePort, request: protocol.Resume, context: Context) -> Work[Verdict]:
    """Schedule again, if the pause is the one named. An empty name ends whatever paused the engine, except a live
    lease, which takes `force`. Refused while a sleep or an unfinished pause of vLLM's own is in the way.
    """
    yield from ()
    memory = context.memory
    wanted = request.pause_request_id
    if len(request.weight_version) > LONGEST_WEIGHT_VERSION:
        message = f"weight_version has {len(request.weight_version)} characters, at most {LONGEST_WEIGHT_VERSION} fit"
        return Verdict("invalid", reason="INVALID_FIELD", message=message)
    forget_what_others_ended(port, memory)
    if port.sleeping():
        return Verdict("refused", reason="ENGINE_SLEEPING", message="the engine sleeps; wake it first")
    if port.sleep_pending():
        return _wrong(_PENDING)
    if not port.paused():
        ended = bool(wanted) and wanted == memory.ended_by_lease
        if wanted and not ended:
            return _wrong(f"this engine is not paused by {wanted}")
        if request.weight_version:
            port.set_weight_version(request.weight_version)
        message = "the lease ended and the engine had resumed by itself" if ended else "the engine was not paused"
        return Verdict("done", _result(port, memory, context.clock(), ended_by_lease=ended), message=message)
    refusal = _may_not_resume(port, request, memory, context.clock())
    if refusal is not None:
        return refusal
    if request.weight_version:
        port.set_weight_version(request.weight_version)
    elif memory.lease is not None and (memory.lease.weights_complete or not wanted):
        # An owner that has declared nothing may not have written anything.
        _doubt_weights(port, memory.lease, whole=memory.lease.weights_complete)
    port.resume()
    memory.lease = None
    memory.abandoned = ""
    return Verdict("done", _result(port, memory, context.clock()))


def _may_not_resume(port: EnginePort, request: protocol.Resume, memory: Memory, now_ns: int) -> Verdict | None:
    """Why what paused the engine is not this caller's to end."""
    lacking = port.capabilities().get("pause", "unknown")
    if lacking:
        return Verdict("unsupported", reason="ENGINE_LACKS_CAPABILITY", message=f"pause: {lacking}")
    wanted, lease = request.pause_request_id, memory.lease
    holder = lease.request_id if lease is not None else memory.abandoned
    if wanted and wanted != holder:
        return _wrong(f"the engine is paused by {holder or 'vLLM itself'}, not by {wanted}")
    if wanted and port.paused_by_vllm() and not request.force:
        return _wrong("vLLM itself has paused the scheduler as well (its /pause); resume it there, or use force")
    if lease is not None and not wanted and not request.force:
        left_s = max(0, lease.expires_ns - now_ns) / 1e9
        message = (
            f"pause {lease.request_id} holds the lease on this engine for another {left_s:.1f} s and may be writing "
            "weights; name that pause, wait for its lease to end, or use force"
        )
        return Verdict("refused", _result(port, memory, now_ns), _WRONG, message)
    return None


def end_lease(port: EnginePort, context: Context) -> Work[Verdict]:
    """The lease ran out, or was withdrawn."""
    yield from ()
    memory = context.memory
    lease = memory.lease
    forget_what_others_ended(port, memory)
    if lease is None or memory.lease is None:
        return Verdict("done", _result(port, memory, context.clock()), message="the pause had been ended by others")
    memory.lease = None
    # First the state that is safe if anything below raises: paused, and marked.
    memory.abandoned = lease.request_id
    _doubt_weights(port, lease, whole=lease.weights_complete)
    how = "was withdrawn" if lease.withdrawn else "ran out"
    trouble = reset_for_lease(port)
    context.note_reset("keep")
    for line in trouble:
        logger.warning("kvctl: lease of pause %s %s: %s", lease.request_id, how, line)
    if lease.weights_complete or lease.resume_when_abandoned:
        # A sleep or a pause of vLLM's own is not ours to end, and neither is one that still waits for steps.
        ours = _is_ours(port)
        if ours:
            port.resume()
        memory.abandoned = ""
        memory.ended_by_lease = lease.request_id
        then = "scheduling resumed" if ours else "vLLM's own pause or sleep left as it is"
        logger.warning("kvctl: lease of pause %s %s: caches reset, %s", lease.request_id, how, then)
    else:
        logger.error(
            "kvctl: lease of pause %s %s before its weights were declared whole: caches reset, still paused; their "
            "version was %r before",
            lease.request_id,
            how,
            lease.version_before,
        )
    return Verdict("done", _result(port, memory, context.clock(), ended_by_lease=True))


def _wrong(message: str) -> Verdict:
    return Verdict("refused", reason=_WRONG, message=message)


def _result(
    port: EnginePort, memory: Memory, now_ns: int, *, ended_by_lease: bool = False
) -> protocol.SchedulingResult:
    remaining = max(0, memory.lease.expires_ns - now_ns) if memory.lease is not None else 0
    return protocol.SchedulingResult(
        scheduling_state(port, memory), port.weight_version(), remaining, ended_by_lease=ended_by_lease
    )
