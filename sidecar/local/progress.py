"""How far a boot is: rewritten lines on a terminal, one line a change elsewhere. All of it on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class BootProgress(Protocol):
    """Told what a boot does."""

    def stage(self, replica: str, text: str) -> None:
        """A replica has come to a stage."""
        ...

    def ready(self, replica: str) -> None:
        """A replica serves."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def boot_progress(replicas: int) -> BootProgress:
    """The display that fits where stderr goes."""
    return TerminalProgress(replicas) if sys.stderr.isatty() else PlainProgress(replicas)


def _heading(replicas: int) -> str:
    return f"Booting {replicas} vLLM replica{'s' if replicas > 1 else ''} on the CPU, about half a minute each."


class PlainProgress:
    """A line a change, for logs and CI."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._started = 0.0

    def stage(self, replica: str, text: str) -> None:
        """Print it with the seconds since the start."""
        if not self._started:
            click.echo(_heading(self._replicas), err=True)
            self._started = time.monotonic()
        click.echo(f"[{time.monotonic() - self._started:5.1f} s] {replica}: {text}", err=True)

    def ready(self, replica: str) -> None:
        """Print it."""
        self.stage(replica, "ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class TerminalProgress:
    """One line a replica, rewritten."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._tasks: dict[str, TaskID] = {}
        self._shown: Progress | None = None

    def stage(self, replica: str, text: str) -> None:
        """Rewrite the replica's line."""
        shown = self._shown or self._begin()
        if replica not in self._tasks:
            self._tasks[replica] = shown.add_task(replica, total=1, stage=text)
        shown.update(self._tasks[replica], stage=text)

    def ready(self, replica: str) -> None:
        """Rewrite the replica's line and stop its spinner."""
        self.stage(replica, "ready")
        if self._shown is not None:
            self._shown.update(self._tasks[replica], completed=1)

    def __enter__(self) -> Self:
        return self

    def _begin(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        console.print(_heading(self._replicas))
        columns = SpinnerColumn(finished_text="+"), TextColumn("{task.description}"), TimeElapsedColumn()
        self._shown = Progress(*columns, TextColumn("{task.fields[stage]}"), console=console)
        self._shown.start()
        return self._shown

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
