"""docs/reliability.md names tests that exist, and shows the seeded bugs as they are."""

from __future__ import annotations

import re

from tests.contract.sidecar_process import ROOT
from tests.robustness.reliability_page import PAGE
from tests.robustness.seeded_bugs import as_markdown


def test_every_file_that_the_page_names_exists() -> None:
    named = {*re.findall(r"`([a-z0-9]+/[a-z_]+\.py)`", PAGE.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()] == []


def test_the_page_shows_the_seeded_bugs_as_they_are() -> None:
    assert f"<!-- seeded bugs -->\n{as_markdown()}\n<!-- end -->" in PAGE.read_text(), (
        "python -m tests.robustness.seeded_bugs --write-docs writes it"
    )
