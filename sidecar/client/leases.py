"""One replica's part in a weight update: its pause, the lease on it, and the steps that end it.

The lease is kept by a task of its own, so that a replica that answers nothing delays no other one's renewal. A lease
counts as lost when the engine says that the pause no longer holds, or when nothing was heard for as long as the lease
lasts: the engine has acted by itself by then.

Whatever changes an engine says when it must have begun (see `sidecar.rpc.late_calls`): a pause that a bad network
delivers after this client has given up would hold an engine that nobody resumes. A pause whose answer was lost may
hold all the same, so it is taken back: resumed by its id until the replica says that it does not hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final

import grpc
import grpc.aio
from kvctl.v1 import fleet_pb2, replica_pb2, replica_pb2_grpc, types_pb2

from sidecar.client.errors import KvctlError, LeaseLost, error_for
from sidecar.coordinator import calls, outcomes
from sidecar.coordinator.calls import Metadata
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.port import Aim
from sidecar.coordinator.targets import Target, derive_request_id, next_request_id

RENEWALS_IN_A_LEASE: Final = 3
"""Renewed this often within one lease, so that two lost renewals do not lose it."""

_NOT_PAUSED_BY_IT: Final = "WRONG_SCHEDULING_STATE"
_LOST_CODES: Final = frozenset({"FAILED_PRECONDITION", "NOT_FOUND"})
_AGAIN_CODES: Final = frozenset({"UNAVAILABLE", "FAILED_PRECONDITION", "ABORTED", "DEADLINE_EXCEEDED"})
_LAST_TRY_S: Final = 0.05
"""For a try that begins as the time ends."""
_PAUSE_BETWEEN_TRIES_S: Final = 0.3
_LONGEST_BETWEEN_TRIES_S: Final = 5.0
_TAKE_BACK_TRY_S: Final = 5.0
"""For one try to take a pause back: a resume waits for no step of the engine."""

Call = Callable[["replica_pb2_grpc.CacheAdminAsyncStub", float, Metadata], Awaitable[object]]
"""A call, given the seconds it may take and what goes with it."""


class Lease:
    """The pause of one replica. `error` is set once the replica is lost to the update."""

    def __init__(self, aim: Aim, operation_id: str, channels: Channels, lease_s: float) -> None:
        self.aim = aim
        self.error: KvctlError | None = None
        self.pause_id = derive_request_id(operation_id, f"{aim.name}/pause")
        self._reset_id = derive_request_id(operation_id, f"{aim.name}/reset")
        self._resume_id = derive_request_id(operation_id, f"{aim.name}/resume")
        self._target = Target(aim.address, aim.name, aim.labels, server_name=aim.server_name)
        self._channels = channels
        self._lease_s = lease_s
        self._on_abandon = replica_pb2.ABANDON_POLICY_UNSPECIFIED
        self._heard = 0.0
        self._keeper: asyncio.Task[None] | None = None
        self._may_hold = False
        """The pause was sent, and nothing says for certain that it does not hold."""
        self._pause_ends = 0.0
        """A pause on its way is not begun later than that."""
        self._loss: outcomes.Failure | None = None
        """What `error` was made of."""
        self._taking_back: asyncio.Task[None] | None = None
        self._take_back_began = 0.0

    @property
    def held(self) -> bool:
        """Whether the replica still takes part."""
        return self.error is None

    @property
    def paused(self) -> bool:
        """Whether the replica has said that it is paused, and the lease is kept."""
        return self._keeper is not None

    @property
    def in_doubt(self) -> bool:
        """Whether a pause is being taken back of which is not known whether it holds."""
        return self._taking_back is not None and self._may_hold

    async def pause(self, policy: replica_pb2.AbandonPolicy.ValueType, timeout_s: float) -> None:
        """Stop scheduling, and keep the lease from then on. Where the answer is lost the pause is being taken back."""
        request = replica_pb2.PauseSchedulingRequest(request_id=self.pause_id, on_abandon=policy)
        request.lease.FromTimedelta(timedelta(seconds=self._lease_s))
        before = _now()
        self._on_abandon, self._pause_ends = policy, before + timeout_s + _LAST_TRY_S

        async def call(stub: replica_pb2_grpc.CacheAdminAsyncStub, left: float, more: Metadata) -> None:
            doubted, self._may_hold = self._may_hold, True  # also when this is cancelled
            try:
                await stub.PauseScheduling(request, timeout=left, metadata=more)
            except asyncio.CancelledError:
                self._pause_ends = _now()  # its connection brings the cancellation before any resume
                raise
            except grpc.aio.AioRpcError as error:
                told = outcomes.read_failure(error)
                self._may_hold = doubted or _may_have_paused(told)
                if not doubted and _every_rank_told(told):
                    self._pause_ends = _now()
                raise

        if await self._tried(call, timeout_s):
            self._heard = before
            self._keeper = asyncio.create_task(self._keep())
        elif self._may_hold:
            self._begin_to_take_back()
            if self._pause_ends <= _now():  # nothing of it is on its way: one resume says what holds
                await self.take_back(timeout_s)

    async def take_back(self, timeout_s: float) -> None:
        """Resume what no weights were transferred to, also where it is not known to be paused, within so many seconds
        since that was begun. `error` says it when the replica may be left standing still.
        """
        await self._stop_keeping()
        if self._taking_back is None and self._may_hold:
            self._begin_to_take_back()
        if self._taking_back is None:
            return
        left_s = self._take_back_began + timeout_s - _now()
        await asyncio.wait([self._taking_back], timeout=max(left_s, 0.0))
        if self._may_hold and self.held:
            self._doubt("its resume was not answered")

    async def complete(self, timeout_s: float) -> None:
        """Say that the new weights are whole: an engine that hears no more resets and resumes by itself."""
        await self._stop_keeping()
        if self.held:
            await self._declare_whole(timeout_s)

    async def reset(self, request: replica_pb2.ResetPrefixCacheRequest, timeout_s: float) -> None:
        """Forget everything computed with the old weights. A busy connector is asked again until the time is over."""
        mine = replica_pb2.ResetPrefixCacheRequest()
        mine.CopyFrom(request)
        mine.request_id = self._reset_id

        async def call(stub: replica_pb2_grpc.CacheAdminAsyncStub, left: float, more: Metadata) -> None:
            try:
                await stub.ResetPrefixCache(mine, timeout=left, metadata=more)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    # The refusal is on record under its id and would come back for ever.
                    mine.request_id = next_request_id(mine.request_id)
                raise

        if self.held:
            await self._tried(call, timeout_s, again=True)

    async def resume(self, weight_version: str, timeout_s: float) -> None:
        """Schedule again, with the new version on record."""
        request = replica_pb2.ResumeSchedulingRequest(
            request_id=self._resume_id, pause_request_id=self.pause_id, weight_version=weight_version
        )
        if self.held:
            await self._tried(
                lambda stub, left, more: stub.ResumeScheduling(request, timeout=left, metadata=more), timeout_s
            )

    async def abandon(self, timeout_s: float) -> None:
        """End the lease at once: the engine does what it was told to do with an abandoned update, and a new pause is
        welcome from then on.
        """
        await self._stop_keeping()
        request = replica_pb2.CancelOperationRequest(request_id=self.pause_id)
        if self.held:
            await self._tried(
                lambda stub, left, more: stub.CancelOperation(request, timeout=left, metadata=more), timeout_s
            )

    async def close(self) -> None:
        """Keep the lease no longer, and take back no more."""
        await self._stop_keeping()
        await _ended(self._taking_back)

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        every_s = self._lease_s / RENEWALS_IN_A_LEASE
        while self.held:
            await asyncio.sleep(every_s)
            before = _now()
            try:
                await self._renew(self._lease_s, complete=False, timeout_s=every_s)
            except (grpc.aio.AioRpcError, OSError, ValueError) as error:
                # OSError, ValueError: the token file is being replaced; the next renewal reads it again.
                failure = _read(error)
                if failure.code in _LOST_CODES or _now() - self._heard > self._lease_s:
                    self.error = LeaseLost(
                        f"{self.aim.name}: the pause was lost during the update: {failure.message}",
                        code=failure.code,
                        reason=failure.reason,
                        replica=self.aim.name,
                    )
            else:
                self._heard = before

    def _begin_to_take_back(self) -> None:
        if self._loss is not None:
            self._doubt(self._loss.message)
        self._take_back_began = _now()
        self._taking_back = asyncio.create_task(self._take_back())

    async def _take_back(self) -> None:
        """Resume by the pause's id until it is certain that the pause does not hold."""
        request = replica_pb2.ResumeSchedulingRequest(request_id=self._resume_id, pause_request_id=self.pause_id)
        wait_s = _PAUSE_BETWEEN_TRIES_S
        while (failure := await self._resumed_once(request)) is not None:
            if failure.reason == _NOT_PAUSED_BY_IT and _now() > self._pause_ends:
                break
            if failure.code == "FAILED_PRECONDITION":
                # The refusal is on record under its id and would come back for ever.
                request.request_id = next_request_id(request.request_id)
            await asyncio.sleep(max(wait_s, failure.retry_after_s))
            wait_s = min(wait_s * 2, _LONGEST_BETWEEN_TRIES_S)
        self._may_hold = False
        if (loss := self._loss) is not None:
            reason = "NOT_EXECUTED" if loss.reason == outcomes.OUTCOME_UNKNOWN else loss.reason
            text = f"could not be paused, and goes on as before: {loss.message}"
            self.error = error_for(loss.code, reason, text, self.aim.name)

    async def _resumed_once(self, request: replica_pb2.ResumeSchedulingRequest) -> outcomes.Failure | None:
        try:
            return await self._once(
                lambda stub, left, more: stub.ResumeScheduling(request, timeout=left, metadata=more), _TAKE_BACK_TRY_S
            )
        except (OSError, ValueError) as error:  # the token file is being replaced
            return _read(error)

    def _doubt(self, why: str) -> None:
        then = "goes on by itself" if self._on_abandon == replica_pb2.ABANDON_POLICY_RESUME else "stays paused"
        text = (
            f"whether it is paused is not known: {why}; if it is, it stands still until its lease of {self._lease_s:g} "
            f"s ends, and then {then}; `kvctl scheduling resume --pause {self.pause_id} --replicas {self.aim.name}` "
            "ends that"
        )
        self.error = error_for("DEADLINE_EXCEEDED", outcomes.OUTCOME_UNKNOWN, text, self.aim.name)

    async def _renew(self, lease_s: float, *, complete: bool, timeout_s: float) -> None:
        request = replica_pb2.RenewPauseRequest(pause_request_id=self.pause_id, weights_complete=complete)
        request.lease.FromTimedelta(timedelta(seconds=lease_s))
        async with self._channels.lease(self._target) as channel:
            stub = replica_pb2_grpc.CacheAdminStub(channel)
            await stub.RenewPause(request, timeout=timeout_s, metadata=self._channels.metadata())

    async def _declare_whole(self, timeout_s: float) -> None:
        began = _now()
        deadline = began + timeout_s
        while True:
            try:
                return await self._renew(self._lease_s, complete=True, timeout_s=max(deadline - _now(), _LAST_TRY_S))
            except grpc.aio.AioRpcError as error:
                failure = outcomes.read_failure(error)
                if failure.code in _LOST_CODES:
                    text = f"{self.aim.name}: the pause ended before the update did: {failure.message}"
                    self.error = LeaseLost(text, code=failure.code, reason=failure.reason, replica=self.aim.name)
                    return None
                if failure.code != "UNAVAILABLE" or _now() + _PAUSE_BETWEEN_TRIES_S >= deadline:
                    self._lost(failure, _now() - began)
                    return None
            await asyncio.sleep(_PAUSE_BETWEEN_TRIES_S)

    async def _tried(self, call: Call, timeout_s: float, *, again: bool = False) -> bool:
        """One call, repeated while the replica cannot be reached (and, with `again`, while it refuses)."""
        began = _now()
        deadline = began + timeout_s
        while True:
            failure = await self._once(call, max(deadline - _now(), _LAST_TRY_S))
            if failure is None:
                return True
            worth = failure.code in _AGAIN_CODES if again else failure.code == "UNAVAILABLE"
            wait_s = max(_PAUSE_BETWEEN_TRIES_S, failure.retry_after_s)
            if not worth or _now() + wait_s >= deadline:
                self._lost(failure, _now() - began)
                return False
            await asyncio.sleep(wait_s)

    async def _once(self, call: Call, left_s: float) -> outcomes.Failure | None:
        deadline_ns = time.monotonic_ns() + int(left_s * 1e9)
        async with self._channels.lease(self._target) as channel:
            metadata = self._channels.metadata()
            bound = await calls.bound_in_time(channel, deadline_ns, metadata)
            if isinstance(bound, outcomes.Failure):
                return bound
            try:
                await call(replica_pb2_grpc.CacheAdminStub(channel), left_s, (*metadata, *bound))
            except grpc.aio.AioRpcError as error:
                failure = outcomes.read_failure(error)
                if failure.reason == calls.OTHER_INSTANCE:
                    # Its sidecar was restarted; the engine behind it may be the same.
                    return await calls.ask_again(channel, deadline_ns, metadata) or failure
                return failure
        return None

    def _lost(self, failure: outcomes.Failure, after_s: float) -> None:
        told = outcomes.unreachable(failure, self.aim.address, after_s) if not failure.from_sidecar else failure
        self._loss = told
        self.error = error_for(told.code, told.reason, told.message, self.aim.name)

    async def _stop_keeping(self) -> None:
        await _ended(self._keeper)
        self._keeper = None


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _may_have_paused(failure: outcomes.Failure) -> bool:
    """Whether a pause that failed may hold: its answer was lost, or it failed at one rank of several, and the others
    could perhaps not be resumed.
    """
    unknown = outcomes.of_failure(failure, sent=True).outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN
    told = failure.result
    return unknown or (isinstance(told, replica_pb2.PauseSchedulingResponse) and len(told.engines) > 1)


def _every_rank_told(failure: outcomes.Failure) -> bool:
    """Whether a pause that failed has its final word from each of its ranks, so that none begins it after that."""
    told = failure.result
    return isinstance(told, replica_pb2.PauseSchedulingResponse) and all(
        engine.status.execution != types_pb2.EXECUTION_UNKNOWN for engine in told.engines
    )


def _read(error: grpc.aio.AioRpcError | OSError | ValueError) -> outcomes.Failure:
    if isinstance(error, grpc.aio.AioRpcError):
        return outcomes.read_failure(error)
    return outcomes.Failure("UNAUTHENTICATED", "", str(error))


def _now() -> float:
    return asyncio.get_running_loop().time()
