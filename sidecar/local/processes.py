"""Which processes are ours, told so that no other is ever ended.

A pid in a file proves nothing: pids repeat, and vLLM's own children appear in no file. So every program of a local
fleet leads a session of its own and runs in the fleet's private directory, and both are inherited by whatever it
starts. A process is ours when its session and its working directory match, and a recorded leader only when its start
time does. Linux never hands out a number that is still somebody's session id, so a session stays recognisable after
its leader is gone.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

_POLL_SECONDS: Final = 0.05
_ORPHAN_SECONDS: Final = 2.0
"""How long processes may outlive the leader that would have ended them in good order."""


class ProcessRef(msgspec.Struct, frozen=True):
    """One process, for good: the pid together with the time it started."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat, clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The part of /proc/PID/stat that tells processes apart."""

    pid: int
    state: str
    session: int
    start_ticks: int


def stat_of(pid: int) -> Stat | None:
    """What /proc says of a pid; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in parentheses may hold spaces and parentheses itself: count from the last one.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(pid, fields[0], int(fields[3]), int(fields[19]))


def reference(pid: int) -> ProcessRef:
    """A reference to a process that runs now. ProcessLookupError when it does not."""
    found = stat_of(pid)
    if found is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessRef(pid, found.start_ticks)


def alive(process: ProcessRef) -> bool:
    """Whether exactly this process runs; a zombie does not."""
    found = stat_of(process.pid)
    return found is not None and found.start_ticks == process.start_ticks and found.state not in "ZX"


def members(leaders: Iterable[ProcessRef], directory: Path) -> list[ProcessRef]:
    """Every live process in the sessions of these leaders whose working directory is `directory`."""
    sessions = {leader.pid: leader.start_ticks for leader in leaders}
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        stat = stat_of(int(entry.name))
        if stat is None or stat.state in "ZX" or stat.session not in sessions:
            continue
        if stat.start_ticks < sessions[stat.session] or not _works_in(stat.pid, directory):
            continue
        found.append(ProcessRef(stat.pid, stat.start_ticks))
    return found


def _works_in(pid: int, directory: Path) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd").removesuffix(" (deleted)") == str(directory)
    except OSError:
        return False  # gone, or another user's


def send(process: ProcessRef, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone. A pidfd closes the gap between looking and signalling."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(process):
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def end(leaders: Iterable[ProcessRef], directory: Path, patience_seconds: float) -> list[ProcessRef]:
    """End these sessions: SIGTERM to the leaders, SIGKILL to whatever is left after `patience_seconds`.

    Returns what would not die within 5 s of the SIGKILL (a process stuck in the kernel); normally nothing.
    """
    leaders = list(leaders)
    for leader in leaders:
        send(leader, signal.SIGTERM)
        send(leader, signal.SIGCONT)  # a stopped process gets its SIGTERM only when it goes on
    if _gone(leaders, directory, patience_seconds):
        return []
    deadline = time.monotonic() + 5
    shared: set[Path] = set()
    left = members(leaders, directory)
    while left and time.monotonic() < deadline:
        for process in left:
            shared |= _shared_memory(process.pid)
            send(process, signal.SIGKILL)
        _gone(leaders, directory, 0.5)
        left = members(leaders, directory)
    for path in shared:
        path.unlink(missing_ok=True)  # whoever would have removed it was killed as well
    return left


def _shared_memory(pid: int) -> set[Path]:
    """Named shared memory that Python's multiprocessing made and this process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    # A line ends with the path, or with " (deleted)" when somebody has removed it already.
    return {Path(path) for path in re.findall(r"/dev/shm/psm_\w+$", maps, re.MULTILINE)}  # noqa: S108


def _gone(leaders: list[ProcessRef], directory: Path, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while members(leaders, directory):
        now = time.monotonic()
        if not any(alive(leader) for leader in leaders):
            deadline = min(deadline, now + _ORPHAN_SECONDS)
        if now >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
