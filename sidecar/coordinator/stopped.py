"""Operations that were stopped because the store took no more writes, noted where no more room is needed.

Such an operation has ended for everybody who was told, and the store does not have it: whoever starts next would find
targets without a result and call them. So one block of the disk is taken while there is room, and what must not be
forgotten is written over a part of it.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from pathlib import Path
from typing import Final

_SLOT: Final = 37
"""A UUID and a line end: a person can read the file."""
_SLOTS: Final = 4096 // _SLOT
_FREE: Final = b" " * (_SLOT - 1) + b"\n"

_log = logging.getLogger(__name__)


class StoppedNotes:
    """Ids in a file beside the store. Safe from any thread; one process at a time, which the store's lock sees to."""

    def __init__(self, store: Path) -> None:
        """Take the block. Where that cannot be done, the first note that is lost is told in the log."""
        self.path = store.with_name(store.name + ".stopped")
        self._lock = threading.Lock()
        self._fd = -1
        self._why_not = ""
        self._slots = [_FREE] * _SLOTS
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            content = os.pread(self._fd, _SLOTS * _SLOT, 0)
            if len(content) == _SLOTS * _SLOT:
                found = [content[at : at + _SLOT] for at in range(0, len(content), _SLOT)]
                self._slots = [slot if _is_id(slot) else _FREE for slot in found]
            else:
                os.pwrite(self._fd, b"".join(self._slots), 0)
                os.fsync(self._fd)
        except OSError as error:
            self._why_not = error.strerror or str(error)

    def ids(self) -> list[str]:
        """Every id that was noted."""
        with self._lock:
            return [slot.decode("ascii", "replace").strip() for slot in self._slots if slot.strip()]

    def add(self, operation_id: str) -> None:
        """Note one. Returns when it is on the disk, or the log says that it is not."""
        with self._lock:
            entry = operation_id.encode().ljust(_SLOT - 1) + b"\n"
            if entry in self._slots:
                return
            why_not = self._why_not
            if not why_not:
                free = next((at for at, slot in enumerate(self._slots) if not slot.strip()), None)
                why_not = "it has no room left" if free is None else self._write(free, entry)
        if why_not:
            _log.error(
                "operation %s was stopped, and a restarted coordinator will go on with it: %s cannot be written: %s",
                operation_id,
                self.path,
                why_not,
            )

    def remove(self, operation_id: str) -> None:
        """The store has its end, or does not have the operation any more."""
        with self._lock:
            for at, slot in enumerate(self._slots):
                if slot.strip() == operation_id.encode():
                    self._write(at, _FREE)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, at: int, entry: bytes) -> str:
        """Why it is not on the disk; empty when it is."""
        try:
            os.pwrite(self._fd, entry, at * _SLOT)
            os.fsync(self._fd)
        except OSError as error:
            return error.strerror or str(error)
        self._slots[at] = entry
        return ""


def _is_id(slot: bytes) -> bool:
    try:
        uuid.UUID(slot.decode("ascii").strip())
    except ValueError:
        return False
    return True
