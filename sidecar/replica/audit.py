"""The audit log of one replica: its name is in every line."""

from __future__ import annotations

from sidecar.rpc import audit

Value = str | int | float | bool | list[int]


class AuditLog(audit.AuditLog):
    """See `sidecar.rpc.audit`."""

    def __init__(self, target: str, replica: str) -> None:
        """`target` is a path, or "-" for stdout. OSError names the setting and the path when it cannot be used."""
        super().__init__(target, {"replica": replica})
