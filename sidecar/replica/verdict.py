"""Whether admissions of one engine flow, and if not, why: a pure function of a history.

The rules are tried in order of what they rule out: a process that is gone explains everything else, a paused scheduler
explains an idle loop, and only an engine that could work and does not is looked at closely. A standstill is counted
from the last progress or from when the present work was first seen, whichever is later, so that a request arriving
after a quiet night is no stall. `explain` has the sentences; sources of the rules are the admission table of the design
notes and the reports named beside them.

Hysteresis, so that a watcher is told of changes and not of noise:
- a stall needs `stall_ns` without progress, and clears with the first sample that shows progress;
- FLOWING outlives the last token by `linger_ns`; between that and `stall_ns` the verdict stays what it was;
- SATURATED, DEGRADED and THRASHING are entered at one threshold and left at another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from engine_bridge.page import FLAG_ABANDONED_UPDATE, FLAG_WOKE_WITHOUT_RESET, Counters, Phase
from engine_bridge.protocol import Evidence
from sidecar.replica import explain
from sidecar.replica.history import SECOND, Bucket, History, Link, Process, Sample, Verdict
from sidecar.replica.judgement import ALWAYS_STALLED, NEVER_STALLED, Finding, Judgement, Thresholds, View

__all__ = ["ALWAYS_STALLED", "NEVER_STALLED", "Judgement", "Thresholds", "Verdict", "judge"]

_MOVING: Final = frozenset({Verdict.FLOWING, Verdict.SATURATED, Verdict.DEGRADED, Verdict.THRASHING})


def judge(history: History, now_ns: int, thresholds: Thresholds) -> Judgement:
    """The verdict at `now_ns` (CLOCK_MONOTONIC) on what the history holds. Never raises, changes nothing."""
    last = history.latest
    if last is None:
        return _settled(history, now_ns, Finding(Verdict.UNKNOWN, explain.nothing_seen()), (), -1.0)
    page = history.counters
    finding = _process(history, last, page, now_ns, thresholds)
    if finding is not None:
        return _settled(history, now_ns, finding, (), -1.0)
    if page is None or last.counters is None:
        return _settled(history, now_ns, *_without_page(history, last, now_ns, thresholds), -1.0)
    view = _view(history, last, page, now_ns, thresholds)
    finding = next((found for rule in _RULES if (found := rule(view)) is not None), None)
    if finding is None:
        finding = Finding(Verdict.UNKNOWN, explain.undecided(view.page, view.still_ns, view.stall_ns))
    return _settled(history, now_ns, finding, _warnings(view), view.rate("tokens_scheduled"))


def _settled(
    history: History, now_ns: int, finding: Finding, warnings: tuple[str, ...], tokens_per_second: float
) -> Judgement:
    standing = history.standing
    since = finding.since_ns or now_ns
    if standing is not None and standing.verdict is finding.verdict:
        since = min(since, standing.since_ns)
    return Judgement(finding.verdict, finding.stalled, min(since, now_ns), finding.text, warnings, tokens_per_second)


def _view(history: History, last: Sample, page: Counters, now_ns: int, limits: Thresholds) -> View:
    evidence = history.latest_evidence
    if evidence is not None and not (
        evidence.monotonic_ns >= page.last_progress_ns and now_ns - evidence.monotonic_ns <= limits.evidence_ns
    ):
        evidence = None
    work_since = history.work_since_ns or now_ns
    if evidence is not None and evidence.oldest_waiting_ns > 0:
        # The engine knows since when its oldest request waits; this sidecar may have started a moment ago.
        work_since = min(work_since, evidence.monotonic_ns - evidence.oldest_waiting_ns)
    still_since = max(page.last_progress_ns, work_since)
    busy = page.phase in (Phase.STEP, Phase.OPERATION) and now_ns - page.phase_since_ns >= limits.linger_ns
    return View(
        now_ns=now_ns,
        limits=limits,
        history=history,
        last=last,
        page=page,
        evidence=evidence,
        still_since_ns=still_since,
        turning_ns=max((page.phase_since_ns if busy else now_ns) - still_since, 0),
        window=history.within(last.at_ns - limits.rate_ns),
    )


# --- the process -------------------------------------------------------------------------------------------------


def _process(history: History, last: Sample, page: Counters | None, now_ns: int, limits: Thresholds) -> Finding | None:
    """Is there an engine at all? vllm#39863: an API server that answers 200 says nothing about its engine core."""
    if last.process is Process.GONE:
        return Finding(Verdict.ENGINE_DEAD, explain.dead(page, last), stalled=True)
    if last.link is Link.REFUSED and last.process is Process.UNREADABLE:
        return Finding(Verdict.ENGINE_DEAD, explain.refused(last), stalled=True)
    if last.link is Link.NOT_YET and page is None:
        waited = now_ns - history.first_ns
        if waited < limits.start_ns:
            return Finding(Verdict.STARTING, explain.not_listening(last), since_ns=history.first_ns)
        return Finding(Verdict.ENGINE_DEAD, explain.never_listened(last, waited), stalled=True)
    if last.process is Process.STOPPED:
        return Finding(Verdict.ENGINE_STOPPED, explain.stopped(page), stalled=True)
    if page is None:
        return None
    if page.phase == Phase.STOPPED:
        return Finding(Verdict.ENGINE_DEAD, explain.loop_ended(page), stalled=True, since_ns=page.phase_since_ns)
    return None


def _without_page(history: History, last: Sample, now_ns: int, limits: Thresholds) -> tuple[Finding, tuple[str, ...]]:
    """What the engine's own recent answer is enough for, and warnings. One answer cannot tell whether tokens move."""
    evidence = history.latest_evidence
    if evidence is None or last.unanswered_since_ns or now_ns - evidence.monotonic_ns > limits.evidence_ns:
        return Finding(Verdict.UNKNOWN, explain.no_reading(last)), ()
    warnings = (explain.page_damaged(last),)
    if evidence.sleeping:
        return Finding(Verdict.SLEEPING, explain.sleeping(evidence.waiting)), warnings
    abandoned = evidence.scheduling == "abandoned_update"
    if evidence.paused or abandoned:
        return Finding(Verdict.PAUSED, explain.paused_as_told(evidence), stalled=abandoned), warnings
    if evidence.verdict == Verdict.HELD_BLOCKS_DEADLOCK:
        return Finding(Verdict.HELD_BLOCKS_DEADLOCK, explain.deadlock(evidence), stalled=True), warnings
    if evidence.running == 0 and evidence.waiting == 0:
        return Finding(Verdict.IDLE, explain.idle(max(evidence.blocks_total - evidence.blocks_free, 0))), warnings
    return Finding(Verdict.UNKNOWN, explain.progress_unseen(evidence, last)), warnings


# --- the rules, in order -----------------------------------------------------------------------------------------


def _starting(view: View) -> Finding | None:
    if view.page.phase == Phase.STARTING:
        if view.phase_ns < view.limits.start_ns:
            return Finding(Verdict.STARTING, explain.starting(view.phase_ns), since_ns=view.page.phase_since_ns)
        return Finding(
            Verdict.ENGINE_HUNG,
            explain.hung("starting", view.phase_ns, view.page.pid),
            stalled=True,
            since_ns=view.page.phase_since_ns,
        )
    if view.page.phase == Phase.STOPPING:
        return Finding(Verdict.UNKNOWN, explain.stopping(view.phase_ns), since_ns=view.page.phase_since_ns)
    return None


def _hung(view: View) -> Finding | None:
    """The page's phase is old and the process alive. A long model step is not hung before `hung_ns`."""
    phase = view.page.phase
    if phase in (Phase.STEP, Phase.OPERATION, Phase.LOOP) and view.phase_ns >= view.limits.hung_ns:
        text = explain.hung(Phase(phase).name.lower(), view.phase_ns, view.page.pid)
        return Finding(Verdict.ENGINE_HUNG, text, stalled=True, since_ns=view.page.phase_since_ns)
    asked = view.last.unanswered_since_ns
    waited = view.now_ns - asked
    if asked and phase in (Phase.IDLE, Phase.LOOP) and waited >= view.limits.silent_ns:
        return Finding(Verdict.ENGINE_HUNG, explain.silent(waited, view.page.pid), stalled=True, since_ns=asked)
    return None


def _not_meant_to_run(view: View) -> Finding | None:
    """Sleeping and paused: planned, until requests have waited longer than any plan."""
    page = view.page
    waiting = max(page.waiting, 0)
    outlasted = waiting > 0 and view.still_ns >= view.limits.planned_ns
    if page.sleeping > 0:
        return Finding(Verdict.SLEEPING, explain.sleeping(waiting), stalled=outlasted)
    abandoned = page.flags > 0 and bool(page.flags & FLAG_ABANDONED_UPDATE)
    if page.paused > 0 or abandoned:
        text = explain.paused(page, abandoned=abandoned, still_ns=view.still_ns)
        return Finding(Verdict.PAUSED, text, stalled=abandoned or outlasted)
    return None


def _no_work(view: View) -> Finding | None:
    """No request, or only such as the engine itself has nothing to do for. Frozen gauges are no stall here."""
    page = view.page
    if page.running < 0 and page.waiting < 0:
        return Finding(Verdict.UNKNOWN, explain.no_counts())
    if view.last.demand == 0 and page.phase == Phase.STEP and view.phase_ns >= view.limits.linger_ns:
        # Counts are written when a step ends, so the first step of the first request shows none.
        return Finding(Verdict.FLOWING, explain.first_step(view.phase_ns), since_ns=page.phase_since_ns)
    if view.last.demand == 0:
        leak = _leak(view)
        if leak is not None:
            return leak
        quiet = view.now_ns - page.last_progress_ns
        if page.last_progress_ns > 0 and quiet < view.limits.linger_ns and _keeps_moving(view):
            return Finding(Verdict.FLOWING, explain.just_ended(quiet))
        return Finding(Verdict.IDLE, explain.idle(view.last.held_blocks))
    explained = view.evidence is not None and bool(view.evidence.verdict)
    if page.phase == Phase.IDLE and page.running <= 0 and view.phase_ns >= view.limits.linger_ns and not explained:
        # The engine counts these as no work: sessions that wait for their client's next input.
        return Finding(Verdict.IDLE, explain.waiting_for_clients(page.waiting))
    return None


def _keeps_moving(view: View) -> bool:
    standing = view.history.standing
    return standing is not None and standing.verdict in _MOVING


def _leak(view: View) -> Finding | None:
    """vllm#46283: used blocks, no requests, growing. Growth shows between quiet moments: idle engines leak nothing."""
    settled = [mark for mark in view.history.marks if mark.last_ns - mark.first_ns >= view.limits.leak_ns]
    if len(settled) < 2 or settled[-1].last_ns < view.history.marks[-1].last_ns:
        return None
    first, newest = settled[0], settled[-1]
    text = explain.leaking(first.blocks, newest.blocks, view.now_ns - first.first_ns, view.page.blocks_total)
    return Finding(Verdict.BLOCKS_LEAKED, text, since_ns=newest.first_ns)


def _moving(view: View) -> Finding | None:
    """Tokens were scheduled within the stall threshold, or a step that will schedule some is still running."""
    page = view.page
    in_step = view.turning_ns < view.still_ns
    if view.turning_ns >= view.stall_ns:
        return None
    progressed = page.last_progress_ns > 0 and (
        page.last_progress_ns >= view.still_since_ns or view.now_ns - page.last_progress_ns <= view.limits.linger_ns
    )
    if not progressed and not in_step and not _keeps_moving(view):
        return None
    if in_step:  # rates over a step that has not ended say nothing
        return Finding(Verdict.FLOWING, explain.long_step(page, view.still_ns))
    return _thrashing(view) or _degraded(view) or _saturated(view) or Finding(Verdict.FLOWING, _flow_text(view))


def _flow_text(view: View) -> str:
    if view.still_ns > 2 * view.limits.linger_ns:
        return explain.undecided(view.page, view.still_ns, view.stall_ns)
    return explain.flowing(view.page, view.rate("tokens_scheduled"))


def _thrashing(view: View) -> Finding | None:
    """vllm-ascend#16315: preempt, admit again, preempt. One reset that preempts everything once is not that."""
    if view.window_s < 5.0:
        return None
    counts = [s.counters.preemptions for s in view.window if s.counters is not None]
    if counts[0] < 0 or view.rate("outputs") < 0:
        return None
    preempted = counts[-1] - counts[0]
    rises = sum(after > before for before, after in itertools.pairwise(counts))
    outputs = view.rate("outputs") * view.window_s
    already = view.was(Verdict.THRASHING)
    limit = view.limits.thrash_outputs * (2 if already else 1)
    if rises < (1 if already else view.limits.thrash_spread) or outputs >= limit * preempted:
        return None
    text = explain.thrashing(preempted, outputs, view.window_s)
    return Finding(Verdict.THRASHING, text, stalled=outputs == 0 and view.window_s * SECOND >= view.stall_ns)


def _degraded(view: View) -> Finding | None:
    """Tokens and outputs both at a fraction of what the same demand got before.

    Both, because a long prefill makes few outputs from many tokens and a decode few tokens from many outputs.
    """
    tokens, outputs = view.rate("tokens_scheduled"), view.rate("outputs")
    if view.last.admissible == 0 or tokens < 0 or outputs < 0 or view.window_s * SECOND < view.limits.rate_ns:
        return None
    before = _former(view)
    if before is None:
        return None
    share = view.limits.degraded_above if view.was(Verdict.DEGRADED) else view.limits.degraded_below
    if tokens >= share * before.tokens_per_second or outputs >= share * before.outputs_per_second:
        return None
    return Finding(Verdict.DEGRADED, explain.degraded(view.page, tokens, before))


def _former(view: View) -> Bucket | None:
    """A good stretch under a demand like the present one: the upper quartile of the buckets before the window."""
    ends = view.window[0].at_ns
    demand = view.last.demand
    alike = [b for b in view.history.buckets if b.ends_ns <= ends and demand <= 2 * b.demand <= 4 * demand]
    if len(alike) < 3:
        return None
    alike.sort(key=lambda bucket: bucket.outputs_per_second)
    return alike[(3 * len(alike)) // 4]


def _saturated(view: View) -> Finding | None:
    """Something runs, and the head of the queue waits for blocks. Without evidence: the pool is nearly full."""
    page = view.page
    queued = view.last.admissible
    if view.was(Verdict.SATURATED):
        recent = (s.admissible for s in view.window if s.at_ns >= view.last.at_ns - 2 * view.limits.linger_ns)
        queued = max(recent, default=0)
    if page.running <= 0 or queued == 0 or page.blocks_total <= 0 or page.blocks_free < 0:
        return None
    known = view.history.latest_evidence
    head = known.head if known is not None and view.history.queue_since_ns <= known.monotonic_ns else None
    if head is not None and known is not None and view.now_ns - known.monotonic_ns <= 4 * view.limits.evidence_ns:
        short = head.blocks_needed > page.blocks_free
        return Finding(Verdict.SATURATED, explain.saturated(page, head.blocks_needed)) if short else None
    nearly_full = 0.15 if view.was(Verdict.SATURATED) else 0.10
    if page.blocks_free >= nearly_full * page.blocks_total:
        return None
    return Finding(Verdict.SATURATED, explain.saturated(page, None))


def _waits_on_remote(view: View) -> Finding | None:
    """Nothing runs and loads are truly in flight: they end by themselves, unless none has for very long."""
    evidence = view.evidence
    if evidence is None or evidence.running > 0 or evidence.waiting_remote_kv <= 0:
        return None
    stalled = view.still_ns >= view.limits.remote_ns
    text = explain.remote(evidence, view.still_ns, stalled=stalled)
    return Finding(Verdict.WAITING_REMOTE_KV, text, stalled=stalled, since_ns=view.still_since_ns)


def _standstill(view: View) -> Finding | None:
    """Work, a turning loop, no tokens. vllm#45414: an empty pool is no reason to call that healthy."""
    if view.turning_ns < view.stall_ns and not _has_not_moved_since_stall(view):
        return None
    return _cause(view)


def _has_not_moved_since_stall(view: View) -> bool:
    """A stall ends with progress, not with the evidence for its start growing old."""
    standing = view.history.standing
    if standing is None or not standing.stalled or standing.verdict not in _STANDING_STILL:
        return False
    return view.page.last_progress_ns <= standing.since_ns


_STANDING_STILL: Final = frozenset(
    {Verdict.HELD_BLOCKS_DEADLOCK, Verdict.HEAD_CANNOT_FIT, Verdict.BLOCKS_LEAKED, Verdict.UNKNOWN}
)


def _cause(view: View) -> Finding:
    """Why an engine with work schedules nothing."""
    evidence, since = view.evidence, view.still_since_ns
    if evidence is None:
        text = explain.standstill_unexplained(view.page, view.still_ns, view.last)
        # All of them deferred may be remote loads or sessions waiting for their clients, which end by themselves.
        deferred = view.page.running == 0 and view.page.deferred >= view.page.waiting > 0
        stalled = not deferred or view.still_ns >= view.limits.remote_ns
        return Finding(Verdict.UNKNOWN, text, stalled=stalled, since_ns=since)
    if evidence.running > 0:
        return Finding(Verdict.UNKNOWN, explain.running_stuck(evidence, view.still_ns), stalled=True, since_ns=since)
    head = evidence.head
    # The engine's own word first: it has seen the scheduler's structures, and rules out a head that cannot fit.
    says_deadlock = evidence.verdict == Verdict.HELD_BLOCKS_DEADLOCK
    cannot_fit = head is not None and head.blocks_needed + max(head.blocks_held, 0) > evidence.blocks_total >= 0
    if head is not None and cannot_fit and not says_deadlock:
        return Finding(Verdict.HEAD_CANNOT_FIT, explain.cannot_fit(evidence, head), stalled=True, since_ns=since)
    short = head is not None and head.blocks_needed > evidence.blocks_free >= 0
    if says_deadlock or (short and evidence.waiting_holding_blocks > 0):
        return Finding(Verdict.HELD_BLOCKS_DEADLOCK, explain.deadlock(evidence), stalled=True, since_ns=since)
    if short:
        # No request holds anything, so transfers do, or nobody.
        if view.still_ns < view.limits.leak_ns:
            return Finding(Verdict.UNKNOWN, explain.held_by_transfers(evidence, view.still_ns), since_ns=since)
        return Finding(Verdict.BLOCKS_LEAKED, explain.leaked_full(evidence), stalled=True, since_ns=since)
    if evidence.waiting and evidence.waiting_other >= evidence.waiting:
        return Finding(Verdict.UNKNOWN, explain.waiting_other(evidence, view.still_ns), stalled=True, since_ns=since)
    return Finding(Verdict.UNKNOWN, explain.fits_yet_waits(evidence, view.still_ns), stalled=True, since_ns=since)


def _arriving(view: View) -> Finding | None:
    """Work came a moment ago and is not scheduled yet."""
    if view.still_ns >= 2 * view.limits.linger_ns:
        return None
    return Finding(Verdict.FLOWING, explain.arriving(view.last.demand, view.still_ns))


_RULES: Final[tuple[Callable[[View], Finding | None], ...]] = (
    _hung,
    _starting,
    _not_meant_to_run,
    _no_work,
    _moving,
    _waits_on_remote,
    _standstill,
    _arriving,
)


def _warnings(view: View) -> tuple[str, ...]:
    """Things worth telling that are no verdict."""
    found: list[str] = []
    page, evidence = view.page, view.history.latest_evidence
    woke = page.flags > 0 and bool(page.flags & FLAG_WOKE_WITHOUT_RESET)
    if woke or (view.evidence is not None and view.evidence.woke_without_reset):
        found.append(explain.woke_without_reset())
    if evidence is not None and page.waiting > 0 and evidence.oldest_waiting_ns > 0 and _still_queued(view, evidence):
        oldest = evidence.oldest_waiting_ns + max(view.now_ns - evidence.monotonic_ns, 0)
        if oldest >= view.limits.parked_ns:
            found.append(explain.parked(oldest, evidence))
    if view.last.demand == 0 and view.last.held_blocks and view.history.marks:
        mark = view.history.marks[-1]
        if mark.last_ns - mark.first_ns >= view.limits.leak_ns:
            found.append(explain.held_by_nobody(mark.blocks, mark.last_ns - mark.first_ns))
    if view.last.note:
        found.append(view.last.note)
    return tuple(found)


def _still_queued(view: View, evidence: Evidence) -> bool:
    """Whether there was work ever since that evidence."""
    return 0 < view.history.work_since_ns <= evidence.monotonic_ns or view.now_ns - evidence.monotonic_ns < SECOND
