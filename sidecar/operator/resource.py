"""A CacheOperation as the operator reads it, and the fleet operation it stands for.

The API server has validated the spec (deploy/kustomize/base/cacheoperation-crd.yaml), with the same rules as the API's
own; a resource that slipped in under older rules, or that a newer definition allows and this operator cannot read,
still ends as Failed with one sentence, never as a crash loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.coordinator.discovery.kube_rows import Meta

GROUP: Final = "kvctl.dev"
VERSION: Final = "v1alpha1"
PLURAL: Final = "cacheoperations"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "CacheOperation"

Phase = Literal["Pending", "Running", "Suspended", "Succeeded", "Partial", "Failed", "Cancelled", "Skipped"]
FINAL: Final = frozenset({"Succeeded", "Partial", "Failed", "Cancelled", "Skipped"})

_RUNNING: Final = {
    "Fail": types_pb2.RUNNING_REQUESTS_FAIL,
    "Preempt": types_pb2.RUNNING_REQUESTS_PREEMPT,
    "Keep": types_pb2.RUNNING_REQUESTS_KEEP,
}
_PURPOSE: Final = {
    "": types_pb2.PURPOSE_UNSPECIFIED,
    "Benchmark": types_pb2.PURPOSE_BENCHMARK,
    "WeightUpdate": types_pb2.PURPOSE_WEIGHT_UPDATE,
}
_SCOPE: Final = {
    "Idle": types_pb2.REORDER_SCOPE_IDLE,
    "Uncached": types_pb2.REORDER_SCOPE_UNCACHED,
    "AllFree": types_pb2.REORDER_SCOPE_ALL_FREE,
}
_STRATEGY: Final = {
    "AllAtOnce": fleet_pb2.ROLLOUT_STRATEGY_ALL_AT_ONCE,
    "Rolling": fleet_pb2.ROLLOUT_STRATEGY_ROLLING,
}


class ResetSpec(msgspec.Struct, rename="camel"):
    """spec.reset."""

    running_requests: Literal["Fail", "Preempt", "Keep"] = "Fail"
    reset_connector: bool = False
    reset_mm_cache: bool = False
    reset_encoder_cache: bool = False
    reorder_free_queue: bool = False
    wait_for_idle: bool = False
    quarantine_running: bool = False
    purpose: Literal["", "Benchmark", "WeightUpdate"] = ""


class ReorderSpec(msgspec.Struct):
    """spec.reorder."""

    scope: Literal["Idle", "Uncached", "AllFree"] = "Idle"


class RelieveSpec(msgspec.Struct):
    """spec.relieve."""


class TargetsSpec(msgspec.Struct):
    """spec.targets."""

    all: bool = False
    names: list[str] | None = None
    selector: str = ""


class RolloutSpec(msgspec.Struct, rename="camel"):
    """spec.rollout."""

    strategy: Literal["AllAtOnce", "Rolling"] = "AllAtOnce"
    max_unavailable: int | str | None = None
    canary: int = 0
    min_healthy_seconds: int = 0
    max_failures: int = 0
    concurrency: int = 0


class Spec(msgspec.Struct, rename="camel"):
    """spec."""

    targets: TargetsSpec
    reset: ResetSpec | None = None
    reorder: ReorderSpec | None = None
    relieve: RelieveSpec | None = None
    rollout: RolloutSpec | None = None
    timeout_seconds: int = 30
    retry_refused: bool = False
    validate_only: bool = False
    concurrency_policy: Literal["Forbid", "Replace", "Allow"] = "Forbid"
    suspend: bool = False
    cancel: bool = False
    ttl_seconds_after_finished: int | None = None

    @property
    def step(self) -> str:
        """Which operation: "reset", "reorder" or "relieve"; ValueError when it is not exactly one."""
        given = [name for name in ("reset", "reorder", "relieve") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of reset, reorder, relieve must be set, found {given or 'none'}")
        return given[0]

    @property
    def shown_as(self) -> str:
        """For people: "Reset Keep"; empty when it names no operation that is known here."""
        if self.reset is not None:
            what = f"Reset {self.reset.running_requests}"
        elif self.reorder is not None:
            what = f"Reorder {self.reorder.scope}"
        elif self.relieve is not None:
            what = "Relieve"
        else:
            return ""
        return f"{what} (checked only)" if self.validate_only else what


class Entry(msgspec.Struct, rename="camel", omit_defaults=True):
    """One target in status.ledger: what a resume needs."""

    uid: str = ""
    address: str = ""
    wave: int = 0
    request_id: str = ""
    """Set before the first call."""
    outcome: str = ""
    """Set when it has ended, e.g. "Succeeded"."""
    code: str = ""
    reason: str = ""
    unhealthy: str = ""


class Row(msgspec.Struct, rename="camel", omit_defaults=True):
    """One target in status.results: what a person reads."""

    replica: str
    outcome: str
    pod_uid: str = msgspec.field(default="", name="podUID")
    address: str = ""
    code: str = ""
    reason: str = ""
    message: str = ""
    attempts: int = 0
    wave: int = 0
    request_id: str = ""
    cached_blocks_dropped: int | None = None


class Condition(msgspec.Struct, rename="camel"):
    """One of status.conditions."""

    type: str
    status: str
    last_transition_time: str = ""


class Status(msgspec.Struct, rename="camel"):
    """What of the status is read back."""

    phase: str = ""
    message: str = ""
    observed_generation: int = 0
    operation_id: str = ""
    start_time: str = ""
    completion_time: str = ""
    targets_incomplete: bool = False
    warnings: list[str] | None = None
    results: list[Row] | None = None
    conditions: list[Condition] | None = None
    ledger: dict[str, Entry] | None = None


class Resource(msgspec.Struct):
    """One CacheOperation."""

    metadata: Meta
    spec: Spec
    status: Status = msgspec.field(default_factory=Status)

    @property
    def finished(self) -> bool:
        """Whether it has ended for good."""
        return self.status.phase in FINAL

    @property
    def key(self) -> str:
        """namespace/name, for logs."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


class Unreadable(Resource):
    """One whose spec has a field that cannot be used here; `spec` is empty."""

    why: str = ""
    """Which field, and what was expected there."""


class _WithoutSpec(msgspec.Struct):
    metadata: Meta
    status: Status = msgspec.field(default_factory=Status)


def read(body: Mapping[str, object]) -> Resource:
    """A resource from its JSON, Unreadable when its spec cannot be used. ValueError says which other field it is."""
    try:
        return msgspec.convert(dict(body), type=Resource)
    except msgspec.ValidationError as error:
        why = f"this operator cannot read it: {error}"
    try:
        rest = msgspec.convert(dict(body), type=_WithoutSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"the resource cannot be read: {error}") from error
    return Unreadable(rest.metadata, Spec(TargetsSpec()), rest.status, why)


def operation_id(uid: str, step: str) -> str:
    """The fleet operation's id: the same resource and step always give the same. Request ids derive from it and each
    pod's uid, so that whoever runs it next, after a crash or as the next leader, asks for the very same ids.
    """
    try:
        space = uuid.UUID(uid)
    except ValueError:
        space = uuid.uuid5(uuid.NAMESPACE_OID, uid)
    return str(uuid.uuid5(space, step))


def operation_spec(spec: Spec) -> fleet_pb2.OperationSpec:
    """What the coordinator is asked to do. ValueError when it is not exactly one operation."""
    asked = fleet_pb2.OperationSpec(wait=spec.retry_refused, validate_only=spec.validate_only)
    asked.timeout.seconds = spec.timeout_seconds
    asked.targets.CopyFrom(
        fleet_pb2.Targets(all=spec.targets.all, names=spec.targets.names or [], selector=spec.targets.selector)
    )
    match spec.step:
        case "reset" if spec.reset is not None:
            asked.reset.CopyFrom(_reset(spec.reset))
        case "reorder" if spec.reorder is not None:
            asked.reorder.scope = _SCOPE[spec.reorder.scope]
        case _:
            asked.relieve.SetInParent()
    if spec.rollout is not None:
        asked.rollout.CopyFrom(_rollout(spec.rollout))
    return asked


def _reset(spec: ResetSpec) -> replica_pb2.ResetPrefixCacheRequest:
    return replica_pb2.ResetPrefixCacheRequest(
        running_requests=_RUNNING[spec.running_requests],
        reset_connector=spec.reset_connector,
        reset_mm_cache=spec.reset_mm_cache,
        reset_encoder_cache=spec.reset_encoder_cache,
        reorder_free_queue=spec.reorder_free_queue,
        wait_for_idle=spec.wait_for_idle,
        purpose=_PURPOSE[spec.purpose],
        quarantine_running=spec.quarantine_running,
    )


def _rollout(spec: RolloutSpec) -> fleet_pb2.Rollout:
    rollout = fleet_pb2.Rollout(
        strategy=_STRATEGY[spec.strategy],
        max_unavailable="" if spec.max_unavailable is None else str(spec.max_unavailable),
        canary=spec.canary,
        max_failures=spec.max_failures,
        concurrency=spec.concurrency,
    )
    if spec.min_healthy_seconds:
        rollout.min_healthy_time.seconds = spec.min_healthy_seconds
    return rollout
