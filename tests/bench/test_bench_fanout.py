"""The fan-out benchmark runs, and every replica in it was changed exactly once an operation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.bench.bench_fanout import COLUMNS, ROOT, environment


def test_the_fan_out_benchmark_runs_and_counts_one_effect_a_replica(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_fanout", "--sizes", "9", "--json", str(report)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(each["caller"], each["state"]) for each in rows] == [
        ("direct", "cold"),
        ("direct", "warm"),
        ("coordinator", "cold"),
        ("coordinator", "warm"),
    ]
    assert all(each["ok"] == each["effects"] == each["replicas"] == 9 for each in rows)
    assert all(each["wall_ms"] > each["skew_ms"] >= 0 for each in rows)
    assert ended.stdout.split()[: len(COLUMNS)] == list(COLUMNS)
