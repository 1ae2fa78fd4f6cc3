"""The keeper: the one process that starts a local fleet and outlives the command that asked for it.

`kvctl local up` and `kvctl demo` can be interrupted or killed at any moment, and no vLLM process may be left then. So
they start nothing but a keeper, and hold a pipe to it. End of file on the pipe before the word "stay" means that the
command is gone, however it went, and the keeper ends everything. The keeper is the subreaper of what it starts, so
orphans come to it; and what it starts is signalled by the kernel should the keeper itself be killed.

On its standard input: one line with the plan (JSON), then perhaps "stay". On its standard output: events, one JSON
object a line. SIGTERM ends the fleet; the signal of `repair` has it start again what is gone of it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from sidecar.local import boot_log, programs
from sidecar.local.health import SILENT, engine_state, is_lost, serves, sidecar_lost
from sidecar.local.layout import (
    Fleet,
    LocalError,
    Replica,
    make_run_directory,
    remove_record,
    write_inventory,
    write_record,
)
from sidecar.local.processes import ProcessRef, end, reference, stat_of
from sidecar.local.programs import Program, Settings
from sidecar.local.repair import ASKED

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_SECONDS: Final = 0.2
_GRACE_SECONDS: Final = 15.0
"""Time for vLLM to end its own children."""


class Plan(msgspec.Struct, frozen=True):
    """What the keeper is asked to run."""

    settings: Settings
    state: str


class Event(msgspec.Struct, frozen=True):
    """One step of the boot."""

    kind: Literal["stage", "ready", "failed", "booted", "ended"]
    replica: str = ""
    text: str = ""
    exit_code: int = 0


class _Stop(Exception):  # noqa: N818 - not an error
    """The fleet is to end now."""


class Keeper:
    """Boots the fleet, then waits for its end."""

    def __init__(self, plan: Plan, tell: Callable[[Event], None]) -> None:
        self._settings = plan.settings
        self._state = Path(plan.state)
        self._tell = tell
        self._stages: dict[str, str] = {}
        self._staying = False
        self._repair_asked = False
        self._wakes = _waking_pipe()
        self.run: Path | None = None
        self.replicas: list[Replica] = []

    def keep(self) -> None:
        """Boot and wait; returns when the fleet is to end. LocalError when it does not come up."""
        self.run = make_run_directory(self._settings.directory, self._settings.replicas)
        self.replicas = programs.plan(self._settings, self._state)
        for index, replica in enumerate(self.replicas):
            programs.engine_directory(self.run, replica).mkdir(mode=0o700)
            for log in (replica.engine_log, replica.sidecar_log):
                Path(log).unlink(missing_ok=True)
            self._start_engine(index, self.run)
            self._start_sidecar(index, self.run)
            self._record(booted=False)
        self._await_ready()
        write_inventory(self._state, self.replicas)
        self._record(booted=True)
        self._tell(Event("booted"))
        while True:
            self._wait(60.0)
            if self._repair_asked:
                self._repair_asked = False
                self._repair(self.run)

    def _repair(self, run: Path) -> None:
        """Start again what is gone, where it was. What comes of it is seen by whoever asked."""
        for index, replica in enumerate(self.replicas):
            if self._engine_ended(replica, run):
                if replica.engine is not None:
                    end([replica.engine], run, _GRACE_SECONDS)
                boot_log.begin_anew(Path(replica.engine_log))
                self._start_engine(index, run)
                self._record(booted=True)
            if sidecar_lost(replica):
                boot_log.begin_anew(Path(replica.sidecar_log))
                self._start_sidecar(index, run)
                self._record(booted=True)

    def _engine_ended(self, replica: Replica, run: Path) -> bool:
        """Whether the engine is lost; one that answers nothing may be about to end, and is waited for."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (state := engine_state(replica, run)) == SILENT and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return is_lost(state)

    def _start_engine(self, index: int, run: Path) -> None:
        replica = self.replicas[index]
        process = self._start(programs.engine(replica, run, self._settings))
        self.replicas[index] = replace(replica, engine=process)

    def _start_sidecar(self, index: int, run: Path) -> None:
        replica = self.replicas[index]
        self.replicas[index] = replace(replica, sidecar_process=self._start(programs.sidecar(replica, run)))

    def end(self) -> list[ProcessRef]:
        """End every process of the fleet and remove what it left; returns what would not die."""
        if self.run is None:
            return []
        leaders = Fleet(reference(os.getpid()), str(self.run), self.replicas).leaders()
        left = end(leaders, self.run, _GRACE_SECONDS)
        _reap()
        remove_record(self._state)
        shutil.rmtree(self.run, ignore_errors=True)
        return left

    def _start(self, program: Program) -> ProcessRef:
        log = os.open(program.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            child = subprocess.Popen(
                program.arguments,
                env=program.environment,
                cwd=self.run,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(_die_with, os.getpid()),
            )
        finally:
            os.close(log)
        return reference(child.pid)

    def _record(self, *, booted: bool) -> None:
        fleet = Fleet(reference(os.getpid()), str(self.run), self.replicas, booted)
        write_record(self._state, fleet)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._settings.boot_seconds
        waiting = {replica.name: replica for replica in self.replicas}
        while waiting:
            for replica in list(waiting.values()):
                self._check_alive(replica)
                self._tell_stage(replica)
                if serves(replica):
                    del waiting[replica.name]
                    self._tell(Event("ready", replica.name))
            if waiting and time.monotonic() > deadline:
                names = ", ".join(waiting)
                logs = ", ".join(replica.engine_log for replica in waiting.values())
                seconds = self._settings.boot_seconds
                raise LocalError(f"{names} not ready within {seconds:.0f} s (log: {logs})", exit_code=1)
            self._wait(_POLL_SECONDS)

    def _check_alive(self, replica: Replica) -> None:
        for what, process, log in (
            ("vLLM", replica.engine, replica.engine_log),
            ("sidecar", replica.sidecar_process, replica.sidecar_log),
        ):
            found = stat_of(process.pid) if process else None
            if found is None or found.state in "ZX":
                said = boot_log.last_error(Path(log))
                raise LocalError(f"{replica.name}: its {what} ended while booting: {said} (log: {log})", exit_code=1)

    def _tell_stage(self, replica: Replica) -> None:
        stage = boot_log.stage_of(Path(replica.engine_log))
        if self._stages.get(replica.name) != stage:
            self._stages[replica.name] = stage
            self._tell(Event("stage", replica.name, stage))

    def _wait(self, seconds: float) -> None:
        """Pass the time, collecting dead children; _Stop on SIGTERM, or when the command went without a "stay"."""
        watched = [self._wakes] if self._staying else [self._wakes, 0]
        readable, _, _ = select.select(watched, [], [], seconds)
        numbers = os.read(self._wakes, 512) if self._wakes in readable else b""
        if signal.SIGTERM in numbers:
            raise _Stop
        self._repair_asked |= ASKED in numbers
        _reap()
        if 0 not in readable:
            return
        if b"stay" not in os.read(0, 64):
            raise _Stop
        self._staying = True


def _waking_pipe() -> int:
    """A descriptor that gives the number of each SIGTERM, SIGCHLD and request for a repair.

    The handlers themselves do nothing: one that raised could do so between a fork and the note of its pid.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD, ASKED):
        signal.signal(number, lambda number, frame: None)
    return readable


def _die_with(keeper: int) -> None:
    """In the child: SIGTERM from the kernel when the keeper dies, so that vLLM still ends its own children."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != keeper:
        os._exit(1)  # it died before that call


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _tell(event: Event) -> None:
    try:
        os.write(1, msgspec.json.encode(event) + b"\n")
    except BrokenPipeError:
        return  # the command is gone; its end of the other pipe decides what follows


def main() -> int:
    """Run as `python -m sidecar.local.keeper`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:  # what follows the line is for select
        line = unbuffered.readline()
    if not line:
        return 0
    keeper = Keeper(msgspec.json.decode(line, type=Plan), _tell)
    code = 1
    try:
        keeper.keep()
    except _Stop:
        code = 0
    except LocalError as error:
        _tell(Event("failed", text=str(error), exit_code=error.exit_code))
        code = error.exit_code
    except OSError as error:
        _tell(Event("failed", text=f"{error.filename or 'local fleet'}: {error.strerror}", exit_code=1))
        code = 1
    finally:
        left = keeper.end()
    if left:
        _tell(Event("failed", text=f"processes that would not die: {[process.pid for process in left]}", exit_code=1))
    _tell(Event("ended"))
    return code


if __name__ == "__main__":
    sys.exit(main())
