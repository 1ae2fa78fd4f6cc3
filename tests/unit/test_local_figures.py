"""The demo's claims: each must be able to fail, and say so."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from sidecar.local.figures import Answer, Figures, ModeFigures, Probe, Streams, judge
from sidecar.local.story import tell

STREAMS = Streams(8, 8, 8, 3200, 900, 20.0, [])


def answer(name: str, **changes: object) -> Answer:
    return replace(Answer(name, "OK", "", "", 4, 0, 0, 40, 90, 300), **changes)


def good() -> Figures:
    refused = {"code": "FAILED_PRECONDITION", "reason": "BLOCKS_HELD_BY_REQUESTS", "cached_blocks_dropped": 0}
    return Figures(
        replicas=2,
        streams=8,
        prefix_tokens=512,
        stream_tokens=400,
        usual_gap_ms=12,
        usual_longest_gap_ms=60,
        control_diverged=True,
        vllm_version="0.32.0",
        modes=[
            ModeFigures(
                "fail",
                "FAILED",
                9,
                [answer("r0", **refused), answer("r1", **refused)],
                STREAMS,
                0,
                0,
                [Probe("r0", 512, 512, 512), Probe("r1", 512, 512, 512)],
            ),
            ModeFigures(
                "preempt",
                "SUCCEEDED",
                9,
                [answer("r0", requests_preempted=4), answer("r1", requests_preempted=4)],
                replace(STREAMS, longest_gap_ms=900.0),
                8,
                2000,
                [],
            ),
            ModeFigures(
                "keep",
                "SUCCEEDED",
                9,
                [answer("r0", requests_kept=4), answer("r1", requests_kept=4)],
                STREAMS,
                0,
                0,
                [Probe("r0", 512, 0, 512), Probe("r1", 512, 0, 512)],
            ),
        ],
    )


def spoil(mode: str, **changes: object) -> Figures:
    figures = good()
    modes = [replace(m, **changes) if m.mode == mode else m for m in figures.modes]
    return replace(figures, modes=modes)


def failed(figures: Figures) -> list[str]:
    return [claim.text for claim in judge(figures) if not claim.held]


def test_every_claim_holds_for_figures_as_they_should_be():
    assert failed(good()) == []


@pytest.mark.parametrize(
    ("figures", "complaint"),
    [
        (replace(good(), control_diverged=False), "depend on their whole context"),
        (spoil("fail", answers=[answer("r0"), answer("r1")]), "FAIL is refused by every replica"),
        (spoil("fail", answers=good().of("fail").answers[:1]), "FAIL is refused by every replica"),
        (spoil("fail", probes=[Probe("r0", 512, 512, 512), Probe("r1", 512, 0, 512)]), "leaves the cache as it was"),
        (spoil("fail", streams=replace(STREAMS, identical=7)), "beside a FAIL reset"),
        (spoil("preempt", state="PARTIAL"), "PREEMPT resets every replica"),
        (spoil("preempt", preemptions=7), "PREEMPT restarts every running request"),
        (spoil("preempt", streams=replace(STREAMS, finished=7, identical=7, errors=["cut"])), "lost or answered"),
        (spoil("preempt", recomputed_tokens=0), "PREEMPT costs"),
        (spoil("keep", answers=[answer("r0", requests_kept=4)]), "KEEP resets every replica"),
        (spoil("keep", preemptions=1), "KEEP interrupts nobody"),
        (spoil("keep", recomputed_tokens=3), "KEEP interrupts nobody"),
        (spoil("keep", answers=[answer("r0", requests_kept=4), answer("r1", requests_kept=3)]), "interrupts nobody"),
        (spoil("keep", streams=replace(STREAMS, identical=7)), "beside a KEEP reset"),
        (spoil("keep", streams=replace(STREAMS, longest_gap_ms=800.0)), "no kept stream stands still"),
        (spoil("keep", probes=[Probe("r0", 512, 0, 512), Probe("r1", 512, 32, 512)]), "no cached prefix"),
        (spoil("keep", probes=[Probe("r0", 512, 0, 512), Probe("r1", 512, 0, 0)]), "no cached prefix"),
        (spoil("keep", probes=[Probe("r0", 512, 0, 512)]), "no cached prefix"),
    ],
)
def test_a_broken_promise_is_found_and_named(figures, complaint):
    assert any(complaint in text for text in failed(figures)), failed(figures)


def test_streams_that_never_ran_prove_nothing():
    nothing = Streams(0, 0, 0, 0, 0, 0.0, [])
    assert "KEEP interrupts nobody" in failed(spoil("keep", streams=nothing, answers=[answer("r0"), answer("r1")]))
    assert any("beside a KEEP" in text for text in failed(spoil("keep", streams=nothing)))


def test_the_summary_ends_with_what_did_not_hold():
    figures = spoil("keep", preemptions=2)
    text = "\n".join(tell(figures, judge(figures)))
    assert "did not hold: KEEP interrupts nobody" in text
    assert text.rstrip().endswith("1 of 13 claims did not hold.\x1b[0m")


def test_the_summary_fits_one_screen():
    lines = "\n".join(tell(good(), judge(good()))).split("\n")
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 140


def test_the_figures_survive_json():
    encoded = msgspec.json.encode(good())
    assert msgspec.json.decode(encoded, type=Figures) == good()
