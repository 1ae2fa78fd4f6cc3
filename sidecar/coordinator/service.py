"""FleetAdmin as gRPC serves it: requests in, messages out. What happens is in `operations` and `reading`."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Sequence
from typing import Final

import grpc
import grpc.aio
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc

from sidecar.coordinator import calls, reading, resolution
from sidecar.coordinator.audit import Asker
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import Discovery
from sidecar.coordinator.live import without_rows
from sidecar.coordinator.operations import Operations
from sidecar.coordinator.port import Aim
from sidecar.coordinator.refusals import as_failure, invalid
from sidecar.coordinator.selectors import read_targets
from sidecar.rpc.auth import Role
from sidecar.rpc.channels import MAX_MESSAGE_BYTES
from sidecar.rpc.errors import Failure, failure
from sidecar.rpc.interceptors import CALLER

SERVICE: Final = "kvctl.v1.FleetAdmin"

RULES: Final = {
    f"/{SERVICE}/{method}": role
    for method, role in {
        "StartOperation": Role.OPERATOR,  # pause and resume need ADMIN, which depends on the request: see below
        "PauseOperation": Role.OPERATOR,
        "ResumeOperation": Role.OPERATOR,
        "CancelOperation": Role.OPERATOR,
        "GetOperation": Role.VIEWER,
        "ListOperations": Role.VIEWER,
        "WatchOperation": Role.VIEWER,
        "ListReplicas": Role.VIEWER,
        "FleetAdmission": Role.VIEWER,
        "WatchFleetAdmission": Role.VIEWER,
    }.items()
}
"""Least role of every method."""

DEFAULT_PAGE: Final = 50
LARGEST_PAGE: Final = 500
LEAST_INTERVAL_S: Final = 0.1
_ROOM_BYTES: Final = MAX_MESSAGE_BYTES - 64 * 1024
_LOOK_AGAIN_S: Final = 15.0

Context = grpc.aio.ServicerContext[object, object]


class FleetAdmin(fleet_pb2_grpc.FleetAdminServicer):
    """See the module."""

    def __init__(self, operations: Operations, discovery: Discovery, channels: Channels) -> None:
        self._operations = operations
        self._discovery = discovery
        self._channels = channels

    # --- operations ----------------------------------------------------------------------------------------------

    async def StartOperation(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.StartOperationRequest, context: Context
    ) -> fleet_pb2.StartOperationResponse:
        """Put on record, begin."""
        caller = CALLER.get()
        if request.spec.WhichOneof("operation") in ("pause", "resume") and caller.role < Role.ADMIN:
            raise failure(
                grpc.StatusCode.PERMISSION_DENIED,
                "ROLE_TOO_SMALL",
                f"stopping and resuming schedulers needs the role admin; {caller.name} has {caller.role.name.lower()}",
                metadata={"method": "StartOperation", "role_needed": "admin", "role": caller.role.name.lower()},
            )
        operation = await self._operations.start(request.operation_id, request.spec, _asker(context))
        return fleet_pb2.StartOperationResponse(operation=fitting(operation))

    async def GetOperation(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.FleetAdminGetOperationRequest, _context: Context
    ) -> fleet_pb2.FleetAdminGetOperationResponse:
        """One operation."""
        operation = await self._operations.get(request.operation_id)
        return fleet_pb2.FleetAdminGetOperationResponse(operation=fitting(operation))

    async def ListOperations(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.ListOperationsRequest, _context: Context
    ) -> fleet_pb2.ListOperationsResponse:
        """A page, newest first."""
        if not 0 <= request.page_size <= LARGEST_PAGE:
            raise invalid(
                "page_size", f"page_size is {request.page_size}; expected 0 ({DEFAULT_PAGE}) to {LARGEST_PAGE}"
            )
        size = request.page_size or DEFAULT_PAGE
        rows = await self._operations.page(size + 1, _read_token(request.page_token))
        response = fleet_pb2.ListOperationsResponse()
        for sequence, operation in rows[:size]:
            bare = without_rows(operation)
            if response.ByteSize() + bare.ByteSize() > _ROOM_BYTES:
                break
            response.operations.append(bare)
            last = sequence
        if len(response.operations) < len(rows):
            response.next_page_token = _write_token(last)
        return response

    async def WatchOperation(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.WatchOperationRequest, _context: Context
    ) -> AsyncIterator[fleet_pb2.WatchOperationResponse]:
        """Changes until it ends."""
        async for operation in self._operations.watch(request.operation_id, request.after_version):
            yield fleet_pb2.WatchOperationResponse(operation=operation)

    async def PauseOperation(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.PauseOperationRequest, context: Context
    ) -> fleet_pb2.PauseOperationResponse:
        """Hold."""
        operation = await self._operations.hold(request.operation_id, _asker(context))
        return fleet_pb2.PauseOperationResponse(operation=fitting(operation))

    async def ResumeOperation(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.ResumeOperationRequest, context: Context
    ) -> fleet_pb2.ResumeOperationResponse:
        """Go on."""
        operation = await self._operations.release(request.operation_id, _asker(context))
        return fleet_pb2.ResumeOperationResponse(operation=fitting(operation))

    async def CancelOperation(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.FleetAdminCancelOperationRequest, context: Context
    ) -> fleet_pb2.FleetAdminCancelOperationResponse:
        """Start no further target."""
        operation = await self._operations.cancel(request.operation_id, _asker(context))
        return fleet_pb2.FleetAdminCancelOperationResponse(operation=fitting(operation))

    # --- reading -------------------------------------------------------------------------------------------------

    async def ListReplicas(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.ListReplicasRequest, _context: Context
    ) -> fleet_pb2.ListReplicasResponse:
        """Known replicas."""
        return reading.list_replicas(await self._resolve(request.targets, ask_all=True))

    async def FleetAdmission(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.FleetAdmissionRequest, _context: Context
    ) -> fleet_pb2.FleetAdmissionResponse:
        """Admission of every replica."""
        return await reading.read_admission(await self._resolve(request.targets), self._channels)

    async def WatchFleetAdmission(  # noqa: N802 - the RPC's name
        self, request: fleet_pb2.WatchFleetAdmissionRequest, _context: Context
    ) -> AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse]:
        """Samples of every replica; replicas that come and go are followed."""
        interval_s = calls.seconds(request.interval)
        if interval_s and not LEAST_INTERVAL_S <= interval_s <= 3600:
            raise invalid("interval", f"interval is {interval_s:g} s; expected 0 (changes only) or 0.1 s to 1 h")
        resolved = await self._resolve(request.targets)
        while True:
            members = {aim.address for aim in resolved.aims}
            async for sample in self._samples(resolved.aims, interval_s):
                if sample is not None:
                    yield sample
                    continue
                resolved = await self._resolve_again(request.targets, resolved)
                if {aim.address for aim in resolved.aims} != members:
                    break

    async def _samples(
        self, aims: Sequence[Aim], interval_s: float
    ) -> AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse | None]:
        """Samples as they come, and None now and then: time to look who is there. Ends with the server."""
        clock = asyncio.get_running_loop().time
        samples = reading.watch_admission(aims, self._channels, interval_s)
        stopping = asyncio.create_task(_flag(self._operations.stopping))
        pending = asyncio.create_task(_next(samples))
        look_at = clock() + _LOOK_AGAIN_S
        try:
            while True:
                await asyncio.wait(
                    [pending, stopping], timeout=max(0.0, look_at - clock()), return_when=asyncio.FIRST_COMPLETED
                )
                if stopping.done():
                    raise failure(
                        grpc.StatusCode.UNAVAILABLE,
                        "SERVER_STOPPING",
                        "this coordinator is shutting down; watch again at the one that follows",
                        retry_after=1.0,
                    )
                if pending.done():
                    sample = pending.result()
                    pending = asyncio.create_task(_next(samples))
                    yield sample
                if clock() >= look_at:
                    look_at = clock() + _LOOK_AGAIN_S
                    yield None
        finally:
            stopping.cancel()
            pending.cancel()
            await asyncio.gather(pending, stopping, return_exceptions=True)

    async def _resolve(self, targets: fleet_pb2.Targets, *, ask_all: bool = False) -> resolution.Resolved:
        try:
            selection = read_targets(targets)
            discovered = await self._discovery.targets()
            if not discovered.targets and selection.everything:
                return resolution.Resolved((), incomplete=discovered.incomplete, warnings=discovered.warnings)
            return await resolution.resolve(selection, discovered, self._channels, ask_all=ask_all)
        except Exception as error:
            raise as_failure(error) from error

    async def _resolve_again(self, targets: fleet_pb2.Targets, last: resolution.Resolved) -> resolution.Resolved:
        """The members now; those known before when discovery cannot tell."""
        try:
            return await self._resolve(targets)
        except Failure:
            return last


def _asker(context: Context) -> Asker:
    return Asker(CALLER.get(), context.peer())


async def _flag(event: asyncio.Event) -> None:
    await event.wait()


async def _next(
    samples: AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse],
) -> fleet_pb2.WatchFleetAdmissionResponse:
    return await anext(samples)


def fitting(operation: fleet_pb2.FleetOperation) -> fleet_pb2.FleetOperation:
    """The operation, small enough for one message: without the typed results of those that succeeded, then of all. What
    was left out is said, and a watch from version 0 has it, in several messages.
    """
    if operation.ByteSize() <= _ROOM_BYTES:
        return operation
    operation.warnings.append(
        "too large for one message: typed results were left out; watch the operation after version 0 to get them all"
    )
    for only_succeeded in (True, False):
        for row in operation.results:
            if not only_succeeded or row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED:
                which = row.WhichOneof("result")
                if which is not None:
                    row.ClearField(which)
        if operation.ByteSize() <= _ROOM_BYTES:
            break
    return operation


def _write_token(sequence: int) -> str:
    return base64.urlsafe_b64encode(f"before:{sequence}".encode()).decode()


def _read_token(token: str) -> int:
    if not token:
        return 0
    try:
        word, _, number = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        if word == "before" and int(number) > 0:
            return int(number)
    except (ValueError, binascii.Error):
        pass
    raise invalid("page_token", f"page_token {token[:64]!r} is none of ours; give next_page_token of the page before")
