"""Reading a fleet: admission and identity of every replica, at once and as a stream.

A replica that cannot be read is a row that says why; the others do not wait for it longer than its time limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import grpc.aio
from kvctl.v1 import fleet_pb2, replica_pb2, replica_pb2_grpc

from sidecar.coordinator import calls, outcomes
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.outcomes import Failure
from sidecar.coordinator.port import Aim
from sidecar.coordinator.resolution import Resolved
from sidecar.coordinator.targets import Target

READ_TIMEOUT_S: Final = 5.0
READ_CONCURRENCY: Final = 64
_RECONNECT_S: Final = 2.0


async def read_admission(
    resolved: Resolved, channels: Channels, timeout_s: float = READ_TIMEOUT_S
) -> fleet_pb2.FleetAdmissionResponse:
    """Admission of every resolved replica, by name."""
    gate = asyncio.Semaphore(READ_CONCURRENCY)

    async def one(aim: Aim) -> fleet_pb2.ReplicaAdmission:
        async with gate, channels.lease(_target(aim)) as channel:
            found = await calls.get_admission(channel, timeout_s, channels.metadata())
        return _row(aim, found, timeout_s)

    rows, repeats = _merged(await asyncio.gather(*(one(aim) for aim in resolved.aims)))
    rows += [
        fleet_pb2.ReplicaAdmission(
            replica=row.replica, address=row.address, code="UNAVAILABLE", reason=row.reason, message=row.message
        )
        for row in resolved.apart
        if row.reason != outcomes.DUPLICATE_TARGET
    ]
    return fleet_pb2.FleetAdmissionResponse(
        replicas=sorted(rows, key=lambda row: (row.replica, row.address)),
        stalled=any(row.admission.stalled for row in rows),
        incomplete=resolved.incomplete,
        warnings=[*resolved.warnings, *repeats],
    )


def _merged(rows: Sequence[fleet_pb2.ReplicaAdmission]) -> tuple[list[fleet_pb2.ReplicaAdmission], list[str]]:
    """Rows without those of a further address of one replica, and a warning for each of these. Replicas are told apart
    by the incarnations of their engines, which come with admission anyway: nobody is asked who it is.
    """
    kept: dict[tuple[tuple[str, int], ...], fleet_pb2.ReplicaAdmission] = {}
    unknown: list[fleet_pb2.ReplicaAdmission] = []
    warnings: list[str] = []
    for row in rows:
        found = [engine.engine for engine in row.admission.engines]
        engines = tuple(sorted((engine.incarnation, engine.data_parallel_rank) for engine in found))
        if not engines or not all(engine.incarnation for engine in found):
            unknown.append(row)
            continue
        first = kept.setdefault(engines, row)
        if first is not row:
            warnings.append(f"{row.address} and {first.address} are one replica; it is shown once, as {first.replica}")
    return [*kept.values(), *unknown], warnings


def list_replicas(resolved: Resolved) -> fleet_pb2.ListReplicasResponse:
    """Every resolved replica with what it said of itself; resolve with `ask_all` for this."""
    rows = []
    for aim in resolved.aims:
        row = fleet_pb2.FleetReplica(name=aim.name, address=aim.address)
        if failure := resolved.failures.get(aim.address):
            row.code, row.reason = failure.code, failure.reason
            row.message = failure.message.removeprefix(f"{aim.address}: ")
        elif info := resolved.identities.get(aim.address):
            row.reachable, row.code = True, "OK"
            row.info.CopyFrom(info)
        rows.append(row)
    rows += [
        fleet_pb2.FleetReplica(
            name=row.replica, address=row.address, code="UNAVAILABLE", reason=row.reason, message=row.message
        )
        for row in resolved.apart
        if row.reason != outcomes.DUPLICATE_TARGET
    ]
    rows.sort(key=lambda row: (row.name, row.address))
    return fleet_pb2.ListReplicasResponse(replicas=rows, incomplete=resolved.incomplete, warnings=resolved.warnings)


async def watch_admission(
    aims: Sequence[Aim], channels: Channels, interval_s: float
) -> AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse]:
    """Samples of every replica as they come, until the caller stops. A replica that is lost is told once, asked for
    again every 2 s, and told when it is back.
    """
    queue: asyncio.Queue[fleet_pb2.WatchFleetAdmissionResponse] = asyncio.Queue(maxsize=4 * max(len(aims), 1))
    tasks = [asyncio.create_task(_follow(aim, channels, interval_s, queue)) for aim in aims]
    try:
        while True:
            yield await queue.get()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _follow(
    aim: Aim, channels: Channels, interval_s: float, queue: asyncio.Queue[fleet_pb2.WatchFleetAdmissionResponse]
) -> None:
    request = replica_pb2.WatchAdmissionRequest()
    request.interval.FromTimedelta(timedelta(seconds=interval_s))
    told = ""
    while True:
        try:
            async with channels.lease(_target(aim)) as channel:
                stub = replica_pb2_grpc.CacheAdminStub(channel)
                async for sample in stub.WatchAdmission(request, metadata=channels.metadata()):
                    row = _row(aim, sample.admission, READ_TIMEOUT_S)
                    await queue.put(
                        fleet_pb2.WatchFleetAdmissionResponse(replica=row, changed=sample.changed or bool(told))
                    )
                    told = ""
        except grpc.aio.AioRpcError as error:
            row = _row(aim, outcomes.read_failure(error), READ_TIMEOUT_S)
            if row.message != told:
                told = row.message
                await queue.put(fleet_pb2.WatchFleetAdmissionResponse(replica=row, changed=True))
        await asyncio.sleep(_RECONNECT_S)


def _row(
    aim: Aim, found: replica_pb2.AdmissionStatusResponse | Failure, timeout_s: float
) -> fleet_pb2.ReplicaAdmission:
    row = fleet_pb2.ReplicaAdmission(replica=aim.name, address=aim.address)
    if isinstance(found, Failure):
        told = outcomes.unreachable(found, aim.address, timeout_s)
        row.code, row.reason, row.message = told.code, told.reason, told.message
        return row
    row.code = "OK"
    row.admission.CopyFrom(found)
    return row


def _target(aim: Aim) -> Target:
    return Target(aim.address, aim.name, aim.labels, server_name=aim.server_name)
