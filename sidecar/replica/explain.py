"""The sentences of the verdicts: the numbers, and what to do where something can be done.

One sentence each, for a person under pressure. Numbers come first, the remedy last, and a remedy is named only when
the evidence supports it.
"""

from __future__ import annotations

from typing import Final

from engine_bridge.page import Counters
from engine_bridge.protocol import Evidence, HeadOfQueue
from sidecar.replica.history import SECOND, Bucket, Sample


def count(number: int, noun: str) -> str:
    """E.g. "1 block", "27 blocks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def age(ns: int) -> str:
    """A duration for a person: "0.4 s", "42 s", "10 min", "3.5 h"."""
    seconds = max(ns, 0) / SECOND
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _requests(number: int, state: str) -> str:
    verb = "is" if number == 1 else "are"
    return f"{count(number, 'request')} {verb} {state}"


# --- no engine to speak of ---------------------------------------------------------------------------------------


def nothing_seen() -> str:
    """No sample."""
    return "nothing has been seen of this engine yet"


def no_reading(last: Sample) -> str:
    """Alive or not, it cannot be read."""
    if last.note or not last.page_problem:
        return last.note or "the engine's page cannot be read and it has not answered"
    if last.unanswered_since_ns:
        silence = f"it has not answered on its socket for {age(last.at_ns - last.unanswered_since_ns)}"
        return f"the engine's page cannot be read ({last.page_problem}), and {silence}"
    return f"the engine's page cannot be read ({last.page_problem})"


def page_damaged(last: Sample) -> str:
    """Warning: the socket is all there is."""
    why = f" ({last.page_problem})" if last.page_problem else ""
    return f"the engine's page cannot be read{why}; the engine answers on its socket"


def progress_unseen(evidence: Evidence, last: Sample) -> str:
    """Requests, and no page to see them move."""
    return (
        f"{page_damaged(last)}: {count(evidence.running, 'request')} running, {evidence.waiting} waiting, and only the "
        "page tells whether tokens are scheduled; restart the engine when it suits, its page is made anew"
    )


def dead(page: Counters | None, last: Sample) -> str:
    """The process is gone."""
    if last.note:
        return f"the engine is dead: {last.note}; restart it"
    pid = f" {page.pid}" if page is not None and page.pid > 0 else ""
    return f"the engine's process{pid} is gone; restart it, its cache will be cold"


def refused(last: Sample) -> str:
    """Its socket refuses and /proc shows nothing."""
    detail = f" ({last.note})" if last.note else ""
    return f"nothing listens on the engine's address any more, so its process is gone{detail}; restart it"


def not_listening(last: Sample) -> str:
    """Nothing has listened so far."""
    return last.note or "nothing listens on the engine's address yet; it is starting"


def never_listened(last: Sample, waited_ns: int) -> str:
    """Nothing has listened for longer than a start takes."""
    detail = f" ({last.note})" if last.note else ""
    return f"nothing has listened on the engine's address for {age(waited_ns)}{detail}; look at the engine's log"


def stopped(page: Counters | None) -> str:
    """SIGSTOP or a debugger."""
    pid = f" {page.pid}" if page is not None and page.pid > 0 else ""
    return f"the engine's process{pid} is stopped by a signal or a debugger; continue it with `kill -CONT{pid}`"


def loop_ended(page: Counters) -> str:
    """The page says STOPPED."""
    return f"the engine's busy loop has ended and process {page.pid} serves nothing any more; restart it"


def starting(phase_ns: int) -> str:
    """Not ready."""
    return f"the engine has been starting for {age(phase_ns)}"


def stopping(phase_ns: int) -> str:
    """Shutting down."""
    return f"the engine has been shutting down for {age(phase_ns)}; it takes no operation"


def hung(phase: str, phase_ns: int, pid: int) -> str:
    """One phase for too long."""
    where = {"step": "inside one step", "operation": "inside one kvctl operation", "loop": "between two steps"}
    return (
        f"process {pid} lives, and its engine thread has been {where.get(phase, phase)} for {age(phase_ns)}; "
        f"look at it with `py-spy dump --pid {pid}`, restart the engine if it does not come back"
    )


def silent(waited_ns: int, pid: int) -> str:
    """Idle and not answering."""
    return (
        f"process {pid} lives with nothing to do, and its engine thread has left a question unanswered for "
        f"{age(waited_ns)}: another thread may hold the GIL; look at it with `py-spy dump --pid {pid}`"
    )


# --- not meant to run --------------------------------------------------------------------------------------------


def sleeping(waiting: int) -> str:
    """The executor sleeps."""
    queue = f"; {_requests(waiting, 'waiting')} for it to wake" if waiting else ""
    return f"the executor sleeps and its KV cache is gone{queue}; wake it with vLLM's POST /wake_up"


_ABANDONED: Final = (
    "a weight update was abandoned (its lease ran out, or it was cancelled): caches were reset and the scheduler stays "
    "paused because the weights may be half written; write them whole, then `kvctl scheduling resume`"
)


def paused(page: Counters, *, abandoned: bool, still_ns: int) -> str:
    """By kvctl, by vLLM, or for good."""
    if abandoned:
        return _ABANDONED
    queue = f", {_requests(page.waiting, 'waiting')}" if page.waiting > 0 else ""
    kind = "for new requests, running ones finish" if page.paused == 1 else "for all requests"
    return f"the scheduler is paused {kind}{queue}, last token {age(still_ns)} ago; `kvctl scheduling resume` ends it"


def paused_as_told(evidence: Evidence) -> str:
    """The same by the engine's answer, without a page to tell since when."""
    if evidence.scheduling == "abandoned_update":
        return _ABANDONED
    queue = f", {_requests(evidence.waiting, 'waiting')}" if evidence.waiting > 0 else ""
    kind = "for new requests, running ones finish" if evidence.paused == "new" else "for all requests"
    return f"the scheduler is paused {kind}{queue}; `kvctl scheduling resume` ends it"


# --- nothing to do -----------------------------------------------------------------------------------------------


def no_counts() -> str:
    """A backend without counts."""
    return "neither running nor waiting requests can be known here"


def idle(held: int) -> str:
    """No request."""
    return (
        f"no request is running or waiting; {count(held, 'block')} held" if held else "no request is running or waiting"
    )


def just_ended(quiet_ns: int) -> str:
    """The last request ended a moment ago."""
    return f"the last token was scheduled {age(quiet_ns)} ago and no request is left"


def waiting_for_clients(waiting: int) -> str:
    """Streaming-input sessions."""
    return f"{_requests(waiting, 'open')} and wait for their clients' next input; the engine has nothing to do"


def leaking(first: int, newest: int, over_ns: int, total: int) -> str:
    """Growing."""
    return (
        f"{newest} of {count(total, 'block')} are held although there is no request, up from {first} within "
        f"{age(over_ns)}: they are leaked (aborted remote loads do that); restart the engine before the pool is full"
    )


def held_by_nobody(blocks: int, for_ns: int) -> str:
    """Warning: not growing, not going."""
    return f"{count(blocks, 'block')} held by no request for {age(for_ns)}: a transfer still in flight, or a leak"


# --- moving ------------------------------------------------------------------------------------------------------


def _load(page: Counters) -> str:
    return f"{count(max(page.running, 0), 'request')} running, {max(page.waiting, 0)} waiting"


def flowing(page: Counters, tokens_per_second: float) -> str:
    """Healthy."""
    return f"{_load(page)} at {tokens_per_second:.0f} tokens/s" if tokens_per_second >= 0 else _load(page)


def long_step(page: Counters, still_ns: int) -> str:
    """A step that has not ended."""
    return f"{_load(page)}; one step has been running for {age(still_ns)}"


def first_step(phase_ns: int) -> str:
    """A step that began when the counts still said nothing."""
    return f"one step has been running for {age(phase_ns)}; what it runs is counted when it ends"


def arriving(demand: int, still_ns: int) -> str:
    """Not scheduled yet, no reason to worry."""
    return f"{_requests(demand, 'there')} since {age(still_ns)} and about to be scheduled"


def saturated(page: Counters, needed: int | None) -> str:
    """Full and healthy."""
    if needed is None:
        need = f"only {page.blocks_free} of {count(page.blocks_total, 'block')} are free"
    else:
        need = f"the head of the queue needs {count(needed, 'block')} and {page.blocks_free} are free"
    return f"{page.running} running, {page.waiting} waiting: {need}; it moves as requests finish"


def thrashing(preempted: int, outputs: float, seconds: float) -> str:
    """Preempt, admit, preempt."""
    return (
        f"{count(preempted, 'preemption')} and only {count(round(outputs), 'output')} in {seconds:.0f} s: requests are "
        "preempted and admitted again over and over; lower --max-num-seqs or give the KV cache more memory"
    )


def degraded(page: Counters, tokens_per_second: float, before: Bucket) -> str:
    """A fraction of before."""
    return (
        f"{tokens_per_second:.0f} tokens/s with {page.running} running and {page.waiting} waiting, "
        f"where the same demand got {before.tokens_per_second:.0f} tokens/s with {before.running} running before; "
        "look at what changed: request sizes, the connector, the device"
    )


# --- standing still ----------------------------------------------------------------------------------------------


def undecided(page: Counters, still_ns: int, stall_ns: int) -> str:
    """Between arriving and stalled."""
    return f"{_load(page)}, no token for {age(still_ns)}; {age(stall_ns)} without one is a stall"


def remote(evidence: Evidence, still_ns: int, *, stalled: bool) -> str:
    """Loads in flight."""
    loading = f"{_requests(evidence.waiting_remote_kv, 'loading')} KV from the remote tier and nothing else can run"
    if stalled:
        return f"{loading}; no load has ended for {age(still_ns)}: look at the KV connector and its store"
    return f"{loading}; last token {age(still_ns)} ago"


def deadlock(evidence: Evidence) -> str:
    """Seed 002."""
    holders, holding = evidence.holders, evidence.waiting_holding_blocks
    blocks = sum(holder.blocks_held for holder in holders)
    held = f" {count(blocks, 'block')}" if holders else " blocks"
    need = f"{evidence.blocks_free} are free"
    if evidence.head is not None and evidence.head.blocks_needed >= 0:
        need = f"the head needs {evidence.head.blocks_needed} and {need}"
    verb = "holds" if holding == 1 else "hold"
    return f"{count(holding, 'waiting request')} {verb}{held}, {need}: run `kvctl relieve`"


def cannot_fit(evidence: Evidence, head: HeadOfQueue) -> str:
    """More than the pool."""
    more = f" on top of the {head.blocks_held} it holds" if head.blocks_held > 0 else ""
    return (
        f"the head of the queue needs {count(head.blocks_needed, 'block')}{more} and the whole pool has "
        f"{evidence.blocks_total}: request {head.request_id} can never start; abort it, lower --max-model-len, or give "
        "the KV cache more memory"
    )


def held_by_transfers(evidence: Evidence, still_ns: int) -> str:
    """Not a leak yet."""
    held = max(evidence.blocks_total - evidence.blocks_free, 0)
    return (
        f"the head waits for blocks, and {count(held, 'block')} are held by no request for {age(still_ns)}: transfers"
    )


def leaked_full(evidence: Evidence) -> str:
    """The leak has filled the pool."""
    held = evidence.blocks_orphaned if evidence.blocks_orphaned >= 0 else evidence.blocks_total - evidence.blocks_free
    needed = evidence.head.blocks_needed if evidence.head is not None else 0
    return (
        f"{held} of {count(evidence.blocks_total, 'block')} are held by no request and the head of the queue needs "
        f"{needed} with {evidence.blocks_free} free: the blocks are leaked, nothing will free them; restart the engine"
    )


def standstill_unexplained(page: Counters, still_ns: int, last: Sample) -> str:
    """No evidence to explain it with."""
    usage = f", {page.blocks_free} of {count(page.blocks_total, 'block')} free" if page.blocks_total > 0 else ""
    why = (
        "only the engine bridge can see why"
        if page.phase < 0
        else ("the engine has not answered a question about the cause")
    )
    silence = f" for {age(last.at_ns - last.unanswered_since_ns)}" if last.unanswered_since_ns else ""
    return f"no token for {age(still_ns)} with {_load(page)}{usage}; {why}{silence}"


def running_stuck(evidence: Evidence, still_ns: int) -> str:
    """Running and not scheduled."""
    return (
        f"{_requests(evidence.running, 'running')} and none has been scheduled a token for {age(still_ns)} although "
        "the loop turns; look at the engine's log, restart it if it does not come back"
    )


def waiting_other(evidence: Evidence, still_ns: int) -> str:
    """Grammar."""
    status = f" (the head is {evidence.head.status})" if evidence.head is not None else ""
    return (
        f"all {count(evidence.waiting, 'waiting request')} wait for something other than blocks{status} since "
        f"{age(still_ns)}; abort the one at the head if it does not move"
    )


def fits_yet_waits(evidence: Evidence, still_ns: int) -> str:
    """vllm#45414."""
    head = evidence.head
    stuck = (
        f"{_requests(evidence.waiting, 'waiting')}, nothing runs, and nothing has been scheduled for {age(still_ns)}"
    )
    remedy = "abort the head, restart the engine if that does not help"
    free = f"{evidence.blocks_free} of {evidence.blocks_total} are free"
    if head is None or head.blocks_needed < 0:
        return f"{stuck}; {free} and what the head needs cannot be computed for this model: {remedy}"
    return (
        f"{stuck}, although the head {head.request_id} needs {count(head.blocks_needed, 'block')} and {free}: not a "
        f"shortage of blocks but a fault of the scheduler; {remedy}"
    )


# --- warnings ----------------------------------------------------------------------------------------------------


def woke_without_reset() -> str:
    """vllm#17103."""
    return "the engine woke up with an empty KV cache and kept the hashes of the lost one; run `kvctl reset`"


def parked(oldest_ns: int, evidence: Evidence) -> str:
    """LMCache#5047."""
    head = evidence.head
    which = f" ({head.request_id} at the head is {head.status})" if head is not None else ""
    return f"the oldest waiting request has waited {age(oldest_ns)}{which}"
