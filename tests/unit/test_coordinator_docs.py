"""The coordinator's page names everything there is to name."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.samples import Sample

from sidecar.coordinator import config, service
from sidecar.coordinator.metrics import CoordinatorMetrics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coordinator.md").read_text(encoding="utf-8")


def test_every_setting_is_on_the_page() -> None:
    missing = [name for name in config.PROGRAM.table if f"`{name}`" not in PAGE]
    assert not missing


def test_every_method_is_on_the_page() -> None:
    missing = [path for path in service.RULES if f"`{path.rpartition('/')[2]}`" not in PAGE]
    assert not missing


def test_every_metric_is_on_the_page_with_its_labels() -> None:
    described = list(CoordinatorMetrics().registry.collect())
    missing = [family.name for family in described if f"`{family.name}" not in PAGE]
    assert not missing
    labelled: list[Sample] = [sample for family in described for sample in family.samples if sample.labels]
    wrong = {
        sample.name
        for sample in labelled
        if not sample.name.endswith("_bucket") and f"{{{','.join(sample.labels)}}}`" not in PAGE
    }
    assert not wrong
