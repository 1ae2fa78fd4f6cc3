"""What running a fleet operation needs of the world: replicas that can be called, and a journal.

`fanout` implements `Replicas` over gRPC channels; the coordinator's store implements `Journal` on disk; tests
implement both in memory. Names of targets are replica names, unique within one operation. Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvctl.v1 import fleet_pb2


@dataclass(frozen=True, slots=True)
class Aim:
    """One target to call: resolved, ready, and known to be no duplicate."""

    name: str
    """Replica name; unique within the operation."""
    address: str
    """gRPC address."""
    labels: Mapping[str, str] = field(default_factory=dict)
    server_name: str = ""
    """Name to expect in the TLS certificate when it is not the host of `address`."""
    identity: str = ""
    """What request ids are derived from where names are used again for other replicas. Empty: the name that the replica
    gives itself.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call to one replica came to."""

    result: fleet_pb2.TargetResult
    """outcome, code, reason, message, execution, took and the typed result are set; the execution adds the rest.

    A call that certainly never reached the replica (the connection could not be made) says EXECUTION_NOT_EXECUTED; one
    that may have reached it and got no answer says EXECUTION_UNKNOWN. Left unset with code UNAVAILABLE and no reason
    of a sidecar, it is taken for unknown.
    """
    retry_after_s: float = 0.0
    """The delay the replica named (RetryInfo), 0 when it named none."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a replica says of a request id."""

    known: bool | None
    """None: it could not be asked; `answer` then says why."""
    answer: Answer | None = None
    """The final result. None while it is under way, and when the id is not known."""
    records_s: float = math.inf
    """With `known` false: how far back its records reach. Of what began earlier a replica that does not know it cannot
    say that it did not happen: it may have been restarted since, or be another one.
    """


@dataclass(frozen=True, slots=True)
class Health:
    """Whether admissions of a replica flow."""

    healthy: bool
    why: str = ""
    """The verdict or the error that speaks against it."""


class Replicas(Protocol):
    """How replicas are reached. No method raises for what a replica or a network does; each ends by its timeout."""

    async def identify(self, aim: Aim, timeout_s: float) -> str | Answer:
        """What the replica's request ids are derived from. An Answer when it must not be called: nobody is there,
        somebody who is no sidecar, or a replica that this operation calls under another name.
        """
        ...

    async def call(self, aim: Aim, spec: fleet_pb2.OperationSpec, request_id: str, timeout_s: float) -> Answer:
        """Run the operation on one replica, once."""
        ...

    async def ask(self, aim: Aim, request_id: str, timeout_s: float) -> Asked:
        """What became of a request id (CacheAdmin.GetOperation)."""
        ...

    async def health(self, aim: Aim, spec: fleet_pb2.OperationSpec, timeout_s: float) -> Health:
        """Whether the replica is healthy after this operation (CacheAdmin.AdmissionStatus)."""
        ...


class JournalError(Exception):
    """The journal could not put something on record; the text says why, for a person."""


class Journal(Protocol):
    """What must survive the death of whoever runs the operation. Returns when it is on record; raises JournalError."""

    async def intent(self, target: str, request_id: str, wave: int) -> None:
        """Put on record that this target is about to be called with this request id."""
        ...

    async def result(self, result: fleet_pb2.TargetResult) -> None:
        """Put on record how this target has ended."""
        ...

    async def unhealthy(self, target: str, why: str) -> None:
        """Put on record that this target ended well and did not become healthy in time."""
        ...


class NoJournal:
    """For whoever runs an operation and needs no memory of it after its own death."""

    async def intent(self, target: str, request_id: str, wave: int) -> None:
        """Keep nothing."""

    async def result(self, result: fleet_pb2.TargetResult) -> None:
        """Keep nothing."""

    async def unhealthy(self, target: str, why: str) -> None:
        """Keep nothing."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the journal has of one target from before a crash."""

    request_id: str
    wave: int
    result: fleet_pb2.TargetResult | None = None
    """None: the intent is on record and nothing else."""
    unhealthy: str = ""
