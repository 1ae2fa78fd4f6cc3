"""What Prometheus sees of a coordinator. A scrape reads memory: no replica is called and no disk is read for it.

Every series of `kvctl_coordinator_replica_results_total` exists from the start: an increase from nothing to one is not
seen by `rate`, and an alert on the first failure would not fire. Labels are names of enums, never request ids.
"""

from __future__ import annotations

import platform
from typing import Final

from kvctl.v1 import fleet_pb2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import engine_bridge
from sidecar.coordinator.calls import KINDS

RESULTS: Final = {
    fleet_pb2.TARGET_OUTCOME_SUCCEEDED: "succeeded",
    fleet_pb2.TARGET_OUTCOME_FAILED: "failed",
    fleet_pb2.TARGET_OUTCOME_UNREACHABLE: "unreachable",
    fleet_pb2.TARGET_OUTCOME_UNKNOWN: "unknown",
    fleet_pb2.TARGET_OUTCOME_SKIPPED: "skipped",
    fleet_pb2.TARGET_OUTCOME_CANCELLED: "cancelled",
}
REPLICA_STATES: Final = ("ready", "not_ready", "unreachable", "duplicate")
_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class CoordinatorMetrics:
    """The metrics of one coordinator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.replicas = Gauge(
            "kvctl_coordinator_replicas",
            "Replicas by state at the last look",
            ["state"],
            registry=self.registry,
        )
        self.results = Counter(
            "kvctl_coordinator_replica_results_total",
            "Results of fleet operations at single replicas",
            ["operation", "result"],
            registry=self.registry,
        )
        self.unknown = Gauge(
            "kvctl_coordinator_operations_unknown",
            "Operations on record with a replica whose outcome is not known yet",
            registry=self.registry,
        )
        self.operations = Counter(
            "kvctl_coordinator_operations_total",
            "Fleet operations that have ended",
            ["operation", "state"],
            registry=self.registry,
        )
        self.active = Gauge("kvctl_coordinator_operations_active", "Fleet operations under way", registry=self.registry)
        self.duration = Histogram(
            "kvctl_coordinator_operation_duration_seconds",
            "Time a fleet operation took",
            ["operation"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.retries = Counter(
            "kvctl_coordinator_retries_total",
            "Calls to replicas beyond the first of an operation",
            registry=self.registry,
        )
        self.store_failed = Gauge(
            "kvctl_coordinator_store_failed",
            "1 while the operation store cannot be written",
            registry=self.registry,
        )
        self.incomplete = Gauge(
            "kvctl_coordinator_discovery_incomplete",
            "1 while discovery may have missed replicas",
            registry=self.registry,
        )
        build = Gauge("kvctl_build_info", "Versions, always 1", ["version", "python"], registry=self.registry)
        build.labels(engine_bridge.__version__, platform.python_version()).set(1)
        for kind in KINDS:
            for result in RESULTS.values():
                self.results.labels(kind, result)
        for state in REPLICA_STATES:
            self.replicas.labels(state)

    def target_ended(self, operation: fleet_pb2.FleetOperation, row: fleet_pb2.TargetResult) -> None:
        """One target has its final result."""
        self.results.labels(str(operation.spec.WhichOneof("operation")), RESULTS[row.outcome]).inc()

    def operation_ended(self, operation: fleet_pb2.FleetOperation) -> None:
        """One operation has ended."""
        kind = str(operation.spec.WhichOneof("operation"))
        state = fleet_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower()
        self.operations.labels(kind, state).inc()
        self.duration.labels(kind).observe(operation.took.seconds + operation.took.nanos / 1e9)

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        return generate_latest(self.registry)
