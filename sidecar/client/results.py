"""What operations gave back, per replica, engine and tier, as plain values.

Every result keeps the API's message it was made from (`message`), for whoever needs a field that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.client.errors import FleetFailed, KvctlError, error_for
from sidecar.coordinator.outcomes import DUPLICATE_TARGET, code_name, enum_word


@dataclass(frozen=True, slots=True)
class Tier:
    """One cache tier of one engine."""

    state: str
    """"done", "refused", "pending", "not_configured", "unsupported", "not_requested", "not_run", "failed",
    "unconfirmed"."""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """How one engine (data-parallel rank) ended, whatever was asked."""

    rank: int
    incarnation: str
    """Random id of the engine's process: another one means a cold cache."""
    code: str
    """Canonical gRPC code name, "OK" when it did all that was asked."""
    reason: str
    message: str
    replayed: bool
    """True when this was recorded earlier for the same request id and nothing ran now."""

    @property
    def ok(self) -> bool:
        """Whether it did all that was asked."""
        return self.code == "OK"


@dataclass(frozen=True, slots=True)
class EngineReorder(Engine):
    """What a reorder did in one engine."""

    blocks_moved: int
    contiguity_before: float
    """Share of neighbouring free blocks whose ids are adjacent, 0 to 1."""
    contiguity_after: float
    longest_pause_us: int
    """Longest uninterrupted hold of the engine thread, microseconds."""


@dataclass(frozen=True, slots=True)
class EngineReset(Engine):
    """What a reset did in one engine."""

    prefix_cache: Tier
    connector: Tier
    multimodal: Tier
    encoder: Tier
    cached_blocks_dropped: int
    """0 with a tier that is done: there was nothing to drop. -1, here and below: not known over HTTP."""
    requests_running: int
    requests_kept: int
    requests_preempted: int
    requests_quarantined: int
    event_published: bool
    longest_pause_us: int
    reorder: EngineReorder | None


@dataclass(frozen=True, slots=True)
class EngineRelief(Engine):
    """What a relief did in one engine."""

    request_ids: tuple[str, ...]
    """Requests whose blocks were given back; they are computed again."""
    blocks_freed: int


@dataclass(frozen=True, slots=True)
class EngineScheduling(Engine):
    """Whether one engine schedules."""

    state: str
    """"running", "paused", "abandoned_update"."""
    weight_version: str


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """How one replica ended."""

    name: str
    address: str
    outcome: str
    """"succeeded", "failed", "unreachable", "unknown", "skipped", "cancelled"."""
    code: str
    reason: str
    message: str
    attempts: int
    request_id: str
    """Id that the replica knows the operation by."""
    labels: Mapping[str, str]
    engines: tuple[Engine, ...]
    """Engines in the type of what was asked: EngineReset for a reset, and so on. Also on failure, when known."""

    @property
    def ok(self) -> bool:
        """Whether every engine did all that was asked."""
        return self.outcome == "succeeded"

    @property
    def error(self) -> KvctlError | None:
        """What went wrong; None when nothing did, or when this is another address of a replica that was called."""
        if self.ok or self.reason == DUPLICATE_TARGET:
            return None
        return error_for(self.code, self.reason, self.message, self.name)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """How an operation ended on every replica."""

    operation_id: str
    """Repeat the operation with it: what was done is not done again."""
    state: str
    """"succeeded", "failed", "partial", "cancelled"."""
    replicas: tuple[ReplicaResult, ...]
    incomplete: bool
    """True when there may be replicas that were not found; then it never counts as succeeded."""
    warnings: tuple[str, ...]
    message: fleet_pb2.FleetOperation = field(repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether every replica did all that was asked."""
        return self.state == "succeeded"

    @property
    def failures(self) -> tuple[KvctlError, ...]:
        """One error for each replica that did not succeed."""
        return tuple(error for replica in self.replicas if (error := replica.error) is not None)

    def raise_for_failures(self) -> FleetResult:
        """FleetFailed unless every replica succeeded and none may be missing; returns itself otherwise."""
        if self.ok:
            return self
        failures = self.failures
        text = "; ".join(str(error) for error in failures[:3]) + (
            f" and {len(failures) - 3} more" if failures[3:] else ""
        )
        if not failures:
            text = "; ".join(self.warnings) or "the set of replicas may be incomplete"
        total = sum(replica.reason != DUPLICATE_TARGET for replica in self.replicas)
        raise FleetFailed(f"{len(failures)} of {total} replicas did not succeed: {text}", failures)


# --- from the API's messages -------------------------------------------------------------------------------------


def fleet_result(operation: fleet_pb2.FleetOperation) -> FleetResult:
    """From the API's message."""
    state = enum_word(fleet_pb2.OperationState.DESCRIPTOR, operation.state, "OPERATION_STATE_")
    return FleetResult(
        operation.operation_id,
        state,
        tuple(replica_result(row) for row in operation.results),
        operation.targets_incomplete,
        tuple(operation.warnings),
        operation,
    )


def replica_result(row: fleet_pb2.TargetResult) -> ReplicaResult:
    """From the API's message."""
    return ReplicaResult(
        row.replica,
        row.address,
        enum_word(fleet_pb2.TargetOutcome.DESCRIPTOR, row.outcome, "TARGET_OUTCOME_"),
        row.code,
        row.reason,
        row.message,
        row.attempts,
        row.request_id,
        dict(row.labels),
        _engines(row),
    )


def _engines(row: fleet_pb2.TargetResult) -> tuple[Engine, ...]:
    match row.WhichOneof("result"):
        case "reset":
            return tuple(_reset(engine) for engine in row.reset.engines)
        case "reorder":
            return tuple(_reorder(engine) for engine in row.reorder.engines)
        case "relieve":
            return tuple(_relief(engine) for engine in row.relieve.engines)
        case "pause":
            return tuple(_scheduling(engine) for engine in row.pause.engines)
        case "resume":
            return tuple(_scheduling(engine) for engine in row.resume.engines)
    return ()


_Status = tuple[int, str, str, str, str, bool]


def _status(status: types_pb2.EngineStatus) -> _Status:
    engine = status.engine
    code = code_name(status.code)
    return engine.data_parallel_rank, engine.incarnation, code, status.reason, status.message, status.replayed


def _tier(tier: types_pb2.TierResult) -> Tier:
    state = enum_word(types_pb2.TierState.DESCRIPTOR, tier.state, "TIER_STATE_")
    return Tier(state, tier.reason, tier.message)


def _reset(engine: types_pb2.EngineReset) -> EngineReset:
    return EngineReset(
        *_status(engine.status),
        prefix_cache=_tier(engine.prefix_cache),
        connector=_tier(engine.connector),
        multimodal=_tier(engine.multimodal),
        encoder=_tier(engine.encoder),
        cached_blocks_dropped=engine.cached_blocks_dropped,
        requests_running=engine.requests_running,
        requests_kept=engine.requests_kept,
        requests_preempted=engine.requests_preempted,
        requests_quarantined=engine.requests_quarantined,
        event_published=engine.event_published,
        longest_pause_us=engine.pause.longest_us,
        reorder=_reorder(engine.reorder) if engine.HasField("reorder") else None,
    )


def _reorder(engine: types_pb2.EngineReorder) -> EngineReorder:
    return EngineReorder(
        *_status(engine.status),
        blocks_moved=engine.blocks_moved,
        contiguity_before=engine.before.ratio,
        contiguity_after=engine.after.ratio,
        longest_pause_us=engine.pause.longest_us,
    )


def _relief(engine: types_pb2.EngineRelief) -> EngineRelief:
    return EngineRelief(
        *_status(engine.status), request_ids=tuple(engine.request_ids), blocks_freed=engine.blocks_freed
    )


def _scheduling(engine: types_pb2.EngineScheduling) -> EngineScheduling:
    state = enum_word(types_pb2.SchedulingState.DESCRIPTOR, engine.state, "SCHEDULING_STATE_")
    return EngineScheduling(*_status(engine.status), state=state, weight_version=engine.weight_version)


# --- admission -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineAdmission:
    """One engine's verdict with the figures most asked for. Counts are -1 where its backend cannot know them."""

    rank: int
    verdict: str
    """"FLOWING", "SATURATED", "HELD_BLOCKS_DEADLOCK", ..."""
    stalled: bool
    explanation: str
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    weight_version: str
    message: types_pb2.EngineAdmission = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ReplicaAdmission:
    """One replica's admission."""

    name: str
    address: str
    code: str
    """"OK" when it answered."""
    error: str
    """Why there is no admission; empty when there is."""
    engines: tuple[EngineAdmission, ...]

    @property
    def stalled(self) -> bool:
        """Whether any engine is."""
        return any(engine.stalled for engine in self.engines)


def replica_admission(row: fleet_pb2.ReplicaAdmission) -> ReplicaAdmission:
    """From the API's message."""
    return ReplicaAdmission(row.replica, row.address, row.code, row.message, _admissions(row.admission))


def _admissions(answer: replica_pb2.AdmissionStatusResponse) -> tuple[EngineAdmission, ...]:
    return tuple(
        EngineAdmission(
            engine.engine.data_parallel_rank,
            enum_word(types_pb2.Verdict.DESCRIPTOR, engine.verdict, "VERDICT_").upper(),
            engine.stalled,
            engine.explanation,
            engine.requests.running,
            engine.requests.waiting,
            engine.blocks.total,
            engine.blocks.free,
            engine.weight_version,
            engine,
        )
        for engine in answer.engines
    )
