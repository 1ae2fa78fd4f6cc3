"""The same fleet for code without an event loop, such as a trainer.

Everything runs on the loop of a background thread, so that the lease of a weight update is renewed while the caller
transfers weights. Methods are those of `aio.Fleet`, and can be called from any thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, TypeVar

from kvctl.v1 import fleet_pb2

from sidecar.client import aio
from sidecar.client.aio import DEFAULT_TIMEOUT_S, Purpose, RunningRequests, Scope
from sidecar.client.errors import KvctlError, RequestInvalid
from sidecar.client.results import FleetResult, ReplicaAdmission
from sidecar.client.weights import DEFAULT_LEASE_S, DEFAULT_STEP_TIMEOUT_S, Abandon
from sidecar.client.weights import WeightUpdate as AsyncWeightUpdate

_T = TypeVar("_T")

LEAVE_S: Final = 10.0
"""How long an interrupted call may take to leave things well."""


class WeightUpdate:
    """A weight update under way: the view that the caller's block gets."""

    def __init__(self, update: AsyncWeightUpdate) -> None:
        self._update = update

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of replicas that take part and are not lost so far: transfer weights to these."""
        return self._update.replicas

    @property
    def addresses(self) -> Mapping[str, str]:
        """Their sidecars' addresses, by name."""
        return self._update.addresses

    @property
    def lost(self) -> Mapping[str, KvctlError]:
        """Replicas that do not take part or were lost on the way, and why."""
        return self._update.lost

    def raise_for_failures(self) -> None:
        """FleetFailed when any replica was lost. Call it after the block."""
        self._update.raise_for_failures()


class Fleet:
    """Replicas named by their sidecars' addresses, an inventory file, or through a coordinator; give one of them.

    Use it as `with Fleet(...) as fleet`, or `close` it. Must not be used on a thread that runs an event loop: there
    is `aio.Fleet` for that.
    """

    def __init__(
        self,
        targets: Sequence[str] = (),
        *,
        inventory: str | Path | None = None,
        coordinator: str | None = None,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
        token_file: str | Path | None = None,
        server_name: str = "",
        insecure: bool = False,
    ) -> None:
        """See `aio.Fleet`."""
        self._fleet = aio.Fleet(
            targets,
            inventory=inventory,
            coordinator=coordinator,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            token_file=token_file,
            server_name=server_name,
            insecure=insecure,
        )
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvctl-fleet", daemon=True)
        self._thread.start()

    def __enter__(self) -> Fleet:
        self._wait(self._fleet.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread. Closing twice is fine."""
        if self._loop.is_closed() or self._process != os.getpid():
            return
        self._wait(self._fleet.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset_prefix_cache(
        self,
        *,
        running_requests: RunningRequests = "fail",
        replicas: str = "all",
        reset_connector: bool = False,
        reset_mm_cache: bool = False,
        reset_encoder_cache: bool = False,
        reorder_free_queue: bool = False,
        wait_for_idle: bool = False,
        quarantine_running: bool = False,
        purpose: Purpose = "",
        wait: bool = False,
        validate_only: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        rollout: fleet_pb2.Rollout | None = None,
        operation_id: str = "",
    ) -> FleetResult:
        """Forget every cached prefix. See `aio.Fleet.reset_prefix_cache`."""
        return self._wait(
            self._fleet.reset_prefix_cache(
                running_requests=running_requests,
                replicas=replicas,
                reset_connector=reset_connector,
                reset_mm_cache=reset_mm_cache,
                reset_encoder_cache=reset_encoder_cache,
                reorder_free_queue=reorder_free_queue,
                wait_for_idle=wait_for_idle,
                quarantine_running=quarantine_running,
                purpose=purpose,
                wait=wait,
                validate_only=validate_only,
                timeout_s=timeout_s,
                rollout=rollout,
                operation_id=operation_id,
            )
        )

    def reorder_free_queue(
        self,
        *,
        scope: Scope = "idle",
        replicas: str = "all",
        wait: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        rollout: fleet_pb2.Rollout | None = None,
        operation_id: str = "",
    ) -> FleetResult:
        """Put free blocks back into block-id order."""
        return self._wait(
            self._fleet.reorder_free_queue(
                scope=scope,
                replicas=replicas,
                wait=wait,
                timeout_s=timeout_s,
                rollout=rollout,
                operation_id=operation_id,
            )
        )

    def relieve_admission(
        self, *, replicas: str = "all", timeout_s: float = DEFAULT_TIMEOUT_S, operation_id: str = ""
    ) -> FleetResult:
        """Give back the blocks of waiting requests where they deadlock admissions."""
        return self._wait(
            self._fleet.relieve_admission(replicas=replicas, timeout_s=timeout_s, operation_id=operation_id)
        )

    def resume_scheduling(
        self,
        *,
        replicas: str = "all",
        pause_operation_id: str = "",
        force: bool = False,
        weight_version: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> FleetResult:
        """Schedule again. See `aio.Fleet.resume_scheduling`."""
        return self._wait(
            self._fleet.resume_scheduling(
                replicas=replicas,
                pause_operation_id=pause_operation_id,
                force=force,
                weight_version=weight_version,
                timeout_s=timeout_s,
            )
        )

    @contextmanager
    def weight_update(
        self,
        weight_version: str = "",
        *,
        replicas: str = "all",
        lease_s: float = DEFAULT_LEASE_S,
        on_abandon: Abandon = "stay_paused",
        running_requests: Literal["keep", "preempt"] = "keep",
        require_all: bool = False,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> Iterator[WeightUpdate]:
        """A weight update as one transaction. See `weights` for what happens when."""
        update = self._fleet.weight_update(
            weight_version,
            replicas=replicas,
            lease_s=lease_s,
            on_abandon=on_abandon,
            running_requests=running_requests,
            require_all=require_all,
            step_timeout_s=step_timeout_s,
        )
        self._wait(update.__aenter__())
        try:
            yield WeightUpdate(update)
        except BaseException as error:
            self._wait(update.__aexit__(type(error), error, error.__traceback__))
            raise
        self._wait(update.__aexit__(None, None, None))

    def admission(self, *, replicas: str = "all", timeout_s: float = 5.0) -> tuple[ReplicaAdmission, ...]:
        """Whether each engine admits requests, and if not, why."""
        return self._wait(self._fleet.admission(replicas=replicas, timeout_s=timeout_s))

    def replicas(self, *, replicas: str = "all") -> tuple[fleet_pb2.FleetReplica, ...]:
        """Every replica with what it says of itself."""
        return self._wait(self._fleet.replicas(replicas=replicas))

    def _wait(self, work: Coroutine[object, object, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise RequestInvalid("this fleet is closed; make another one")
        if self._process != os.getpid():
            # Its thread stayed in the parent: nobody would ever answer.
            work.close()
            raise RequestInvalid("this fleet was made before a fork; make another one in this process")
        ended = threading.Event()

        async def watched() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                # Ctrl-C. What the work does to leave things well, such as resuming engines that it has paused, must
                # not be lost with the process.
                future.cancel()
                ended.wait(LEAVE_S)
            raise
