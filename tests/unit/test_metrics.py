"""What a scrape shows: read with Prometheus' own parser, from memory, bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine_bridge.page import FLAG_ABANDONED_UPDATE, Phase
from engine_bridge.protocol import Contiguity
from sidecar.backends.engine import Liveness, Unreachable
from sidecar.replica.history import SECOND, Verdict
from sidecar.replica.metrics import ReplicaMetrics
from sidecar.replica.sampler import Sampler
from tests.contract.engines_in_memory import MemoryEngine, MemoryEngines
from tests.unit.histories.tape import evidence

WALL = 1_790_000_000.0

EXPECTED = {
    "kvctl_admission_verdict": ("gauge", {"engine", "verdict"}),
    "kvctl_admission_stalled": ("gauge", {"engine"}),
    "kvctl_admission_stalled_seconds": ("gauge", {"engine"}),
    "kvctl_requests": ("gauge", {"engine", "state"}),
    "kvctl_oldest_waiting_seconds": ("gauge", {"engine"}),
    "kvctl_kv_blocks": ("gauge", {"engine", "state"}),
    "kvctl_free_queue_contiguity_ratio": ("gauge", {"engine"}),
    "kvctl_engine_steps": ("counter", {"engine"}),
    "kvctl_engine_step_age_seconds": ("gauge", {"engine"}),
    "kvctl_engine_phase_seconds": ("gauge", {"engine", "phase"}),
    "kvctl_engine_up": ("gauge", {"engine"}),
    "kvctl_abandoned_update": ("gauge", {"engine"}),
    "kvctl_preemptions": ("counter", {"engine"}),
    "kvctl_tokens_scheduled": ("counter", {"engine"}),
    "kvctl_operations": ("counter", {"operation", "mode", "code"}),
    "kvctl_operation_duration_seconds": ("histogram", {"operation", "le"}),
    "kvctl_engine_pause_seconds": ("histogram", {"operation", "le"}),
    "kvctl_last_reset_timestamp_seconds": ("gauge", {"engine", "mode"}),
    "kvctl_watchers": ("gauge", set()),
    "kvctl_build_info": ("gauge", {"version", "python"}),
}


class Replica:
    """Two engines, their sampler and their metrics."""

    def __init__(self) -> None:
        self.engines = MemoryEngines([MemoryEngine(0), MemoryEngine(1, "11" * 16)])
        self.engines.write(0, running=3, waiting=2, deferred=1, holding=1, blocks_free=40, moved=True)
        self.engines.write(1)
        self.sampler = Sampler(self.engines, self.engines.clock)
        self.metrics = ReplicaMetrics(self.sampler, "1.2.3", lambda: 4, lambda: WALL)
        self.metrics.operation("reset", "keep", "OK", 0.02)
        self.metrics.engine_pause("reset", 430)

    def text(self) -> str:
        return generate_latest(self.metrics.registry).decode()

    def values(self) -> dict[str, float]:
        """ "name{label=value,...}" -> value."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                key = f"{sample.name}{{{labels}}}"
                assert key not in found, f"two series named {key}"
                found[key] = sample.value
        return found


@pytest.fixture
async def replica() -> Iterator[Replica]:
    here = Replica()
    here.sampler.tick()
    return here


async def test_every_name_has_its_type_its_help_and_its_labels(replica: Replica):
    families = {family.name: family for family in text_string_to_metric_families(replica.text())}
    created = {name for name in families if name.endswith("_created")}
    assert set(families) - created == set(EXPECTED)
    for name, (kind, labels) in EXPECTED.items():
        family = families[name]
        assert family.type == kind, name
        assert len(family.documentation) > 10, name
        seen = {label for sample in family.samples for label in sample.labels}
        assert seen == labels, name


async def test_names_follow_the_conventions(replica: Replica):
    for family in text_string_to_metric_families(replica.text()):
        assert family.name.startswith("kvctl_")
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)
        for unit in ("_ms", "_us", "_milliseconds", "_percent", "_minutes"):
            assert not family.name.endswith(unit)


async def test_the_page_is_valid_openmetrics_too(replica: Replica):
    text = generate_openmetrics(replica.metrics.registry).decode()
    assert {family.name for family in parse_openmetrics(text)} == set(EXPECTED)


async def test_there_is_one_series_an_engine(replica: Replica):
    """vllm#21257: only the last engine's gauges exported."""
    values = replica.values()
    assert values["kvctl_requests{engine=0,state=running}"] == 3
    assert values["kvctl_requests{engine=1,state=running}"] == 0
    assert values["kvctl_kv_blocks{engine=0,state=held}"] == 120
    assert values["kvctl_kv_blocks{engine=1,state=held}"] == 0


async def test_exactly_one_verdict_holds_for_each_engine(replica: Replica):
    values = replica.values()
    for rank, verdict in ((0, "FLOWING"), (1, "IDLE")):
        held = {name: values[f"kvctl_admission_verdict{{engine={rank},verdict={name}}}"] for name in Verdict}
        assert [name for name, value in held.items() if value == 1] == [verdict]
        assert set(held.values()) == {0, 1}


async def test_a_dead_engine_is_dead_and_its_numbers_are_neither_zero_nor_absent(replica: Replica):
    engine = replica.engines.listed[0]
    engine.alive, engine.trouble = Liveness.DEAD, Unreachable("ENGINE_DEAD", "gone")
    replica.engines.forward(0.5)
    replica.sampler.tick()
    values = replica.values()
    assert values["kvctl_admission_verdict{engine=0,verdict=ENGINE_DEAD}"] == 1
    assert values["kvctl_admission_stalled{engine=0}"] == 1
    assert values["kvctl_engine_up{engine=0}"] == 0
    for name in ("kvctl_requests{engine=0,state=running}", "kvctl_kv_blocks{engine=0,state=free}"):
        assert math.isnan(values[name])
    assert math.isnan(values["kvctl_engine_steps_total{engine=0}"])


async def test_an_engine_that_cannot_be_read_is_unknown(replica: Replica):
    engine = replica.engines.listed[1]
    engine.torn = True
    replica.sampler.tick()
    values = replica.values()
    assert values["kvctl_admission_verdict{engine=1,verdict=UNKNOWN}"] == 1
    assert math.isnan(values["kvctl_requests{engine=1,state=waiting}"])


async def test_a_dead_engine_and_its_successor_make_one_series(replica: Replica):
    """Two series with equal labels would make Prometheus drop the whole scrape."""
    old = replica.engines.listed[0]
    old.alive, old.trouble = Liveness.DEAD, Unreachable("ENGINE_DEAD", "gone")
    replica.engines.listed.append(MemoryEngine(0, "33" * 16))
    replica.engines.write(2, running=7)
    replica.sampler.tick()
    assert replica.values()["kvctl_requests{engine=0,state=running}"] == 7


async def test_a_scrape_touches_no_engine(replica: Replica):
    """sglang#28157."""
    looks = [engine.looks for engine in replica.engines.listed]
    replica.engines.listed[0].hold = asyncio.Event()
    for _ in range(100):
        replica.text()
    assert [engine.looks for engine in replica.engines.listed] == looks
    assert all(engine.asked == [] for engine in replica.engines.listed)


async def test_labels_stay_bounded_whatever_callers_report(replica: Replica):
    for number in range(500):
        replica.metrics.operation(f"op-{number}", f"mode-{number}", f"CODE-{number}", 0.1)
        replica.metrics.engine_pause(f"op-{number}", 1)
    replica.metrics.operation("reset", "keep", "FAILED_PRECONDITION", 0.1)
    values = replica.values()
    assert values["kvctl_operations_total{code=other,mode=other,operation=other}"] == 500
    assert values["kvctl_operations_total{code=FAILED_PRECONDITION,mode=keep,operation=reset}"] == 1
    assert len(values) < 300


async def test_no_label_ever_holds_a_request_id_or_an_incarnation(replica: Replica):
    replica.engines.listed[0].told = evidence(monotonic_ns=replica.engines.now_ns, running=3, waiting=2)
    await replica.sampler.status()
    text = replica.text()
    for secret in ("cmpl-", "11" * 16, "00" * 16):
        assert secret not in text


async def test_the_age_of_the_oldest_request_is_told_only_when_it_is_known(replica: Replica):
    assert math.isnan(replica.values()["kvctl_oldest_waiting_seconds{engine=0}"])
    assert replica.values()["kvctl_oldest_waiting_seconds{engine=1}"] == 0
    told = evidence(monotonic_ns=replica.engines.now_ns, running=3, waiting=2, oldest_waiting_ns=600 * SECOND)
    replica.engines.listed[0].told = told
    await replica.sampler.status()
    replica.engines.forward(5)
    assert replica.values()["kvctl_oldest_waiting_seconds{engine=0}"] == pytest.approx(605)


async def test_the_contiguity_is_the_last_one_the_engine_told(replica: Replica):
    assert math.isnan(replica.values()["kvctl_free_queue_contiguity_ratio{engine=0}"])
    replica.engines.listed[0].told = evidence(monotonic_ns=replica.engines.now_ns, contiguity=Contiguity(101, 25, 76))
    await replica.sampler.status()
    assert replica.values()["kvctl_free_queue_contiguity_ratio{engine=0}"] == 0.25


async def test_the_last_reset_is_dated_under_its_mode(replica: Replica):
    replica.engines.write(0, last_reset_ns=replica.engines.now_ns, last_reset_mode=3)
    replica.engines.forward(10)
    replica.sampler.tick()
    values = replica.values()
    assert values["kvctl_last_reset_timestamp_seconds{engine=0,mode=keep}"] == pytest.approx(WALL - 10)
    assert math.isnan(values["kvctl_last_reset_timestamp_seconds{engine=0,mode=fail}"])
    assert math.isnan(values["kvctl_last_reset_timestamp_seconds{engine=1,mode=keep}"])


async def test_an_abandoned_weight_update_has_a_series_of_its_own(replica: Replica):
    replica.engines.write(0, paused=2, flags=FLAG_ABANDONED_UPDATE)
    replica.sampler.tick()
    values = replica.values()
    assert values["kvctl_abandoned_update{engine=0}"] == 1
    assert values["kvctl_abandoned_update{engine=1}"] == 0


async def test_times_and_pauses_are_in_seconds(replica: Replica):
    replica.engines.write(0, running=1, phase=Phase.STEP)
    replica.engines.forward(12)
    replica.sampler.tick()
    values = replica.values()
    assert values["kvctl_engine_phase_seconds{engine=0,phase=step}"] == pytest.approx(12)
    assert values["kvctl_engine_phase_seconds{engine=0,phase=idle}"] == 0
    assert values["kvctl_engine_step_age_seconds{engine=0}"] == pytest.approx(12)
    assert values["kvctl_engine_pause_seconds_sum{operation=reset}"] == pytest.approx(430e-6)
    assert values["kvctl_operation_duration_seconds_sum{operation=reset}"] == pytest.approx(0.02)


async def test_a_replica_without_engines_still_has_a_page():
    engines = MemoryEngines([])
    metrics = ReplicaMetrics(Sampler(engines, engines.clock), "1.2.3")
    text = generate_latest(metrics.registry).decode()
    assert 'kvctl_build_info{python="' in text
    assert "# TYPE kvctl_admission_verdict gauge" in text


async def test_two_replicas_in_one_process_keep_their_metrics_apart():
    one, other = Replica(), Replica()
    one.metrics.operation("reset", "keep", "OK", 0.1)
    assert one.values()["kvctl_operations_total{code=OK,mode=keep,operation=reset}"] == 2
    assert other.values()["kvctl_operations_total{code=OK,mode=keep,operation=reset}"] == 1
