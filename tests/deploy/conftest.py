"""Which of these tests drive a real Prometheus, the one thing here that no Python package index has.

`make test` runs them where the programs are installed and says so where they are not; .ci/run installs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

WHOLE_MODULES = {"test_alert_rules", "test_expressions", "test_alert_end_to_end"}
SINGLE_TESTS = {"test_prometheus_takes_the_example_scrape_configuration"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent != Path(__file__).parent:
            continue
        if Path(item.path).stem in WHOLE_MODULES or item.name.partition("[")[0] in SINGLE_TESTS:
            item.add_marker(pytest.mark.prometheus)
