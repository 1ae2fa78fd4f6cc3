"""A reset is one mark at its own time on every dashboard, however long the range: a real Prometheus, and what Grafana
does with its answer.
"""

from __future__ import annotations

import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from monitoring import Prometheus, get_json, prometheus
from programs import program

from deploy.observability.dashboards import DASHBOARDS
from deploy.observability.generate import DEPLOY
from deploy.observability.panels import Dashboard, render

HOUR = 3600
SCRAPE = 60
SERIES = 'kvctl_last_reset_timestamp_seconds{namespace="llm",pod="vllm-0",engine="0",mode="keep"}'
LABELS = {"namespace": "llm", "pod": "vllm-0"}
RESETS_AGO = [50 * HOUR, 20 * HOUR + 7, 3 * HOUR, HOUR // 2]
"""Seconds before the end. The first: a step of 15 s makes more points over it than the 11,000 that Prometheus gives."""


@pytest.fixture(scope="module")
def end() -> float:
    return float(int(time.time()) // SCRAPE * SCRAPE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, end: float) -> Iterator[Prometheus]:
    """With 60 hours of scrapes."""
    folder = tmp_path_factory.mktemp("annotations")
    lines = ["# TYPE kvctl_last_reset_timestamp_seconds gauge"]
    for number, at in enumerate(range(int(end) - 60 * HOUR, int(end) + 1, SCRAPE)):
        done = [end - ago for ago in RESETS_AGO if end - ago <= at]
        jitter = number % 3 * 1e-6  # the gauge is computed from a monotonic age at each scrape
        lines.append(f"{SERIES} {max(done) + jitter if done else 'NaN'} {at}")
    text = folder / "scrapes.om"
    text.write_text("\n".join([*lines, "# EOF", ""]))
    words = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "data")]
    made = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    with prometheus(folder, {}, DEPLOY / "observability/prometheus/kvctl.rules.yaml") as running:
        yield running


def annotation(dashboard: Dashboard) -> dict[str, Any]:
    node: Any = render(dashboard)
    (found,) = node["annotations"]["list"]
    return dict(found)


def marks(server: Prometheus, node: dict[str, Any], start: float, end: float) -> list[float]:
    """Times (s) at which Grafana draws a mark.

    As its Prometheus data source does it: about a hundred points, none closer together than the annotation's step;
    a value above 0 is a mark, at its time or, with useValueForTime, at the value; marks within a step are one.
    """
    least = float(node["step"].removesuffix("s"))
    step = max(least, (end - start) / 100)
    expression = node["expr"].replace("$namespace", ".*").replace("$pod", ".*")
    expression = expression.replace("$__from", f"{start * 1000:.0f}")
    asked = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step})
    found: list[float] = []
    last = float("-inf")
    for series in get_json(f"{server.url}/api/v1/query_range?{asked}")["data"]["result"]:
        assert LABELS.items() <= series["metric"].items(), "the title names them"
        for at, value in series["values"]:
            if float(value) <= 0:
                continue
            when = int(float(value)) / 1000 if node.get("useValueForTime") else at
            if when > last + least:
                found.append(when)
            last = when
    return found


@pytest.mark.parametrize("hours", [0.25, 1, 6, 24, 60])
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_every_reset_of_the_range_is_one_mark_at_its_time(
    server: Prometheus, end: float, dashboard: Dashboard, hours: float
) -> None:
    start = end - hours * HOUR
    seen = marks(server, annotation(dashboard), start, end)
    assert seen == pytest.approx([end - ago for ago in RESETS_AGO if end - ago >= start], abs=0.002)
