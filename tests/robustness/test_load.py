"""Fleet operations at a steady rate lose nothing, and no process of ours grows by them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from sidecar.replica.operations import RECORDS
from tests.robustness.load import BOUND, REAL, REPLICAS, WARM_UP, Watched, as_markdown, hold, write
from tests.robustness.reliability_page import between

SECONDS = float(os.environ.get("KVCTL_LOAD_SECONDS", "60"))


@pytest.mark.timeout(BOUND * SECONDS + 600)
async def test_every_operation_reaches_every_replica_once_and_no_process_of_ours_grows(tmp_path: Path) -> None:
    held = await hold(tmp_path, SECONDS)
    write(held)
    assert held.failed == []
    assert held.operations == max(8, round(SECONDS * held.rate))
    assert held.effects == held.calls == (held.operations + WARM_UP) * REPLICAS + RECORDS * REAL
    assert {*held.processes} == {"coordinator", "sidecar 0", "sidecar 1", "engine 0", "engine 1"}
    for name, grown in held.processes.items():
        assert grown.rss_growth < 0.05, f"{name}: {grown}"
        assert grown.fds_after <= grown.fds_before + 2, f"{name}: {grown}"
    shown = as_markdown(json.loads(json.dumps(asdict(held))))
    assert f"{held.operations} operations over 64 replicas" in shown
    assert "| coordinator | " in shown


def test_growth_is_told_between_the_first_and_the_last_quarter() -> None:
    watched = Watched(os.getpid(), [10.0, 10.0, 99.0, 99.0, 99.0, 99.0, 12.0, 12.0], [5, 5, 9, 9, 9, 9, 7, 7])
    grown = watched.figures()
    assert (round(grown.rss_growth, 3), grown.fds_before, grown.fds_after) == (0.2, 5, 7)


def test_figures_go_between_their_marks_and_nowhere_else() -> None:
    page = "words\n<!-- load -->\nold\n<!-- end -->\nmore\n<!-- bugs -->\nkept\n<!-- end -->\n"
    once = between(page, "load", "new")
    assert once == "words\n<!-- load -->\nnew\n<!-- end -->\nmore\n<!-- bugs -->\nkept\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 blocks"):
        between(page, "other", "new")
