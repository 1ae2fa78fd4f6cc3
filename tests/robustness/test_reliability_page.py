"""docs/reliability.md names tests that exist, and shows the seeded bugs as they are."""

from __future__ import annotations

import re

from tests.contract.sidecar_process import ROOT
from tests.robustness.reliability_page import PAGE, between, inference
from tests.robustness.seeded_bugs import as_markdown


def test_every_file_that_the_page_names_exists() -> None:
    named = {*re.findall(r"`([a-z0-9]+/[a-z_]+\.py)`", PAGE.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()] == []


def test_the_page_shows_the_seeded_bugs_as_they_are() -> None:
    assert f"<!-- seeded bugs -->\n{as_markdown()}\n<!-- end -->" in PAGE.read_text(), (
        "python -m tests.robustness.seeded_bugs --write-docs writes it"
    )


def test_what_streams_saw_is_shown_beside_what_they_saw_of_an_engine_left_alone() -> None:
    shown = inference(
        {
            "stretches": 5,
            "stretch_s": 8.0,
            "operations": {"keep": 11, "admission": 33},
            "ms_between_tokens_alone_p50_p99_longest": [10.0, 20.0, 30.0],
            "ms_between_tokens_busy_p50_p99_longest": [11.0, 25.0, 40.0],
            "busy_over_alone": "1.10 (1.05 to 1.15)",
            "alone_over_alone": "1.00 (0.97 to 1.04)",
            "load": [0.5, 2.5],
        }
    )
    assert "11 keep, 33 admission" in shown
    assert "| busy with operations | 11.0 | 25.0 | 40.0 |" in shown
    assert shown in between(PAGE.read_text(), "inference", shown)
