"""The cluster that tests of the operator share, and which tests drive a real Prometheus.

Prometheus is the one thing here that no Python package index has: `make test` runs those tests where the programs are
installed and says so where they are not; .ci/run installs them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from apiserver import serving as api_serving
from cluster import Cluster, pod
from fake_sidecar_server import FakeSidecar, serving

WHOLE_MODULES = {"test_alert_rules", "test_expressions", "test_alert_end_to_end", "test_reset_annotations"}
SINGLE_TESTS = {"test_prometheus_takes_the_example_scrape_configuration"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent != Path(__file__).parent:
            continue
        if Path(item.path).stem in WHOLE_MODULES or item.name.partition("[")[0] in SINGLE_TESTS:
            item.add_marker(pytest.mark.prometheus)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    fakes = [FakeSidecar(f"p{number}") for number in range(4)]
    async with serving(*fakes) as addresses, api_serving() as api:
        for fake, address in zip(fakes, addresses, strict=True):
            await api.put("pods", pod(fake.name, address))
        yield Cluster(api, fakes, addresses)
