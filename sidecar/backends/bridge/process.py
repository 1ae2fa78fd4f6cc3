"""Is that process alive, stopped or gone, and is it still the same one?

Pids repeat, so a pid alone names nobody: it counts only together with the start time in /proc/PID/stat. The engine may
live in another pid namespace (containers of one pod need not share one); then nothing can be read and the answer is
UNKNOWN, never a guess.
"""

from __future__ import annotations

import os

from sidecar.backends.engine import Liveness


def stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in clock ticks since boot) of a process; None when it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    # The command name may hold spaces and brackets: fields are counted from its closing bracket.
    fields = text[text.rfind(")") + 1 :].split()
    if len(fields) < 20 or not fields[19].isdigit():
        return None
    return fields[0], int(fields[19])


def liveness(pid: int, start_ticks: int) -> Liveness:
    """What /proc says of the process `pid` that started at `start_ticks` (0: not known), seen from this namespace."""
    if pid <= 0:
        return Liveness.UNKNOWN
    found = stat(pid)
    if found is None:
        return Liveness.UNKNOWN if _exists(pid) else Liveness.DEAD
    state, started = found
    if start_ticks and started != start_ticks:
        return Liveness.DEAD
    if state in "ZX":
        return Liveness.DEAD
    return Liveness.STOPPED if state in "Tt" else Liveness.ALIVE


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's, with /proc hidden
    return True
