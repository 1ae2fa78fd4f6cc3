"""A recorded fleet for a file of tests, whole and under load when each of them begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.robustness.recorded_fleet import RecordedFleet, recorded_fleet


@pytest.fixture(scope="module")
def fleet_of_module() -> Iterator[RecordedFleet]:
    with recorded_fleet() as fleet:
        yield fleet


@pytest.fixture
def loaded_fleet(fleet_of_module: RecordedFleet) -> RecordedFleet:
    """Two replicas; a history has begun, and its load has reached its floor."""
    fleet_of_module.mend()
    fleet_of_module.new_run(floor=2)
    fleet_of_module.load(2)
    return fleet_of_module
