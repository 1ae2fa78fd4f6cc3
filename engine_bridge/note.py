"""The note by which an engine that has no bridge says why: NAME.failed in the engine directory.

Whoever may write in that directory must not stop its readers, an engine at its start among them: nothing is followed,
waited for, or read beyond a limit.
"""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MAX_BYTES: Final = 64 * 1024
_MAX_REASON: Final = 2000
_PIDS: Final = 2**31


class NoteError(Exception):
    """The note cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Note:
    """What it says."""

    reason: str
    pid: int
    """Of the engine's process; 0 when it does not say."""


def write(path: Path, reason: str, rank: int) -> None:
    """Leave a note of this process; OSError when it cannot. Whole or not at all: it is read as soon as it appears."""
    said = {"reason": reason[:_MAX_REASON], "pid": os.getpid(), "rank": rank, "time": time.time()}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(said))
    partial.chmod(0o644)
    partial.rename(path)


def read(path: Path) -> Note:
    """NoteError when it is none."""
    try:
        # O_NONBLOCK: a pipe under this name would wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NoteError("not a regular file")
            said = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise NoteError(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise NoteError(f"not JSON: {error}") from error
    if not isinstance(said, dict):
        raise NoteError(f"holds a {type(said).__name__}, not an object")
    pid = said.get("pid", 0)
    return Note(str(said.get("reason", "no reason given")), pid if isinstance(pid, int) and 0 < pid < _PIDS else 0)
