"""The exceptions of the client: one a way to fail in the API's error contract.

KvctlError
|-- RequestInvalid          INVALID_ARGUMENT: the request makes no sense; nothing was called
|-- PreconditionFailed      FAILED_PRECONDITION: blocks are held, a connector is still moving data
|-- OperationAborted        ABORTED: another operation runs there
|-- NotSupported            UNIMPLEMENTED: the engine, its version or its backend cannot do it
|-- ReplicaUnavailable      UNAVAILABLE: not reachable, starting, stopping, dead
|   `-- NotASidecar         something else answers at that address
|-- DeadlineExceeded        DEADLINE_EXCEEDED: it did not happen in time, and will not
|   `-- OutcomeUnknown      whether it happened is not known; ask again with the same request id
|-- AccessDenied            UNAUTHENTICATED, PERMISSION_DENIED
|-- TooManyOperations       RESOURCE_EXHAUSTED
|-- OperationNotFound       NOT_FOUND: no operation with that id is on record
|-- OperationCancelled      CANCELLED: withdrawn, or its turn never came
|-- EngineFault             INTERNAL: the operation raised; the engine goes on serving
|-- LeaseLost               a weight update's pause ended before the update did
`-- FleetFailed             some replicas of a fleet did not succeed; `failures` has one of the above for each
"""

# ruff: noqa: N818 - the names are those of the error contract, and all of them are errors

from __future__ import annotations

from collections.abc import Sequence
from typing import Final


class KvctlError(Exception):
    """Anything that kvctl refuses or cannot do."""

    def __init__(self, message: str, *, code: str = "", reason: str = "", replica: str = "") -> None:
        super().__init__(message)
        self.code = code
        """Canonical gRPC code name, e.g. "FAILED_PRECONDITION"; empty when nothing was called."""
        self.reason = reason
        """UPPER_SNAKE reason of errors.proto."""
        self.replica = replica
        """Name of the replica it happened at; empty when it concerns the whole."""


class RequestInvalid(KvctlError):
    """The request makes no sense; nothing was called."""


class PreconditionFailed(KvctlError):
    """Blocks are held, or a connector is still moving data; nothing or not all was done."""


class OperationAborted(KvctlError):
    """Another operation runs on that engine."""


class NotSupported(KvctlError):
    """The engine, its version or its backend cannot do it."""


class ReplicaUnavailable(KvctlError):
    """The replica or an engine of it cannot be reached, is starting, stopping or dead."""


class NotASidecar(ReplicaUnavailable):
    """What answers at the address is no kvctl sidecar."""


class DeadlineExceeded(KvctlError):
    """It did not happen in time, and will not happen later."""


class OutcomeUnknown(DeadlineExceeded):
    """Whether it happened is not known. Repeat it with the same request id: it runs at most once."""


class AccessDenied(KvctlError):
    """No or bad credentials, or a role that is too small."""


class TooManyOperations(KvctlError):
    """Too many operations are queued there."""


class OperationNotFound(KvctlError):
    """No operation with that id is on record."""


class OperationCancelled(KvctlError):
    """It was withdrawn, or its turn never came."""


class EngineFault(KvctlError):
    """The operation raised inside the engine, which goes on serving."""


class LeaseLost(KvctlError):
    """A weight update's pause ended at that replica before the update did."""


class FleetFailed(KvctlError):
    """Some replicas did not succeed."""

    def __init__(self, message: str, failures: Sequence[KvctlError]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        """One error a replica."""


_BY_CODE: Final[dict[str, type[KvctlError]]] = {
    "INVALID_ARGUMENT": RequestInvalid,
    "FAILED_PRECONDITION": PreconditionFailed,
    "ABORTED": OperationAborted,
    "UNIMPLEMENTED": NotSupported,
    "UNAVAILABLE": ReplicaUnavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAUTHENTICATED": AccessDenied,
    "PERMISSION_DENIED": AccessDenied,
    "RESOURCE_EXHAUSTED": TooManyOperations,
    "NOT_FOUND": OperationNotFound,
    "CANCELLED": OperationCancelled,
    "INTERNAL": EngineFault,
}
_BY_REASON: Final[dict[str, type[KvctlError]]] = {
    "NOT_A_SIDECAR": NotASidecar,
    "OUTCOME_UNKNOWN": OutcomeUnknown,
    "UNCONFIRMED": OutcomeUnknown,
}


def error_for(code: str, reason: str, message: str, replica: str = "") -> KvctlError:
    """The exception for one failure, by its reason and else by its code."""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, KvctlError)
    where = f"{replica}: " if replica and not message.startswith(f"{replica}: ") else ""
    return kind(f"{where}{message or reason or code}", code=code, reason=reason, replica=replica)
