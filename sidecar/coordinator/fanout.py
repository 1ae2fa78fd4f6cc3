"""One operation on many replicas: what kvctl, the coordinator and the operator call a fleet through.

`GrpcReplicas` is the `port.Replicas` of `execution`, over the pool of channels. `Run` is a whole operation in this
process: resolve the targets, execute, and give one FleetOperation in which every target has exactly one result.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.coordinator import calls, outcomes, resolution
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.execution import Execution
from sidecar.coordinator.outcomes import Failure
from sidecar.coordinator.port import Aim, Answer, Asked, Health
from sidecar.coordinator.resolution import CONNECT_TIMEOUT_S
from sidecar.coordinator.selectors import read_targets
from sidecar.coordinator.targets import Target

WITHDRAW_TIMEOUT_S: Final = 2.0

LEAST_CALL_S: Final = 0.1
"""With less time left than this a target that did not say its name is not called: its answer would come too late."""

_NAMES_SHOWN: Final = 3

POD_UID: Final = "pod-uid"
"""Label by which a sidecar tells the uid of its pod (deploy/kustomize/components/sidecar): the address of a pod that is
gone may be another one's.
"""

OnChange = Callable[[fleet_pb2.TargetResult], None]
"""Told a row whenever one changes."""


class GrpcReplicas:
    """Replicas reached through channels, for one operation.

    A target that was not asked who it is gets asked before its first call: another address of a replica that is
    called already must not be called, and what is no sidecar must be told apart from a sidecar that failed.
    """

    def __init__(
        self,
        channels: Channels,
        identities: Mapping[str, types_pb2.ReplicaInfo] | None = None,
        unnamed: Mapping[str, Failure] | None = None,
        named_in_s: float = 0.0,
    ) -> None:
        """`identities`: address -> who answered there, `unnamed`: address -> why nobody did, both from
        `resolution.resolve`, which took `named_in_s` seconds.
        """
        self._unnamed = dict(unnamed or {})
        self._named_in_s = named_in_s
        self._channels = channels
        self._identities = dict(identities or {})
        self._owners: dict[str, Aim] = {}
        self._under_way: dict[str, tuple[Aim, str]] = {}
        """Name -> who is being called and under which request id, for what can be withdrawn."""
        self._called: dict[str, str] = {}
        self._own_names: dict[str, str] = {}
        """Name that discovery gives -> what the replica there calls itself, where the two differ."""

    def spent_s(self, aims: Sequence[Aim]) -> dict[str, float]:
        """Name -> seconds of a target's time limit that went into asking in vain who it is."""
        return {aim.name: self._named_in_s for aim in aims if aim.address in self._unnamed}

    def claim(self, aim: Aim) -> None:
        """Say that this target was called before: its replica is not called under another name."""
        info = self._identities.get(aim.address)
        if info is not None:
            self._owner(aim, info)

    async def identify(self, aim: Aim, timeout_s: float) -> str | Answer:
        """What the replica's request ids are derived from, or why it is not called. Asked once an operation."""
        info = self._identities.get(aim.address)
        if info is None:
            waited_s = self._named_in_s if aim.address in self._unnamed else 0.0
            silent = self._unnamed.get(aim.address)
            if silent is not None and timeout_s < LEAST_CALL_S:
                return _not_called(silent, waited_s)
            started = time.monotonic()
            async with self._channels.lease(_target(aim)) as channel:
                limit = min(CONNECT_TIMEOUT_S, timeout_s)
                metadata = self._channels.metadata()
                found = await calls.get_replica(channel, aim.address, limit, metadata, waited_s, to_call_it=True)
            if isinstance(found, Failure):
                return _not_called(found, time.monotonic() - started + waited_s)
            self._identities[aim.address] = info = found
        told = info.labels.get(POD_UID, "")
        if aim.identity and told not in ("", aim.identity):
            why = f"not called: the sidecar of another pod (uid {told[:8]}) answers at {aim.address}"
            return Answer(resolution.skipped(aim.name, aim.address, outcomes.TARGET_NOT_READY, why))
        owner = self._owner(aim, info)
        if owner.name != aim.name:
            return Answer(resolution.duplicate(aim.name, aim.address, owner.name, owner.address))
        self._compare_names(aim, info)
        return _identity(aim, info)

    async def call(self, aim: Aim, spec: fleet_pb2.OperationSpec, request_id: str, timeout_s: float) -> Answer:
        """Run the operation on one replica, once."""
        started = time.monotonic()
        who = await self.identify(aim, timeout_s)
        if isinstance(who, Answer):
            return who
        left_s = max(timeout_s - (time.monotonic() - started), 0.001)
        if spec.WhichOneof("operation") != "pause":
            # A pause has begun at once, and to withdraw one that holds is to abandon it: reset, and left paused.
            self._under_way[aim.name] = (aim, request_id)
        self._called[aim.name] = request_id
        try:
            async with self._channels.lease(_target(aim)) as channel:
                return await calls.call_target(channel, spec, request_id, who, left_s, self._channels.metadata())
        finally:
            self._under_way.pop(aim.name, None)

    async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
        """What became of a request id."""
        async with self._channels.lease(_target(aim)) as channel:
            return await calls.ask_operation(channel, request_id, timeout_s, self._channels.metadata())

    async def health(self, aim: Aim, spec: fleet_pb2.OperationSpec, timeout_s: float) -> Health:
        """Whether admissions flow. A replica that this operation paused is healthy when it is paused."""
        async with self._channels.lease(_target(aim)) as channel:
            found = await calls.get_admission(channel, timeout_s, self._channels.metadata())
        if isinstance(found, Failure):
            return Health(False, outcomes.unreachable(found, aim.address, timeout_s).message)
        wanted = types_pb2.VERDICT_PAUSED if spec.WhichOneof("operation") == "pause" else None
        stalled = [engine for engine in found.engines if engine.stalled and engine.verdict != wanted]
        return Health(not stalled, "; ".join(_stall(engine, alone=len(found.engines) == 1) for engine in stalled))

    async def withdraw(self) -> int:
        """Take back every operation that is under way and has had no effect yet; how many were."""
        withdrawn = 0
        for aim, request_id in list(self._under_way.values()):
            async with self._channels.lease(_target(aim)) as channel:
                metadata = self._channels.metadata()
                withdrawn += await calls.cancel_operation(channel, request_id, WITHDRAW_TIMEOUT_S, metadata)
        return withdrawn

    def called_with(self, name: str) -> str:
        """Request id of the last call to a target; empty when it was not called."""
        return self._called.get(name, "")

    def other_names(self) -> tuple[str, ...]:
        """A warning when replicas call themselves otherwise than discovery does; nothing when none does."""
        found = [f"{name} calls itself {own}" for name, own in sorted(self._own_names.items())]
        if not found:
            return ()
        more = f" and {len(found) - _NAMES_SHOWN} more do so" if len(found) > _NAMES_SHOWN else ""
        what_to_do = "see that each address is the replica that is meant, or start its sidecar with the listed --name"
        return (f"{', '.join(found[:_NAMES_SHOWN])}{more}: {what_to_do}",)

    def _compare_names(self, aim: Aim, info: types_pb2.ReplicaInfo) -> None:
        """Names that several replicas share, and those of pods, are not the list of replicas that a person wrote."""
        shown = (info.name, f"{info.name}@{aim.address}", aim.address)
        if info.name and not aim.identity and aim.name not in shown:
            self._own_names[aim.name] = info.name

    def _owner(self, aim: Aim, info: types_pb2.ReplicaInfo) -> Aim:
        return self._owners.setdefault(info.instance_id, aim) if info.instance_id else aim


def _stall(engine: types_pb2.EngineAdmission, *, alone: bool) -> str:
    """HELD_BLOCKS_DEADLOCK for 12 s: what the replica says of it."""
    word = outcomes.enum_word(types_pb2.Verdict.DESCRIPTOR, engine.verdict, "VERDICT_").upper()
    where = "" if alone else f"engine {engine.engine.data_parallel_rank} "
    told = f"{where}{word} for {calls.seconds(engine.verdict_for):.0f} s"
    return f"{told}: {engine.explanation}" if engine.explanation else told


def _not_called(failure: Failure, took_s: float) -> Answer:
    row = outcomes.of_failure(failure, sent=False)
    row.took.FromTimedelta(timedelta(seconds=took_s))
    return Answer(row, failure.retry_after_s)


def _identity(aim: Aim, info: types_pb2.ReplicaInfo) -> str:
    return aim.identity or info.name or aim.name


def _target(aim: Aim) -> Target:
    return Target(aim.address, aim.name, aim.labels, server_name=aim.server_name)


class Run:
    """One operation on the replicas a discovery knows, in this process and without a record on disk."""

    def __init__(
        self,
        spec: fleet_pb2.OperationSpec,
        discovery: Discovery,
        channels: Channels,
        *,
        operation_id: str = "",
        on_change: OnChange | None = None,
    ) -> None:
        """ValueError when the id is no UUID or the spec names no operation."""
        kind = spec.WhichOneof("operation")
        if kind is None:
            raise ValueError("the operation spec names no operation; set one of " + ", ".join(calls.KINDS))
        self._discovery = discovery
        self._channels = channels
        self._on_change = on_change or (lambda _: None)
        self._execution: Execution | None = None
        self._replicas: GrpcReplicas | None = None
        self._rows: dict[str, fleet_pb2.TargetResult] = {}
        self._cancelled = False
        self._operation = fleet_pb2.FleetOperation(
            operation_id=_checked_id(operation_id),
            kind=calls.KINDS[kind],
            spec=spec,
            state=fleet_pb2.OPERATION_STATE_PENDING,
        )

    @property
    def operation_id(self) -> str:
        """The id, from which every target's request id is derived."""
        return self._operation.operation_id

    @property
    def targets(self) -> int:
        """Targets resolved so far, 0 before."""
        return len(self._rows)

    def snapshot(self) -> fleet_pb2.FleetOperation:
        """The operation as it stands, with a row for every target from the moment it is resolved."""
        rows = sorted(self._rows.values(), key=lambda row: (row.replica, row.address))
        del self._operation.results[:]
        self._operation.results.extend(rows)
        self._operation.counts.CopyFrom(outcomes.count(rows))
        return self._operation

    async def run(self) -> fleet_pb2.FleetOperation:
        """Run to the end. DiscoveryError, SelectorError or PolicyError when nothing could be started."""
        began = time.monotonic()
        operation, spec = self._operation, self._operation.spec
        operation.started_at.GetCurrentTime()
        selection = read_targets(spec.targets)
        discovered = await self._discovery.targets()
        counted = spec.rollout.strategy == fleet_pb2.ROLLOUT_STRATEGY_ROLLING or spec.rollout.max_failures > 0
        asked = time.monotonic()
        limit_s = calls.seconds(spec.timeout) or CONNECT_TIMEOUT_S
        resolved = await resolution.resolve(selection, discovered, self._channels, ask_all=counted, within_s=limit_s)
        named_in_s = time.monotonic() - asked
        operation.targets_incomplete = resolved.incomplete
        operation.warnings.extend(resolved.warnings)
        self._replicas = GrpcReplicas(self._channels, resolved.identities, resolved.failures, named_in_s)
        self._execution = Execution(
            operation.operation_id,
            spec,
            resolved.aims,
            self._replicas,
            on_change=self._row_changed,
            on_health=self._row_changed,
            spent_s=self._replicas.spent_s(resolved.aims),
            most_calls=self._channels.limit,
        )
        for row in resolved.apart:
            self._rows[row.replica + row.address] = row
        for aim in resolved.aims:
            row = fleet_pb2.TargetResult(replica=aim.name, address=aim.address, labels=dict(aim.labels))
            self._rows[aim.name + aim.address] = row
        operation.state = fleet_pb2.OPERATION_STATE_RUNNING
        if self._cancelled:
            self._execution.cancel()
        try:
            await self._execution.run()
        finally:
            operation.warnings.extend([*self._execution.warnings, *self._replicas.other_names()])
            operation.took.FromTimedelta(timedelta(seconds=time.monotonic() - began))
        self.snapshot()
        outcomes.conclude(operation)
        return operation

    async def cancel(self) -> None:
        """Start nothing more, and take back what has had no effect yet. `run` then ends by itself."""
        self._cancelled = True
        if self._execution is not None:
            self._execution.cancel()
        if self._replicas is not None:
            await self._replicas.withdraw()

    def leave(self) -> fleet_pb2.FleetOperation:
        """The operation as far as it is known, for a caller that stops waiting: what was under way is UNKNOWN."""
        for row in self._rows.values():
            request_id = self._replicas.called_with(row.replica) if self._replicas else ""
            running = row.outcome == fleet_pb2.TARGET_OUTCOME_RUNNING
            if running and request_id:
                row.outcome = fleet_pb2.TARGET_OUTCOME_UNKNOWN
                row.execution = types_pb2.EXECUTION_UNKNOWN
                row.code, row.reason = "CANCELLED", outcomes.OUTCOME_UNKNOWN
                row.request_id = request_id
                row.message = "left before its answer came; ask again with the same request id"
            elif running:
                row.outcome = fleet_pb2.TARGET_OUTCOME_CANCELLED
                row.execution = types_pb2.EXECUTION_NOT_EXECUTED
                row.code = row.reason = "CANCELLED"
                row.message = "left before it had said who it is; nothing was called"
            elif row.outcome == fleet_pb2.TARGET_OUTCOME_UNSPECIFIED:
                row.outcome = fleet_pb2.TARGET_OUTCOME_CANCELLED
                row.execution = types_pb2.EXECUTION_NOT_EXECUTED
                row.code = row.reason = "CANCELLED"
                row.message = "the operation was cancelled before this target's turn"
        operation = self.snapshot()
        outcomes.conclude(operation)
        return operation

    def _row_changed(self, row: fleet_pb2.TargetResult) -> None:
        self._rows[row.replica + row.address] = row
        if row.reason == outcomes.DUPLICATE_TARGET:
            self._operation.warnings.append(row.message)
        self._on_change(row)


def _checked_id(operation_id: str) -> str:
    if not operation_id:
        return str(uuid.uuid4())
    try:
        return str(uuid.UUID(operation_id))
    except ValueError:
        raise ValueError(f"request id {operation_id!r} is not a UUID; make one with `uuidgen`") from None
