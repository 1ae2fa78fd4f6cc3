"""A fleet of replicas from asyncio.

    async with Fleet(inventory="fleet.yaml") as fleet:
        result = await fleet.reset_prefix_cache(running_requests="keep")
        result.raise_for_failures()
        async with fleet.weight_update("step-12") as update:
            await transfer_weights_to(update.replicas)

A blocking transfer in the block starves the renewals of the lease: run it with `asyncio.to_thread`, or use the
blocking `sidecar.client.Fleet`, which renews on a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.client import arguments
from sidecar.client.direct import DirectReach
from sidecar.client.errors import KvctlError, ReplicaUnavailable, RequestInvalid, error_for
from sidecar.client.reach import Reach, discovery_of
from sidecar.client.remote import CoordinatorError, CoordinatorReach
from sidecar.client.results import FleetResult, ReplicaAdmission, fleet_result, replica_admission
from sidecar.client.weights import (
    DEFAULT_LEASE_S,
    DEFAULT_STEP_TIMEOUT_S,
    LONGEST_WEIGHT_VERSION,
    Abandon,
    UpdatePlan,
    WeightUpdate,
)
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery import DiscoveryError, InventoryUnreadable
from sidecar.coordinator.outcomes import DUPLICATE_TARGET
from sidecar.coordinator.port import Aim
from sidecar.coordinator.rollout import PolicyError
from sidecar.coordinator.selectors import SelectorError
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.tls import ClientTls

RunningRequests = Literal["fail", "preempt", "keep"]
Scope = Literal["idle", "uncached", "all_free"]
Purpose = Literal["", "benchmark", "weight_update"]

DEFAULT_TIMEOUT_S: Final = 30.0

_RUNNING: Final = {
    "fail": types_pb2.RUNNING_REQUESTS_FAIL,
    "preempt": types_pb2.RUNNING_REQUESTS_PREEMPT,
    "keep": types_pb2.RUNNING_REQUESTS_KEEP,
}
_SCOPES: Final = {
    "idle": types_pb2.REORDER_SCOPE_IDLE,
    "uncached": types_pb2.REORDER_SCOPE_UNCACHED,
    "all_free": types_pb2.REORDER_SCOPE_ALL_FREE,
}
_PURPOSES: Final = {
    "": types_pb2.PURPOSE_UNSPECIFIED,
    "benchmark": types_pb2.PURPOSE_BENCHMARK,
    "weight_update": types_pb2.PURPOSE_WEIGHT_UPDATE,
}


class Fleet:
    """Replicas named by their sidecars' addresses, an inventory file, or through a coordinator; give one of them.

    Belongs to the event loop it is entered on. Every method raises a `KvctlError`; what single replicas did is in the
    result, which raises only when asked to.
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
        """`targets`: `[NAME=]host:port`, `unix:/path`, or `dns:///name:port` for every address of a name.

        `ca_file` turns TLS on. RequestInvalid when these contradict each other.
        """
        self._targets = arguments.targets(targets)
        self._inventory = arguments.file("inventory", inventory)
        self._coordinator = arguments.text(
            "coordinator", "" if coordinator is None else coordinator, "a text such as '127.0.0.1:7710'"
        )
        if sum(map(bool, (self._targets, self._inventory, self._coordinator))) != 1:
            raise RequestInvalid("give exactly one of targets, inventory and coordinator")
        files = [
            arguments.file(name, given)
            for name, given in (("ca_file", ca_file), ("cert_file", cert_file), ("key_file", key_file))
        ]
        token = arguments.file("token_file", token_file)
        name = arguments.text("server_name", server_name)
        plain = arguments.flag("insecure", insecure)
        with _as_errors():
            tls = ClientTls(files[0], files[1], files[2], name)
            self._security = ClientSecurity(tls if any(files) or name else None, token, plain)
        self._opened: Reach | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sidecars: Channels | None = None

    async def __aenter__(self) -> Fleet:
        self._reach  # noqa: B018 - opens it, so that wrong settings raise here
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        reach, self._opened = self._opened, None
        if reach is not None:
            await reach.close()
        sidecars, self._sidecars = self._sidecars, None
        if sidecars is not None:
            await sidecars.close()

    # --- operations ----------------------------------------------------------------------------------------------

    async def reset_prefix_cache(
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
        """Forget every cached prefix.

        `running_requests`: "fail" refuses while blocks are held, "preempt" has running requests computed again,
        "keep" leaves them undisturbed. `replicas`: "all", names and globs, or a label selector. `wait`: try refused
        replicas again until `timeout_s`, which is for each replica. `operation_id`: a UUID; repeating it repeats
        nothing that was done.
        """
        request = replica_pb2.ResetPrefixCacheRequest(
            running_requests=arguments.one_of("running_requests", running_requests, _RUNNING),
            reset_connector=arguments.flag("reset_connector", reset_connector),
            reset_mm_cache=arguments.flag("reset_mm_cache", reset_mm_cache),
            reset_encoder_cache=arguments.flag("reset_encoder_cache", reset_encoder_cache),
            reorder_free_queue=arguments.flag("reorder_free_queue", reorder_free_queue),
            wait_for_idle=arguments.flag("wait_for_idle", wait_for_idle),
            quarantine_running=arguments.flag("quarantine_running", quarantine_running),
            purpose=arguments.one_of("purpose", purpose, _PURPOSES),
        )
        spec = fleet_pb2.OperationSpec(
            reset=request,
            wait=arguments.flag("wait", wait),
            validate_only=arguments.flag("validate_only", validate_only),
        )
        return await self._run(spec, replicas, timeout_s, rollout, operation_id)

    async def reorder_free_queue(
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
        request = replica_pb2.ReorderFreeQueueRequest(scope=arguments.one_of("scope", scope, _SCOPES))
        spec = fleet_pb2.OperationSpec(reorder=request, wait=arguments.flag("wait", wait))
        return await self._run(spec, replicas, timeout_s, rollout, operation_id)

    async def relieve_admission(
        self, *, replicas: str = "all", timeout_s: float = DEFAULT_TIMEOUT_S, operation_id: str = ""
    ) -> FleetResult:
        """Give back the blocks of waiting requests where they deadlock admissions."""
        spec = fleet_pb2.OperationSpec(relieve=replica_pb2.RelieveAdmissionRequest())
        return await self._run(spec, replicas, timeout_s, None, operation_id)

    async def resume_scheduling(
        self,
        *,
        replicas: str = "all",
        pause_operation_id: str = "",
        force: bool = False,
        weight_version: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> FleetResult:
        """Schedule again, such as after an abandoned weight update.

        A pause whose lease is alive has an owner: it ends only by `pause_operation_id`, the id of the operation that
        paused or the one that a refusal shows, or with `force`, whoever holds it. RequestInvalid when both are given.
        """
        resume = replica_pb2.ResumeSchedulingRequest(
            pause_request_id=arguments.operation_id("pause_operation_id", pause_operation_id),
            weight_version=arguments.text("weight_version", weight_version, longest=LONGEST_WEIGHT_VERSION),
            force=arguments.flag("force", force),
        )
        if resume.force and resume.pause_request_id:
            raise RequestInvalid("force ends whatever pause there is, pause_operation_id the one it names; give one")
        return await self._run(fleet_pb2.OperationSpec(resume=resume), replicas, timeout_s, None, "")

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
    ) -> WeightUpdate:
        """A weight update as one transaction; use it as `async with`. See `weights` for what happens when."""
        plan = UpdatePlan(weight_version, lease_s, on_abandon, running_requests, require_all, step_timeout_s)
        return WeightUpdate(_TakingPart(self, arguments.replicas(replicas)), plan)

    # --- reading -------------------------------------------------------------------------------------------------

    async def admission(self, *, replicas: str = "all", timeout_s: float = 5.0) -> tuple[ReplicaAdmission, ...]:
        """Whether each engine admits requests, and if not, why."""
        chosen, limit_s = arguments.replicas(replicas), arguments.timeout("timeout_s", timeout_s)
        with _as_errors():
            answer = await self._reach.admission(chosen, limit_s)
        return tuple(replica_admission(row) for row in answer.replicas)

    async def watch_admission(
        self, *, replicas: str = "all", interval_s: float = 0.0
    ) -> AsyncIterator[ReplicaAdmission]:
        """Admission whenever a verdict changes, and every `interval_s` when that is not 0. Ends only when you stop."""
        chosen, every_s = arguments.replicas(replicas), arguments.interval("interval_s", interval_s)
        with _as_errors():
            async for sample in self._reach.watch(chosen, every_s):
                yield replica_admission(sample.replica)

    async def replicas(self, *, replicas: str = "all") -> tuple[fleet_pb2.FleetReplica, ...]:
        """Every replica with what it says of itself."""
        chosen = arguments.replicas(replicas)
        with _as_errors():
            return tuple((await self._reach.replicas(chosen)).replicas)

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _reach(self) -> Reach:
        loop = asyncio.get_running_loop()
        if self._opened is not None and self._loop is not loop:
            raise RequestInvalid("this fleet was entered on another event loop; make another one here")
        if self._opened is None:
            with _as_errors():
                if self._security.tls is not None:
                    # gRPC takes any file, and says of each handshake later that nobody answers.
                    self._security.tls.check()
                if self._coordinator:
                    self._opened = CoordinatorReach(self._coordinator, self._security)
                else:
                    self._opened = DirectReach(discovery_of(self._targets, self._inventory or ""), self._security)
            self._loop = loop
        return self._opened

    async def _run(
        self,
        spec: fleet_pb2.OperationSpec,
        replicas: str,
        timeout_s: float,
        rollout: fleet_pb2.Rollout | None,
        operation_id: str,
    ) -> FleetResult:
        spec.targets.CopyFrom(arguments.replicas(replicas))
        spec.timeout.FromTimedelta(timedelta(seconds=arguments.timeout("timeout_s", timeout_s)))
        if (given := arguments.rollout(rollout)) is not None:
            spec.rollout.CopyFrom(given)
        same_id = arguments.operation_id("operation_id", operation_id)
        arguments.sensible(spec)
        with _as_errors():
            return fleet_result(await self._reach.run(spec, same_id))

    async def _taking_part(self, chosen: fleet_pb2.Targets) -> tuple[Sequence[Aim], Mapping[str, KvctlError], Channels]:
        """Also with a coordinator the replicas are called from here: leases are renewed by whoever may die."""
        with _as_errors():
            reach = self._reach
            if isinstance(reach, DirectReach):
                resolved = await reach.resolve(chosen, ask_all=True)
                absent = {
                    row.replica: error_for(row.code, row.reason, row.message, row.replica)
                    for row in resolved.apart
                    if row.reason != DUPLICATE_TARGET  # its replica takes part through its other address
                }
                for aim in resolved.aims:
                    if failure := resolved.failures.get(aim.address):
                        absent[aim.name] = error_for(failure.code, failure.reason, failure.message, aim.name)
                aims = [aim for aim in resolved.aims if aim.name not in absent]
                return aims, absent, reach.channels
            listed = await reach.replicas(chosen)
            lost = {
                row.name: error_for(row.code, row.reason, row.message, row.name)
                for row in listed.replicas
                if not row.reachable
            }
            found = [Aim(row.name, row.address, dict(row.info.labels)) for row in listed.replicas if row.reachable]
            self._sidecars = self._sidecars or Channels(self._security)
            return found, lost, self._sidecars


class _TakingPart:
    """A fleet and a selection, for an update to begin with."""

    def __init__(self, fleet: Fleet, chosen: fleet_pb2.Targets) -> None:
        self._fleet = fleet
        self._chosen = chosen

    async def taking_part(self) -> tuple[Sequence[Aim], Mapping[str, KvctlError], Channels]:
        """See PausableFleet."""
        return await self._fleet._taking_part(self._chosen)


@contextmanager
def _as_errors() -> Iterator[None]:
    """Everything that goes wrong as one of the client's own exceptions."""
    try:
        yield
    except (SelectorError, PolicyError, ValueError, InventoryUnreadable) as error:
        raise RequestInvalid(str(error)) from error
    except DiscoveryError as error:
        raise ReplicaUnavailable(str(error)) from error
    except CoordinatorError as error:
        raise error_for(error.failure.code, error.failure.reason, str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise RequestInvalid(f"{where}{error.strerror or error}") from error
