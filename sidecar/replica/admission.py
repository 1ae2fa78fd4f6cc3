"""One engine's admission in the words of the API: a judgement, with the numbers it rests on.

Numbers come from the engine's own evidence while that still describes the present, else from its page, and what
neither knows is -1 or unset. Nothing is carried over from a dead engine.
"""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from engine_bridge.page import FLAG_WOKE_WITHOUT_RESET, Counters, Phase
from sidecar.replica.history import SECOND, History, Process, Verdict
from sidecar.replica.judgement import Judgement

_RESET_MODES = {
    1: types.RUNNING_REQUESTS_FAIL,
    2: types.RUNNING_REQUESTS_PREEMPT,
    3: types.RUNNING_REQUESTS_KEEP,
}

_GONE = frozenset({Verdict.ENGINE_DEAD})


def duration(ns: int) -> Duration:
    """Nanoseconds as a protobuf duration; negative becomes zero."""
    seconds, nanos = divmod(max(ns, 0), SECOND)
    return Duration(seconds=seconds, nanos=nanos)


def contiguity(found: protocol.Contiguity) -> types.Contiguity:
    """The order of a free queue, with the two figures derived from the counts."""
    pairs = found.free_blocks - 1
    return types.Contiguity(
        free_blocks=found.free_blocks,
        adjacent_pairs=found.adjacent_pairs,
        runs=found.runs,
        mean_run_length=found.free_blocks / found.runs if found.runs else 0.0,
        ratio=found.adjacent_pairs / pairs if pairs > 0 else 1.0,
        sampled=found.sampled,
    )


def describe(
    engine: types.EngineRef, history: History, judgement: Judgement, now_ns: int, evidence_ns: int
) -> types.EngineAdmission:
    """Everything known of one engine. Evidence older than `evidence_ns` is left out."""
    admission = types.EngineAdmission(
        engine=engine,
        verdict=types.Verdict.Value(f"VERDICT_{judgement.verdict}"),
        stalled=judgement.stalled,
        verdict_for=duration(now_ns - judgement.since_ns),
        explanation=judgement.explanation,
        warnings=judgement.warnings,
        tokens_per_second=judgement.tokens_per_second,
        requests=unknown_requests(),
        blocks=unknown_blocks(),
        preemptions=-1,
    )
    last = history.latest
    if last is None or judgement.verdict in _GONE:
        return admission
    # Counts seen before the page was damaged are not the present; a page torn by a stopped writer still is.
    page = history.counters if last.process is Process.STOPPED else last.counters
    if page is not None:
        _from_page(admission, page, now_ns)
        admission.from_page = last.unanswered_since_ns > 0
    evidence = history.latest_evidence
    if history.contiguity is not None:
        admission.contiguity.CopyFrom(contiguity(history.contiguity))
    if evidence is not None and now_ns - evidence.monotonic_ns <= evidence_ns:
        _from_evidence(admission, evidence, page, now_ns)
    return admission


def unknown_requests() -> types.RequestCounts:
    """Counts of which none is known."""
    return types.RequestCounts(
        running=-1, waiting=-1, waiting_remote_kv=-1, load_finished=-1, waiting_other=-1, waiting_holding_blocks=-1
    )


def unknown_blocks() -> types.BlockCounts:
    """Counts of which none is known."""
    return types.BlockCounts(total=-1, free=-1, cached=-1, orphaned=-1)


def _from_page(admission: types.EngineAdmission, page: Counters, now_ns: int) -> None:
    admission.requests.running = page.running
    admission.requests.waiting = page.waiting
    admission.requests.waiting_holding_blocks = page.holding
    if page.waiting == 0:  # then every kind of waiting is known as well
        admission.requests.waiting_remote_kv = 0
        admission.requests.load_finished = 0
        admission.requests.waiting_other = 0
        admission.oldest_waiting.CopyFrom(duration(0))
    admission.blocks.total = page.blocks_total
    admission.blocks.free = page.blocks_free
    admission.blocks.cached = page.blocks_cached
    admission.steps = page.steps
    admission.preemptions = page.preemptions
    if page.last_progress_ns > 0:
        admission.since_progress.CopyFrom(duration(now_ns - page.last_progress_ns))
    if page.phase_since_ns > 0:
        admission.phase_for.CopyFrom(duration(now_ns - page.phase_since_ns))
    admission.phase = phase_name(page.phase)
    if page.last_reset_ns > 0:
        admission.since_last_reset.CopyFrom(duration(now_ns - page.last_reset_ns))
        admission.last_reset_mode = _RESET_MODES.get(page.last_reset_mode, types.RUNNING_REQUESTS_UNSPECIFIED)


def phase_name(phase: int) -> str:
    """As the API spells it; "loop", a moment between two steps, counts as "step"; empty when unknown."""
    if phase == Phase.LOOP:
        return "step"
    return Phase(phase).name.lower() if Phase.STARTING <= phase <= Phase.STOPPED else ""


def _from_evidence(
    admission: types.EngineAdmission, evidence: protocol.Evidence, page: Counters | None, now_ns: int
) -> None:
    admission.weight_version = evidence.weight_version
    elapsed = max(now_ns - evidence.monotonic_ns, 0)
    if page is not None and page.last_step_ns > evidence.monotonic_ns and elapsed > SECOND:
        # The queue may have moved since; the page's counts are newer.
        return
    admission.requests.CopyFrom(
        types.RequestCounts(
            running=evidence.running,
            waiting=evidence.waiting,
            waiting_remote_kv=evidence.waiting_remote_kv,
            load_finished=evidence.load_finished,
            waiting_other=evidence.waiting_other,
            waiting_holding_blocks=evidence.waiting_holding_blocks,
        )
    )
    admission.blocks.CopyFrom(
        types.BlockCounts(
            total=evidence.blocks_total,
            free=evidence.blocks_free,
            cached=evidence.blocks_cached,
            orphaned=evidence.blocks_orphaned,
        )
    )
    if evidence.oldest_waiting_ns >= 0 and (evidence.waiting or evidence.oldest_waiting_ns == 0):
        waited = evidence.oldest_waiting_ns + (elapsed if evidence.waiting else 0)
        admission.oldest_waiting.CopyFrom(duration(waited))
    if evidence.head is not None:
        admission.head.CopyFrom(
            types.QueueHead(
                request_id=evidence.head.request_id,
                status=evidence.head.status,
                blocks_needed=evidence.head.blocks_needed,
                next_chunk_tokens=evidence.head.next_chunk_tokens,
                blocks_held=evidence.head.blocks_held,
                waiting_for=duration(evidence.head.waiting_ns + elapsed),
            )
        )
    admission.holders.extend(
        types.WaitingHolder(
            request_id=holder.request_id,
            status=holder.status,
            blocks_held=holder.blocks_held,
            load_finished=holder.load_finished,
        )
        for holder in evidence.holders[:16]
    )
    if evidence.woke_without_reset and not (page is not None and page.flags & FLAG_WOKE_WITHOUT_RESET):
        admission.warnings.append("the engine woke up with an empty KV cache and kept the hashes of the lost one")
    if evidence.truncated:
        admission.warnings.append("the waiting queue is longer than the engine looks through; counts cover its front")
    if evidence.quarantined_requests:
        admission.warnings.append(
            f"{evidence.quarantined_requests} requests are quarantined: their blocks stay uncached"
        )
