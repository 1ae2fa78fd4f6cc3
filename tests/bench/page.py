"""docs/benchmarks.md: words by people, figures by machines, told apart by markers.

Between `<!-- figures: NAME -->` and `<!-- end -->` is what NAME.json says; a block without such a file stays as it is.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.bench.figures import Report, Table, as_markdown, report_from

BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
FANOUT_COLUMNS = (
    "caller",
    "state",
    "replicas",
    "ok",
    "wall_ms",
    "p50_ms",
    "p99_ms",
    "skew_ms",
    "cpu_ms_per_call",
    "rss_mb",
)


def rewrite(page: str, folder: Path) -> str:
    """The page with the figures that the folder has."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        written = folder / f"{name}.json"
        if not written.exists():
            return found[0]
        return f"<!-- figures: {name} -->\n{markdown(name, json.loads(written.read_text()))}\n<!-- end -->"

    return BLOCK.sub(block, page)


def markdown(name: str, stored: dict[str, Any]) -> str:
    if name == "machine":
        return f"{stored['machine']}. Taken on {stored['taken']}."
    return as_markdown(fan_out(stored) if name == "fanout" else report_from(stored)).strip()


def fan_out(stored: dict[str, Any]) -> Report:
    """The report of bench_fanout, which has a form of its own."""
    table = Table("One KEEP reset of every replica", FANOUT_COLUMNS)
    table.rows = [[row[column] for column in FANOUT_COLUMNS] for row in stored["rows"]]
    return Report("fanout", [table], notes=[f"{note}." for note in stored["notes"]])
