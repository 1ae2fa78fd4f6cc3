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


class PlainProgress:
    """A line a change, for logs and CI."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._started = time.monotonic()

    def stage(self, replica: str, text: str) -> None:
        """Print it with the seconds since the start."""
        click.echo(f"[{time.monotonic() - self._started:5.1f} s] {replica}: {text}", err=True)

    def ready(self, replica: str) -> None:
        """Print it."""
        self.stage(replica, "ready")

    def __enter__(self) -> Self:
        many = "s" if self._replicas > 1 else ""
        click.echo(f"Booting {self._replicas} vLLM replica{many} on the CPU, about half a minute each.", err=True)
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
        if self._shown is None:
            return
        if replica not in self._tasks:
            self._tasks[replica] = self._shown.add_task(replica, total=1, stage=text)
        self._shown.update(self._tasks[replica], stage=text)

    def ready(self, replica: str) -> None:
        """Rewrite the replica's line and stop its spinner."""
        self.stage(replica, "ready")
        if self._shown is not None:
            self._shown.update(self._tasks[replica], completed=1)

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        many = "s" if self._replicas > 1 else ""
        console = Console(stderr=True)
        console.print(f"Booting {self._replicas} vLLM replica{many} on the CPU, about half a minute each.")
        self._shown = Progress(
            SpinnerColumn(finished_text="+"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[stage]}"),
            console=console,
        )
        self._shown.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
