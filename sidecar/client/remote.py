"""A fleet reached through a coordinator, which runs operations and remembers them.

A watch that breaks is taken up again after the last version seen, and an operation is started under an id made here,
so that a start whose answer was lost can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc

from sidecar.client.reach import OnProgress, checked_id, recorded_id
from sidecar.coordinator import calls, outcomes
from sidecar.coordinator.outcomes import Failure
from sidecar.rpc import addresses, channels, late_calls
from sidecar.rpc.channels import NO_SECURITY, ClientSecurity

CALL_TIMEOUT_S: Final = 15.0
ENDED: Final = frozenset(
    {
        fleet_pb2.OPERATION_STATE_SUCCEEDED,
        fleet_pb2.OPERATION_STATE_FAILED,
        fleet_pb2.OPERATION_STATE_PARTIAL,
        fleet_pb2.OPERATION_STATE_CANCELLED,
    }
)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_RETRY_S: Final = 1.0
_WATCH_TRIES: Final = 60
_WORTH_ANOTHER_TRY: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""A coordinator that restarts, and one that dropped a slow reader."""


class CoordinatorError(Exception):
    """The coordinator refused a call or could not be reached. `failure` has code, reason and text; the address is
    empty when the text has it already.
    """

    def __init__(self, failure: Failure, address: str) -> None:
        super().__init__(f"coordinator {address}: {failure.message}" if address else failure.message)
        self.failure = failure


class Detached(Exception):  # noqa: N818 - nothing went wrong
    """The watch ended because the caller asked; the operation goes on at the coordinator."""

    def __init__(self, operation_id: str, *, started: bool = True) -> None:
        """`started`: False when the coordinator had not said yet that it has it on record."""
        super().__init__(f"operation {operation_id} {'goes on' if started else 'may have been started'}")
        self.operation_id = operation_id
        self.started = started


class NotStarted(Exception):  # noqa: N818 - nothing went wrong
    """The caller stopped before the coordinator was reached: nothing was sent to it."""


class CoordinatorReach:
    """A coordinator's view of its fleet."""

    def __init__(self, address: str, security: ClientSecurity = NO_SECURITY) -> None:
        """ValueError when the address is none, or a token would travel in plain text."""
        self._address = addresses.parse(address, what="coordinator address")
        self._security = security
        self._channel = channels.connect(self._address, security)
        self._stub = fleet_pb2_grpc.FleetAdminStub(self._channel)
        self._stopped = asyncio.Event()

    # --- operations --------------------------------------------------------------------------------------------------

    async def run(
        self, spec: fleet_pb2.OperationSpec, operation_id: str = "", on_progress: OnProgress | None = None
    ) -> fleet_pb2.FleetOperation:
        """Start an operation and follow it to its end. After `stop`: NotStarted while nothing was sent, else Detached:
        it may have been started, and its id tells.
        """
        request = fleet_pb2.StartOperationRequest(operation_id=checked_id(operation_id), spec=spec)
        within_s = min(calls.seconds(spec.timeout) or CALL_TIMEOUT_S, CALL_TIMEOUT_S)
        await self._unless_stopped(self._connected(within_s), NotStarted())
        bound = await self._unless_stopped(self._not_after(request.operation_id), NotStarted())
        try:
            metadata = (*self._metadata(), *bound)
            starting = self._stub.StartOperation(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
            started = await self._unless_stopped(starting, Detached(request.operation_id, started=False))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        ended = await self.follow(started.operation.operation_id, on_progress)
        ended.warnings.extend(text for text in started.operation.warnings if text not in ended.warnings)
        return ended

    async def _not_after(self, operation_id: str) -> tuple[tuple[str, str], ...]:
        """Metadata by which the coordinator does not begin a call that the network held up for longer than its time.

        Its clock comes with every answer, also with the usual one here: that nothing is known of this id.
        """
        sent_ns = time.monotonic_ns()
        request = fleet_pb2.FleetAdminGetOperationRequest(operation_id=operation_id)
        asking = self._stub.GetOperation(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        await asking.code()
        heard_ns = time.monotonic_ns()
        known = late_calls.learn(await asking.trailing_metadata(), sent_ns, heard_ns)
        return known.metadata(heard_ns + int(CALL_TIMEOUT_S * 1e9)) if known else ()

    async def follow(self, operation_id: str, on_progress: OnProgress | None = None) -> fleet_pb2.FleetOperation:
        """Watch an operation to its end and return it whole. Detached after `stop`."""
        return await self._unless_stopped(self._watch_to_end(operation_id, on_progress), Detached(operation_id))

    async def _unless_stopped(self, work: Awaitable[_T], otherwise: Exception) -> _T:
        """What the work gives, or `otherwise` raised at once when `stop` is called before it has ended."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self._stopped.clear()
                raise otherwise
            return await working
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _watch_to_end(self, operation_id: str, on_progress: OnProgress | None) -> fleet_pb2.FleetOperation:
        rows: dict[tuple[str, str], fleet_pb2.TargetResult] = {}
        seen = 0
        tries = 0
        while True:
            request = fleet_pb2.WatchOperationRequest(operation_id=recorded_id(operation_id), after_version=seen)
            try:
                async for message in self._stub.WatchOperation(request, metadata=self._metadata()):
                    operation, tries = message.operation, 0
                    # The rows of one version can come in several messages; only the last of them has the version.
                    seen = operation.version or seen
                    for row in operation.results:
                        rows[row.replica, row.address] = row
                        if on_progress:
                            on_progress(row, operation.counts.total)
                    if operation.state in ENDED:
                        del operation.results[:]
                        operation.results.extend(rows[key] for key in sorted(rows))
                        return operation
            except grpc.aio.AioRpcError as error:
                if error.code() not in _WORTH_ANOTHER_TRY or tries >= _WATCH_TRIES:
                    raise self._error(error) from error
            tries += 1
            await asyncio.sleep(_RETRY_S)

    async def stop(self) -> None:
        """Stop watching; the operation goes on."""
        self._stopped.set()

    async def get(self, operation_id: str) -> fleet_pb2.FleetOperation:
        """One operation, whole."""
        request = fleet_pb2.FleetAdminGetOperationRequest(operation_id=recorded_id(operation_id))
        return (await self._call(self._stub.GetOperation, request)).operation

    async def operations(self, most: int) -> list[fleet_pb2.FleetOperation]:
        """The newest operations, without their targets."""
        found: list[fleet_pb2.FleetOperation] = []
        token = ""
        while len(found) < most:
            request = fleet_pb2.ListOperationsRequest(page_size=min(most - len(found), 500), page_token=token)
            page = await self._call(self._stub.ListOperations, request)
            found.extend(page.operations)
            token = page.next_page_token
            if not token:
                break
        return found

    async def pause(self, operation_id: str) -> fleet_pb2.FleetOperation:
        """Hold a rollout before its next wave."""
        request = fleet_pb2.PauseOperationRequest(operation_id=recorded_id(operation_id))
        return (await self._call(self._stub.PauseOperation, request)).operation

    async def resume(self, operation_id: str) -> fleet_pb2.FleetOperation:
        """Let a held rollout go on."""
        request = fleet_pb2.ResumeOperationRequest(operation_id=recorded_id(operation_id))
        return (await self._call(self._stub.ResumeOperation, request)).operation

    async def cancel(self, operation_id: str) -> fleet_pb2.FleetOperation:
        """Start no further target."""
        request = fleet_pb2.FleetAdminCancelOperationRequest(operation_id=recorded_id(operation_id))
        return (await self._call(self._stub.CancelOperation, request)).operation

    # --- reading -----------------------------------------------------------------------------------------------------

    async def admission(self, targets: fleet_pb2.Targets, timeout_s: float) -> fleet_pb2.FleetAdmissionResponse:
        """Admission of every replica."""
        request = fleet_pb2.FleetAdmissionRequest(targets=targets)
        await self._connected(timeout_s)
        try:
            return await self._stub.FleetAdmission(request, timeout=timeout_s + 2.0, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    async def watch(
        self, targets: fleet_pb2.Targets, interval_s: float
    ) -> AsyncIterator[fleet_pb2.WatchFleetAdmissionResponse]:
        """Admission as it changes. A coordinator that is lost once it has answered is asked again until it is back."""
        request = fleet_pb2.WatchFleetAdmissionRequest(targets=targets)
        request.interval.FromTimedelta(timedelta(seconds=interval_s))
        await self._connected(CALL_TIMEOUT_S)
        answered = lost = False
        while True:
            try:
                async for sample in self._stub.WatchFleetAdmission(request, metadata=self._metadata()):
                    if lost:
                        _log.warning("the coordinator answers again")
                    answered, lost = True, False
                    yield sample
            except grpc.aio.AioRpcError as error:
                told = self._error(error)
                if not answered or error.code() not in _WORTH_ANOTHER_TRY:
                    raise told from error
                if not lost:
                    _log.warning("%s; trying again", told)
                lost = True
            await asyncio.sleep(_RETRY_S)

    async def replicas(self, targets: fleet_pb2.Targets) -> fleet_pb2.ListReplicasResponse:
        """Every replica with what it says of itself."""
        request = fleet_pb2.ListReplicasRequest(targets=targets)
        return await self._call(self._stub.ListReplicas, request)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _call(self, method: Callable[..., Awaitable[_T]], request: Message) -> _T:
        await self._connected(CALL_TIMEOUT_S)
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    async def _connected(self, within_s: float) -> None:
        """CoordinatorError when there is no connection within the time; nothing was sent then. A connection that is
        refused is left for the call to report.
        """
        deadline = asyncio.get_running_loop().time() + within_s
        state = self._channel.get_state(try_to_connect=True)
        while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._channel.wait_for_state_change(state)
            except TimeoutError:
                text = f"no answer from the coordinator at {self._address} within {within_s:g} s"
                failure = Failure("UNAVAILABLE", outcomes.REPLICA_UNREACHABLE, text)
                raise CoordinatorError(failure, "") from None
            state = self._channel.get_state(try_to_connect=True)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._security.metadata()

    def _error(self, error: grpc.aio.AioRpcError) -> CoordinatorError:
        failure = outcomes.read_failure(error)
        if not failure.from_sidecar and failure.code == "UNIMPLEMENTED":
            text = "does not serve kvctl.v1.FleetAdmin; give a coordinator's address, or a sidecar's with --target"
            failure = Failure("UNAVAILABLE", outcomes.NOT_A_SIDECAR, text)
        elif not failure.from_sidecar and failure.code == "DEADLINE_EXCEEDED":
            text = f"no answer from the coordinator at {self._address} in time"
            return CoordinatorError(Failure(failure.code, "", text), "")
        elif not failure.from_sidecar:
            failure = Failure(failure.code, failure.reason, outcomes.brief(failure.message))
        return CoordinatorError(failure, str(self._address))
