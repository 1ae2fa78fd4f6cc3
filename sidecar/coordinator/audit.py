"""Who asked this coordinator for what, and what it did at each replica: a line before, and a line after.

A fleet operation has its pair of lines, and so has every call to a replica, with the operation it belongs to. A line
before that cannot be written refuses what it stands for: the request as a whole, or one call and with it the rest of
the rollout. A line after that cannot be written is told in the log; what happened has happened.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict
from kvctl.v1 import fleet_pb2

from sidecar.coordinator import outcomes
from sidecar.coordinator.port import Aim, Journal, JournalError
from sidecar.rpc.audit import AuditLog
from sidecar.rpc.auth import Caller

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and from where."""

    caller: Caller
    peer: str
    """As gRPC names it, e.g. "ipv4:10.0.0.1:40000"."""


class FleetAudit:
    """The audit log of one coordinator."""

    def __init__(self, log: AuditLog) -> None:
        self.log = log

    def begin(self, asker: Asker, what: str, operation_id: str, details: Mapping[str, object] | None = None) -> None:
        """Before a request is carried out. `rpc.errors.Failure` when the line cannot be written."""
        self.log.begin(asker.caller, asker.peer, what, operation_id, details or {})

    def resumed(self, operation: fleet_pb2.FleetOperation, caller: str) -> None:
        """An operation is taken up again after a crash, for whoever asked for it then."""
        self._write("begin", kind_of(operation), operation.operation_id, {"caller": caller, "resumed": True})

    def end(self, caller: str, what: str, operation_id: str, details: Mapping[str, object]) -> None:
        """After a request was carried out, or has failed."""
        self._write("end", what, operation_id, {"caller": caller, **details})

    def journal(
        self, journal: Journal, operation: fleet_pb2.FleetOperation, aims: Sequence[Aim], caller: str
    ) -> Journal:
        """A journal that also writes the lines of each call."""
        return _AuditedJournal(journal, self, operation, aims, caller)

    def call_begins(self, what: str, request_id: str, details: Mapping[str, object]) -> None:
        """Before a replica is called. JournalError when the line cannot be written."""
        try:
            self.log.write("begin", what, request_id, details)
        except OSError as error:
            raise JournalError(self.log.explain(error)) from error

    def call_ended(self, what: str, request_id: str, details: Mapping[str, object]) -> None:
        """After a replica was called."""
        self._write("end", what, request_id, details)

    def _write(self, event: str, what: str, request_id: str, details: Mapping[str, object]) -> None:
        try:
            self.log.write(event, what, request_id, details)
        except OSError as error:
            _log.error("audit line not written event=%s id=%s: %s", event, request_id, self.log.explain(error))


class _AuditedJournal:
    """The `port.Journal` of one operation. An intent is on record in both places or the call is not made."""

    def __init__(
        self,
        journal: Journal,
        audit: FleetAudit,
        operation: fleet_pb2.FleetOperation,
        aims: Sequence[Aim],
        caller: str,
    ) -> None:
        self._journal = journal
        self._audit = audit
        self._kind = kind_of(operation)
        self._about: dict[str, object] = {"fleet_operation": operation.operation_id, "caller": caller}
        self._addresses = {aim.name: aim.address for aim in aims}

    async def intent(self, target: str, request_id: str, wave: int) -> None:
        """See `port.Journal`."""
        about = self._of(target)
        self._audit.call_begins(self._kind, request_id, about)
        try:
            await self._journal.intent(target, request_id, wave)
        except JournalError as error:
            self._audit.call_ended(self._kind, request_id, {**about, "outcome": "not called", "message": str(error)})
            raise

    async def result(self, result: fleet_pb2.TargetResult) -> None:
        """See `port.Journal`."""
        try:
            await self._journal.result(result)
        finally:
            if result.request_id:
                word = outcomes.enum_word(fleet_pb2.TargetOutcome.DESCRIPTOR, result.outcome, "TARGET_OUTCOME_")
                how = {"outcome": word, "code": result.code, "reason": result.reason, "attempts": result.attempts}
                self._audit.call_ended(self._kind, result.request_id, {**self._of(result.replica), **how})

    async def unhealthy(self, target: str, why: str) -> None:
        """See `port.Journal`."""
        await self._journal.unhealthy(target, why)

    def _of(self, target: str) -> dict[str, object]:
        return {**self._about, "replica": target, "address": self._addresses.get(target, "")}


def kind_of(operation: fleet_pb2.FleetOperation) -> str:
    """Name of an operation's kind: "reset"."""
    return str(operation.spec.WhichOneof("operation"))


def asked_for(spec: fleet_pb2.OperationSpec) -> dict[str, object]:
    """What the line says of a request: all that it set. Requests hold no secrets."""
    return {"spec": MessageToDict(spec, preserving_proto_field_name=True)}
