"""A fleet of real vLLM replicas on this machine: up, down, status.

Each function here is a whole command: it prints, and returns kvctl's exit code. What runs is looked after by a keeper
process, see `keeper`; what a boot needs of it is `Booting`, which the demo shares.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

from sidecar.local import programs
from sidecar.local.health import engine_state, is_lost, sidecar_lost
from sidecar.local.keeper import Event, Plan
from sidecar.local.layout import (
    INVENTORY,
    LOGS,
    Fleet,
    LocalError,
    Replica,
    prepare_state,
    read_record,
    remove_record,
    state_directory,
    take_lock,
)
from sidecar.local.processes import ProcessRef, alive, end, send
from sidecar.local.programs import Settings
from sidecar.local.progress import boot_progress
from sidecar.local.repair import repaired

_KEEPER_SECONDS: Final = 40.0
"""Time for a keeper to end its fleet, well over what it gives vLLM before SIGKILL."""


def up(settings: Settings, asked_replicas: int | None = None) -> int:
    """`kvctl local up`: boot a fleet and leave it running, or start again what is gone of the one that is up.

    `asked_replicas`: how many were asked for, None when the number was left open.
    """
    state = state_directory()
    standing: Fleet | None = None
    try:
        standing = _standing(state)
        if standing is not None:
            fleet = repaired(standing, state, asked_replicas, settings.boot_seconds)
        else:
            with booted(settings) as booting:
                booting.stay()
                fleet = booting.fleet
    except LocalError as error:
        return _complain(error)
    except KeyboardInterrupt:
        left = "the fleet goes on; see `kvctl local status`" if standing else "nothing is left running"
        click.echo(f"kvctl: interrupted; {left}", err=True)
        return 130
    _show(_rows(fleet))
    click.echo(
        "\nCommands find this fleet by themselves, for example:\n"
        "  kvctl reset --mode keep --replicas all\n  kvctl admission --watch\n  kvctl local down",
        err=True,
    )
    return 0


def _standing(state: Path) -> Fleet | None:
    """The fleet that is up; None when there is none, or when its keeper is gone: then it is cleared away."""
    fleet = read_record(state)
    return fleet if fleet is not None and alive(fleet.keeper) else None


def down() -> int:
    """`kvctl local down`: end exactly the processes of the fleet, and remove its sockets."""
    state = state_directory()
    try:
        fleet = read_record(state)
        if fleet is None:
            lock = take_lock(state) if state.is_dir() else -1
            if lock is None:
                raise LocalError("a local fleet is about to start; interrupt its command, or try again in a moment")
            if lock >= 0:
                os.close(lock)
            click.echo("no local fleet is up", err=True)
            return 0
        sweep(fleet, state)
    except LocalError as error:
        return _complain(error)
    count = len(fleet.replicas)
    click.echo(f"{count} replica{'s' if count != 1 else ''} ended, nothing left running", err=True)
    return 0


def status() -> int:
    """`kvctl local status`: what runs. 0 all of it, 3 some, 1 nothing of it, 4 there is no fleet."""
    state = state_directory()
    try:
        fleet = read_record(state)
    except LocalError as error:
        return _complain(error)
    if fleet is None:
        click.echo("no local fleet is up; `kvctl local up` boots one", err=True)
        return 4
    rows = _rows(fleet)
    _show(rows)
    click.echo(f"\ninventory: {state / INVENTORY}\nlogs:      {state / LOGS}\nsockets:   {fleet.directory}", err=True)
    if not fleet.booted:
        click.echo("the fleet is still booting", err=True)
    if not alive(fleet.keeper):
        click.echo("the fleet's keeper is gone; `kvctl local down` cleans up", err=True)
    if fleet.booted and any(is_lost(row.engine) or row.sidecar == "dead" for row in rows):
        click.echo("`kvctl local up` starts again what is gone", err=True)
    well = [row.engine == "serving" and row.sidecar == "running" for row in rows]
    if all(well):
        return 0
    return 3 if any(well) else 1


def sweep(fleet: Fleet, state: Path) -> None:
    """End a recorded fleet, through its keeper if it lives and without it if not. LocalError if anything stays."""
    if send(fleet.keeper, signal.SIGTERM) and not _await_end(fleet.keeper):
        send(fleet.keeper, signal.SIGKILL)
    directory = Path(fleet.directory)
    # A keeper that was killed leaves the work to us; one that ended in good order leaves nothing to do here.
    left = end(fleet.leaders(), directory, patience_seconds=15.0)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise LocalError(f"processes that would not die: {pids}; they are stuck in the kernel", exit_code=1)
    remove_record(state)
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def booted(settings: Settings) -> Iterator[Booting]:
    """A fleet that serves, with progress shown on the way; it ends with the block unless `stay` was called.

    LocalError when it does not come up; nothing is then left.
    """
    programs.check(settings)
    state = state_directory()
    prepare_state(state)
    lock = take_lock(state)
    if lock is None:
        raise LocalError("a local fleet is up already; see `kvctl local status`, end it with `kvctl local down`")
    try:
        stale = read_record(state)
        if stale is not None:
            click.echo("kvctl: clearing away a local fleet whose keeper was killed", err=True)
            sweep(stale, state)
        booting = Booting(settings, state, lock)
    finally:
        os.close(lock)
    try:
        booting.follow()
        yield booting
    finally:
        booting.finish()


class Booting:
    """A keeper at work, seen from the command that started it."""

    def __init__(self, settings: Settings, state: Path, lock: int) -> None:
        """Start the keeper, which inherits the fleet's lock."""
        self._state = state
        self._settings = settings
        self._log = state / LOGS / "keeper.log"
        with self._log.open("wb") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "sidecar.local.keeper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )
        self._stays = False

    @property
    def fleet(self) -> Fleet:
        """The record of the fleet. LocalError when somebody ended it meanwhile."""
        fleet = read_record(self._state)
        if fleet is None:
            raise LocalError("the local fleet was ended meanwhile (`kvctl local down`?)", exit_code=1)
        return fleet

    def follow(self) -> None:
        """Show the boot until the fleet serves. LocalError when it does not come to that."""
        self._write(msgspec.json.encode(Plan(self._settings, str(self._state))) + b"\n")
        failure: LocalError | None = None
        with boot_progress(self._settings.replicas) as progress:
            for event in self._events():
                if event.kind == "stage":
                    progress.stage(event.replica, event.text)
                elif event.kind == "ready":
                    progress.ready(event.replica)
                elif event.kind == "failed":
                    failure = LocalError(event.text, event.exit_code)
                elif event.kind == "booted":
                    return
        raise failure or LocalError(f"the fleet ended while booting (log: {self._log})", exit_code=1)

    def stay(self) -> None:
        """Let the fleet outlive this process."""
        self._write(b"stay\n")
        self._stays = True

    def finish(self) -> None:
        """End the fleet and wait for that, unless it stays. The keeper does it even if this wait is cut short."""
        assert self._keeper.stdin
        assert self._keeper.stdout
        with suppress(BrokenPipeError):  # the keeper has ended by itself
            self._keeper.stdin.close()
        if not self._stays:
            self._await_keeper()
        self._keeper.stdout.close()
        self._keeper.returncode = self._keeper.returncode or 0  # it lives on: no complaint from Popen's destructor

    def _await_keeper(self) -> None:
        try:
            self._keeper.wait(timeout=_KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        # A keeper that was killed could not end its fleet.
        record = read_record(self._state)
        if record is not None and record.keeper.pid == self._keeper.pid:
            sweep(record, self._state)

    def _write(self, data: bytes) -> None:
        assert self._keeper.stdin
        try:
            self._keeper.stdin.write(data)
            self._keeper.stdin.flush()
        except BrokenPipeError:
            raise LocalError(f"the fleet's keeper ended by itself (log: {self._log})", exit_code=1) from None

    def _events(self) -> Iterator[Event]:
        assert self._keeper.stdout
        for line in self._keeper.stdout:
            yield msgspec.json.decode(line, type=Event)


@dataclass(frozen=True, slots=True)
class _Row:
    replica: Replica
    engine: str
    sidecar: str


def _rows(fleet: Fleet) -> list[_Row]:
    directory = Path(fleet.directory)
    return [
        _Row(replica, engine_state(replica, directory), "dead" if sidecar_lost(replica) else "running")
        for replica in fleet.replicas
    ]


def _show(rows: list[_Row]) -> None:
    table = [("REPLICA", "ENGINE", "OPENAI API", "SIDECAR", "ADDRESS", "METRICS")]
    for row in rows:
        r = row.replica
        metrics = f"http://{r.metrics}/metrics"
        table.append((r.name, row.engine, f"http://{r.api}/v1", row.sidecar, r.sidecar, metrics))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _complain(error: LocalError) -> int:
    click.echo(f"kvctl: {error}", err=True)
    return error.exit_code


def _await_end(keeper: ProcessRef) -> bool:
    deadline = time.monotonic() + _KEEPER_SECONDS
    while alive(keeper):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
