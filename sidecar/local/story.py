"""The demo's summary: one screen, for somebody who has not read anything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from sidecar.local.figures import Claim, Figures, ModeFigures


def tell(figures: Figures, claims: Sequence[Claim]) -> list[str]:
    """The lines of the summary, styled for a terminal (click drops the style elsewhere)."""
    return [
        "",
        f"{figures.replicas} replicas of vLLM {figures.vllm_version}, {figures.streams} requests streaming "
        f"{figures.stream_tokens} tokens each, a prefix of {figures.prefix_tokens} tokens shared by all.",
        f"Undisturbed, a token comes every {figures.usual_gap_ms:.0f} ms "
        f"(longest gap {figures.usual_longest_gap_ms:.0f} ms).",
        *_fail(figures.of("fail")),
        *_preempt(figures.of("preempt")),
        *_keep(figures.of("keep")),
        "",
        *_verdict(claims),
    ]


def _fail(mode: ModeFigures) -> Iterator[str]:
    yield from _title("FAIL", "refuse while anybody would notice", "kvctl reset --mode fail")
    for answer in mode.answers:
        yield (
            f"    {answer.replica}: {answer.code} {answer.reason}: "
            f"{answer.requests_running} running requests hold {answer.blocks_held} blocks"
        )
    cached = min((probe.first_after for probe in mode.probes), default=0)
    yield f"    {_same(mode)}; the next request still found {cached} cached tokens"


def _preempt(mode: ModeFigures) -> Iterator[str]:
    yield from _title("PREEMPT", "restart whoever runs", "kvctl reset --mode preempt")
    yield f"    {mode.preemptions} requests restarted, {_dropped(mode)} cached blocks dropped"
    yield (
        f"    the price: {mode.recomputed_tokens:,} tokens computed twice, "
        f"streams stood still for up to {mode.streams.longest_gap_ms:.0f} ms"
    )
    yield f"    {_same(mode)}"


def _keep(mode: ModeFigures) -> Iterator[str]:
    yield from _title("KEEP", "forget everything, interrupt nobody", "kvctl reset --mode keep")
    pause = max((answer.engine_pause_us for answer in mode.answers), default=0)
    yield (
        f"    {mode.preemptions} requests interrupted, {_dropped(mode)} cached blocks dropped, "
        f"{mode.recomputed_tokens} tokens computed twice"
    )
    yield f"    engines paused for {pause / 1000:.2f} ms, longest gap in a stream {mode.streams.longest_gap_ms:.0f} ms"
    yield f"    {_same(mode)}"
    before = min((probe.before for probe in mode.probes), default=0)
    first = max((probe.first_after for probe in mode.probes), default=0)
    second = min((probe.second_after for probe in mode.probes), default=0)
    yield f"    cached tokens of requests with that prefix: {before} before, {first} right after, then {second} again"


def _title(name: str, meaning: str, command: str) -> Iterator[str]:
    yield ""
    yield f"  {click.style(name, bold=True)}  {meaning}  {click.style('$ ' + command, dim=True)}"


def _same(mode: ModeFigures) -> str:
    streams = mode.streams
    return (
        f"{streams.identical} of {streams.under_way} streams went on to the same "
        f"{streams.tokens:,} tokens as undisturbed"
    )


def _dropped(mode: ModeFigures) -> int:
    return sum(answer.cached_blocks_dropped for answer in mode.answers)


def _verdict(claims: Sequence[Claim]) -> Iterator[str]:
    failed = [claim for claim in claims if not claim.held]
    for claim in failed:
        yield click.style(f"  did not hold: {claim.text}", fg="red") + f"\n                {claim.found}"
    if failed:
        yield click.style(f"{len(failed)} of {len(claims)} claims did not hold.", fg="red", bold=True)
    else:
        yield click.style(f"All {len(claims)} claims held.", fg="green", bold=True)
