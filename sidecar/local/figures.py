"""What the demo measured, and whether its claims hold: values in, verdicts out.

Every claim is a sentence that could turn out false, with the numbers it was judged by. The figures are what
`kvctl demo --json` writes.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Mode = Literal["fail", "preempt", "keep"]

MOST_KEEP_STALL_MS: Final = 250.0
"""Longest gap between two tokens that still counts as undisturbed beside a KEEP reset: scheduling noise of two busy
cores, far under the cost of computing a context again."""


class Answer(msgspec.Struct, frozen=True):
    """What one replica answered to a reset."""

    replica: str
    code: str
    reason: str
    message: str
    requests_running: int
    requests_kept: int
    requests_preempted: int
    blocks_held: int
    cached_blocks_dropped: int
    engine_pause_us: int


class Streams(msgspec.Struct, frozen=True):
    """Streams that were under way when an operation ran."""

    under_way: int
    finished: int
    identical: int
    """Token by token equal to an undisturbed run of the same prompt."""
    tokens: int
    """Tokens compared."""
    given_before: int
    """Tokens that clients had been given before the operation."""
    longest_gap_ms: float
    """Longest time between two tokens of one stream, from the operation's start to shortly after its end."""
    errors: list[str]


class Probe(msgspec.Struct, frozen=True):
    """Cached prompt tokens of three requests with the shared prefix: one before the operation and two after it."""

    replica: str
    before: int
    first_after: int
    second_after: int


class ModeFigures(msgspec.Struct, frozen=True):
    """One operation on the fleet, under load."""

    mode: Mode
    state: str
    """State of the fleet operation, e.g. "SUCCEEDED"."""
    took_ms: float
    answers: list[Answer]
    streams: Streams
    preemptions: int
    """Requests that the engines' own counters saw preempted."""
    recomputed_tokens: int
    """Tokens that engines computed beyond those they gave out: work done twice."""
    probes: list[Probe]


class Figures(msgspec.Struct, frozen=True):
    """Everything the demo measured."""

    replicas: int
    streams: int
    prefix_tokens: int
    """Tokens of the shared prefix."""
    stream_tokens: int
    usual_gap_ms: float
    """Median time between two tokens in the undisturbed run."""
    usual_longest_gap_ms: float
    """Longest time between two tokens in the undisturbed run."""
    control_diverged: bool
    """Whether changing one token at the start of a prompt changed the stream."""
    vllm_version: str
    modes: list[ModeFigures]

    def of(self, mode: Mode) -> ModeFigures:
        """The figures of a mode. KeyError when it was not run."""
        for figures in self.modes:
            if figures.mode == mode:
                return figures
        raise KeyError(mode)


class Claim(msgspec.Struct, frozen=True):
    """A promise, whether it was kept, and by what that was judged."""

    text: str
    held: bool
    found: str


def judge(figures: Figures) -> list[Claim]:
    """Every claim of the demo, in the order in which the story tells them."""
    return [
        Claim(
            "greedy streams depend on their whole context, so equal tokens prove an intact KV cache",
            figures.control_diverged,
            "changing the first of the prompt's tokens "
            + ("changed the stream" if figures.control_diverged else "changed nothing"),
        ),
        *_judge_fail(figures, figures.of("fail")),
        *_judge_preempt(figures, figures.of("preempt")),
        *_judge_keep(figures, figures.of("keep")),
    ]


def _judge_fail(all_figures: Figures, fail: ModeFigures) -> list[Claim]:
    refused = [
        a.code == "FAILED_PRECONDITION" and a.reason == "BLOCKS_HELD_BY_REQUESTS" and a.requests_running > 0
        for a in fail.answers
    ]
    cached = [probe.first_after for probe in fail.probes]
    return [
        Claim(
            "FAIL is refused by every replica, naming the running requests",
            len(refused) == all_figures.replicas and all(refused),
            "; ".join(f"{a.replica}: {a.code} {a.reason}, {a.requests_running} running" for a in fail.answers),
        ),
        _undisturbed("FAIL", all_figures, fail),
        Claim(
            "a refused reset leaves the cache as it was",
            len(cached) == all_figures.replicas and min(cached, default=0) >= all_figures.prefix_tokens,
            f"cached tokens of the next request: {_list(cached)}",
        ),
    ]


def _judge_preempt(all_figures: Figures, preempt: ModeFigures) -> list[Claim]:
    streams = preempt.streams
    said = sum(a.requests_preempted for a in preempt.answers)
    return [
        _succeeded("PREEMPT", all_figures, preempt),
        Claim(
            "PREEMPT restarts every running request, and says how many",
            said == preempt.preemptions == streams.under_way > 0,
            f"{said} restarted by its own account, {preempt.preemptions} by the engines' counters, "
            f"{streams.under_way} were streaming",
        ),
        Claim(
            "no restarted request is lost or answered differently",
            streams.finished == streams.identical == streams.under_way > 0,
            f"{streams.identical} of {streams.under_way} streams finished with the same tokens" + _errors(streams),
        ),
        Claim(
            "PREEMPT costs: contexts are computed again and streams stand still meanwhile",
            preempt.recomputed_tokens >= streams.given_before > 0,
            f"{preempt.recomputed_tokens} tokens computed twice ({streams.given_before} had been given out), "
            f"longest gap {streams.longest_gap_ms:.0f} ms",
        ),
    ]


def _judge_keep(all_figures: Figures, keep: ModeFigures) -> list[Claim]:
    streams = keep.streams
    kept = sum(a.requests_kept for a in keep.answers)
    preempted = all_figures.of("preempt").streams.longest_gap_ms
    return [
        _succeeded("KEEP", all_figures, keep),
        Claim(
            "KEEP interrupts nobody",
            keep.preemptions == 0 and kept == streams.under_way > 0 and keep.recomputed_tokens == 0,
            f"{keep.preemptions} preempted, {keep.recomputed_tokens} tokens computed twice, "
            f"{kept} of {streams.under_way} kept",
        ),
        _undisturbed("KEEP", all_figures, keep),
        Claim(
            "no kept stream stands still",
            streams.longest_gap_ms <= max(MOST_KEEP_STALL_MS, all_figures.usual_longest_gap_ms, preempted / 2),
            f"longest gap {streams.longest_gap_ms:.0f} ms, {all_figures.usual_longest_gap_ms:.0f} ms undisturbed, "
            f"{preempted:.0f} ms when preempted",
        ),
        _cold_then_warm(all_figures, keep),
    ]


def _succeeded(name: str, all_figures: Figures, mode: ModeFigures) -> Claim:
    codes = [answer.code for answer in mode.answers]
    dropped = sum(answer.cached_blocks_dropped for answer in mode.answers)
    return Claim(
        f"{name} resets every replica",
        mode.state == "SUCCEEDED" and codes == ["OK"] * all_figures.replicas and dropped > 0,
        f"{_list(codes)}, {dropped} cached blocks dropped",
    )


def _undisturbed(name: str, all_figures: Figures, mode: ModeFigures) -> Claim:
    streams = mode.streams
    return Claim(
        f"every stream beside a {name} reset has the tokens of an undisturbed run",
        streams.identical == streams.finished == streams.under_way == all_figures.streams,
        f"{streams.identical} of {streams.under_way} streams, {streams.tokens} tokens compared" + _errors(streams),
    )


def _cold_then_warm(all_figures: Figures, mode: ModeFigures) -> Claim:
    rows = mode.probes
    wanted = all_figures.prefix_tokens
    return Claim(
        "after KEEP the next request finds no cached prefix, and the one after it does",
        len(rows) == all_figures.replicas
        and all(p.before >= wanted and p.first_after == 0 and p.second_after >= wanted for p in rows),
        "; ".join(f"{p.replica}: {p.before} before, {p.first_after}, then {p.second_after} cached" for p in rows),
    )


def _errors(streams: Streams) -> str:
    return f" ({streams.errors[0]})" if streams.errors else ""


def _list(values: list[int] | list[str]) -> str:
    return ", ".join(str(value) for value in values) or "none"
