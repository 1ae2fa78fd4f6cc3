"""The audit log of one replica: its name is in every line, and every line after a mutation has the same fields."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sidecar.backends.engine import EngineBackend
from sidecar.replica.requests import Wanted
from sidecar.rpc import audit
from sidecar.rpc.auth import Caller

LOG: Final = logging.getLogger(__name__)

Value = str | int | float | bool | list[int]


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a mutation."""

    code: str
    """Name of a gRPC code."""
    reason: str = ""
    message: str = ""


GONE: Final = Ending("CANCELLED", "OUTCOME_UNKNOWN", "the call ended before every engine had answered")
CUT_SHORT: Final = Ending(
    "DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", "this sidecar was shut down before every engine had answered"
)


class AuditLog(audit.AuditLog):
    """See `sidecar.rpc.audit`."""

    def __init__(self, target: str, replica: str) -> None:
        """`target` is a path, or "-" for stdout. OSError names the setting and the path when it cannot be used."""
        super().__init__(target, {"replica": replica})

    def ended(
        self, caller: Caller, peer: str, operation: str, request_id: str, ending: Ending, took_s: float, **more: Value
    ) -> None:
        """The line after. The mutation has happened, so a line that cannot be written is only logged."""
        told: dict[str, Value] = {
            "code": ending.code,
            "reason": ending.reason,
            "message": ending.message,
            "took_ms": round(took_s * 1e3, 1),
        }
        try:
            self.end(caller, peer, operation, request_id, {**told, **more})
        except OSError as error:
            LOG.error("audit line not written request_id=%s error=%s", request_id, error)


def arguments(wanted: Wanted, targets: Sequence[EngineBackend]) -> dict[str, Value]:
    """What the line before says of a request: every option that is not its default."""
    found: dict[str, Value] = {"engines": [engine.rank for engine in targets]}
    for name in wanted.mutation.__struct_fields__:
        value = getattr(wanted.mutation, name)
        if name not in ("call", "request_id", "deadline_ns") and value:
            found[name] = value
    return found
