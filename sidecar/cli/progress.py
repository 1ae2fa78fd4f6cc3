"""A line on the terminal while an operation runs. Without a terminal: nothing, logs stay clean."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from kvctl.v1 import fleet_pb2

from sidecar.cli.printers import style

_FINAL = frozenset(
    {
        fleet_pb2.TARGET_OUTCOME_SUCCEEDED,
        fleet_pb2.TARGET_OUTCOME_FAILED,
        fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
        fleet_pb2.TARGET_OUTCOME_UNKNOWN,
        fleet_pb2.TARGET_OUTCOME_SKIPPED,
        fleet_pb2.TARGET_OUTCOME_CANCELLED,
    }
)


class Progress:
    """Counts, and for whom it waits: 12 of 50 done, 1 not succeeded, waiting for r7."""

    def __init__(self, stream: TextIO) -> None:
        self._status = None
        self._running: set[str] = set()
        self._done: dict[str, bool] = {}
        self._health: dict[str, str] = {}
        if stream.isatty():
            from rich.status import Status

            spinner = "line" if style.plain(stream) else "dots"
            self._status = Status("asking who is there", console=style.console(stream), spinner=spinner)

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line."""
        if self._status:
            self._status.stop()
            self._status = None

    def changed(self, row: fleet_pb2.TargetResult, targets: int) -> None:
        """A row has changed."""
        if row.outcome in _FINAL:
            self._running.discard(row.replica)
            self._done[row.replica] = row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
        elif row.outcome != fleet_pb2.TARGET_OUTCOME_UNSPECIFIED:  # its turn has come
            self._running.add(row.replica)
        self._health.pop(row.replica, None)
        if row.health:
            self._health[row.replica] = row.health
        if self._status:
            self._status.update(self.text(targets))

    def text(self, targets: int) -> str:
        """The line. While a wave is looked at it ends in what the next one waits for, of the replica told of last."""
        total = max(targets, len(self._done) + len(self._running))
        parts = [f"{len(self._done)} of {total} done"]
        if failed := sum(not succeeded for succeeded in self._done.values()):
            parts.append(f"{failed} not succeeded")
        if 0 < len(self._running) <= 3:
            parts.append(f"waiting for {', '.join(sorted(self._running))}")
        elif self._health and not self._running:
            parts.append(": ".join(list(self._health.items())[-1]))
        return style.clean(", ".join(parts))
