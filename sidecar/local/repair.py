"""`kvctl local up` on a fleet that has lost a part: start only what is missing, on the ports it had.

The keeper starts it, as it started everything else, and the fleet's other replicas go on meanwhile. The command asks
the keeper with a signal and then watches the record and the logs, so that it may be interrupted without harm.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from sidecar.local import boot_log
from sidecar.local.health import SILENT, engine_state, is_lost, serves, sidecar_lost
from sidecar.local.layout import Fleet, LocalError, Replica, read_record
from sidecar.local.processes import alive, send
from sidecar.local.progress import boot_progress

ASKED: Final = signal.SIGUSR1
"""What asks a keeper to look after its fleet."""

_POLL_SECONDS: Final = 0.2


def repaired(fleet: Fleet, state: Path, asked_replicas: int | None, boot_seconds: float) -> Fleet:
    """The fleet with everything it had at first. LocalError when nothing is missing, or when it does not come up."""
    size = len(fleet.replicas)
    if not fleet.booted:
        raise LocalError("a local fleet is still booting; see `kvctl local status`")
    if asked_replicas is not None and asked_replicas != size:
        raise LocalError(
            f"a local fleet of {size} is up, not of {asked_replicas}; end it with `kvctl local down`, then boot another"
        )
    directory = Path(fleet.directory)
    states = {replica.name: engine_state(replica, directory) for replica in fleet.replicas}
    found = [(replica, losses(replica, states[replica.name])) for replica in fleet.replicas]
    lost = {replica.name: (replica, parts) for replica, parts in found if parts}
    silent = ", ".join(name for name, state in states.items() if state == SILENT)
    if silent and not lost:
        raise LocalError(
            f"{silent}: the engine runs and does not answer; try again in a moment, or end the fleet with "
            "`kvctl local down`",
            exit_code=1,
        )
    if not lost:
        raise LocalError("a local fleet is up already, with nothing missing; end it with `kvctl local down`")
    for replica, parts in found:
        if parts:
            click.echo(f"{replica.name}: its {' and '.join(parts)} is gone and is started again", err=True)
    if not send(fleet.keeper, ASKED):
        raise LocalError("the fleet's keeper is gone; `kvctl local up` again boots a new fleet", exit_code=1)
    return _await(lost, state, boot_seconds)


def losses(replica: Replica, state: str) -> list[str]:
    """Which parts of a replica are gone: engine, sidecar. `state`: of its engine."""
    lost = ["engine"] if is_lost(state) else []
    return [*lost, "sidecar"] if sidecar_lost(replica) else lost


def _await(lost: Mapping[str, tuple[Replica, list[str]]], state: Path, boot_seconds: float) -> Fleet:
    deadline = time.monotonic() + boot_seconds
    waiting = dict(lost)
    stages: dict[str, str] = {}
    with boot_progress(len(lost)) as progress:
        while True:
            fleet = read_record(state)
            if fleet is None or not alive(fleet.keeper):
                raise LocalError("the local fleet was ended meanwhile (`kvctl local down`?)", exit_code=1)
            for replica in fleet.replicas:
                before = waiting.get(replica.name)
                if before is None or not _started_again(*before, replica):
                    continue
                _check_alive(replica)
                stage = boot_log.stage_of(Path(replica.engine_log))
                if serves(replica):
                    del waiting[replica.name]
                    progress.ready(replica.name)
                elif stages.get(replica.name) != stage:
                    stages[replica.name] = stage
                    progress.stage(replica.name, stage)
            if not waiting:
                return fleet
            if time.monotonic() > deadline:
                logs = ", ".join(replica.engine_log for replica, _ in waiting.values())
                text = f"{', '.join(waiting)} not ready within {boot_seconds:.0f} s (log: {logs})"
                raise LocalError(text, exit_code=1)
            time.sleep(_POLL_SECONDS)


def _started_again(before: Replica, parts: list[str], now: Replica) -> bool:
    """Whether the keeper has started every part that was gone; it records each with its new process."""
    engine = "engine" not in parts or now.engine != before.engine
    return engine and ("sidecar" not in parts or now.sidecar_process != before.sidecar_process)


def _check_alive(replica: Replica) -> None:
    """LocalError when a part that was started again has ended again; the rest of the fleet goes on."""
    if replica.engine is None or not alive(replica.engine):
        said = boot_log.last_error(Path(replica.engine_log))
        raise LocalError(f"{replica.name}: its vLLM ended again: {said} (log: {replica.engine_log})", exit_code=1)
    if sidecar_lost(replica):
        said = boot_log.last_error(Path(replica.sidecar_log))
        raise LocalError(f"{replica.name}: its sidecar ended again: {said} (log: {replica.sidecar_log})", exit_code=1)
