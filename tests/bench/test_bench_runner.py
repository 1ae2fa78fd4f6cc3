"""The benchmarks' own arithmetic, and the page that shows their figures."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.bench.__main__ import BENCHES, PAGE, ROOT
from tests.bench.bench_fanout import COLUMNS
from tests.bench.figures import Report, Table, as_markdown, as_text, number, report_from
from tests.bench.page import BLOCK, FANOUT_COLUMNS, rewrite
from tests.bench.pairs import percentile, take_turns


def test_a_machine_that_slows_down_steadily_leaves_ratios_alone() -> None:
    slowness = 0.0

    def measured(cost: float) -> float:
        nonlocal slowness
        slowness += 1
        return cost * (100 + slowness)

    turns = take_turns(lambda: measured(1), {"twice": lambda: measured(2)}, rounds=50)
    assert len(turns.baseline) == 51
    assert turns.ratio("twice").median == pytest.approx(2, rel=1e-9)
    assert 1 < turns.noise().median < 1.02


def test_turns_end_at_their_bound_with_a_baseline_on_both_sides_of_every_sample() -> None:
    turns = take_turns(lambda: 1.0, {"other": lambda: 1.0}, rounds=50, bound_s=0)
    assert (len(turns.baseline), len(turns.others["other"])) == (2, 1)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99)) == (50, 99, 3)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (7, "7"), (0.0, "0"), (1234.5, "1,234"), (12.34, "12.3"), (0.0004, "0.0004")]
)
def test_numbers_are_shown_with_three_digits(value: float | int | None, shown: str) -> None:
    assert number(value) == shown


def missed() -> Report:
    report = Report("start", [Table("Times", ("what", "ms"), [["a", 1.5]])], load=(0.5, 1.0))
    report.aim("fast enough", 9.0, 8.0, "ms", "the reason")
    report.aim("often enough", 9.0, 8.0, "times", "not told", least=True)
    return report


def test_a_missed_aim_is_told_as_short_with_its_reason_and_a_met_one_is_not() -> None:
    for shown in (as_text(missed()), as_markdown(missed())):
        assert "fast enough: 9.00 ms, SHORT: the reason" in shown
        assert "often enough: 9.00 times, met" in shown


def test_figures_survive_the_file_and_go_between_their_markers_only(tmp_path: Path) -> None:
    (tmp_path / "start.json").write_text(json.dumps(dataclasses.asdict(missed())))
    assert report_from(json.loads((tmp_path / "start.json").read_text())) == missed()
    page = "above\n<!-- figures: start -->\nold\n<!-- end -->\nbelow\n<!-- figures: pauses -->\nkept\n<!-- end -->\n"
    once = rewrite(page, tmp_path)
    assert once.startswith("above\n<!-- figures: start -->\n*Times*")
    assert "old" not in once
    assert once.endswith("<!-- end -->\nbelow\n<!-- figures: pauses -->\nkept\n<!-- end -->\n")
    assert rewrite(once, tmp_path) == once


def test_the_page_has_a_place_for_every_benchmark_and_every_benchmark_is_there() -> None:
    assert sorted(found[1] for found in BLOCK.finditer(PAGE.read_text())) == sorted([*BENCHES, "machine"])
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "tests" / "bench").glob("bench_*.py")}
    assert files == {*BENCHES}
    assert FANOUT_COLUMNS == COLUMNS


def test_every_plot_the_page_shows_exists() -> None:
    for name in re.findall(r"\]\((\S+\.svg)\)", PAGE.read_text()):
        assert (PAGE.parent / name).is_file(), name
