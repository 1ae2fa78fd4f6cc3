"""Who did what: one JSON line before each mutation and one after it.

The line before comes first and must be written: when it cannot be, the mutation is refused, because an unrecorded
change is worse here than no change. Lines are appended with one write each, so that they never mix, and a file that was
rotated away is opened anew. Requests hold no secrets; credentials never come near this module.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import grpc

from sidecar.rpc import tracing
from sidecar.rpc.auth import Caller
from sidecar.rpc.errors import failure
from sidecar.rpc.logs import write_without_waiting

STDOUT: Final = "-"


class AuditLog:
    """Appends to one file, or to stdout."""

    def __init__(self, target: str, subject: Mapping[str, str]) -> None:
        """`target` is a path, or "-" for stdout; `subject` is in every line: who keeps this log. OSError names the
        setting and the path when it cannot be used.
        """
        self._target = target
        self._subject = dict(subject)
        self._fd = 1
        self._inode = 0
        self._torn = False
        """The last line was cut short by a full disk; the next one starts on a line of its own."""
        if target != STDOUT:
            self._open_first()
        elif sys.stdout is None:  # its number is free then, and soon some other file has it
            raise OSError(errno.EBADF, "--audit-log -: stdout is closed; leave it open, or give a file")

    def begin(self, caller: Caller, peer: str, operation: str, request_id: str, details: Mapping[str, object]) -> None:
        """Before the mutation. Failure INTERNAL when the line cannot be written."""
        try:
            self.write("begin", operation, request_id, {**_who(caller, peer), **details})
        except OSError as error:
            raise failure(
                grpc.StatusCode.INTERNAL,
                "STORE_FAILED",
                f"nothing was changed: {self.explain(error)}",
                metadata={"request_id": request_id},
            ) from error

    def end(self, caller: Caller, peer: str, operation: str, request_id: str, details: Mapping[str, object]) -> None:
        """After the mutation. OSError when the line cannot be written."""
        self.write("end", operation, request_id, {**_who(caller, peer), **details})

    def close(self) -> None:
        """Close the file."""
        if self._target != STDOUT:
            os.close(self._fd)
            # A line that comes later must not land in whatever has the number by then.
            self._fd = -1

    def explain(self, error: OSError) -> str:
        """Why a line could not be written, for a person."""
        return f"the audit log {self._target} cannot be written by uid {os.getuid()}: {error.strerror or error}"

    def write(self, event: str, operation: str, request_id: str, details: Mapping[str, object]) -> None:
        """One line. OSError when it cannot be written."""
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "audit": event,
            **self._subject,
            "operation": operation,
            "request_id": request_id,
            **details,
        }
        if trace := tracing.trace_id():
            line["trace_id"] = trace
        data = (json.dumps(line, ensure_ascii=True) + "\n").encode()
        self._follow_rotation()
        data = b"\n" + data if self._torn else data
        written = write_without_waiting(self._fd, data) if self._target == STDOUT else os.write(self._fd, data)
        if written == len(data):
            self._torn = False
        elif written == 0:
            raise OSError(errno.EAGAIN, "the pipe is full, whoever should read it does not")
        else:
            self._torn = True
            raise OSError(errno.ENOSPC, "the line was cut short: no space left, or a pipe that nobody reads?")

    def _open_first(self) -> None:
        try:
            self._open()
        except OSError as error:
            raise OSError(
                error.errno,
                f"--audit-log {self._target} cannot be opened by uid {os.getuid()}: {error.strerror or error}",
            ) from error
        why = _why_unwritable(self._fd)
        if why:
            os.close(self._fd)
            raise OSError(errno.EINVAL, f"--audit-log {self._target}: {why}")

    def _open(self) -> None:
        # O_NONBLOCK: a FIFO that nobody reads is an error and not the end of the event loop.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self._target, flags, 0o600)
        self._inode = os.fstat(self._fd).st_ino

    def _follow_rotation(self) -> None:
        if self._target == STDOUT:
            return
        try:
            if Path(self._target).stat().st_ino == self._inode:
                return
        except FileNotFoundError:
            pass
        old = self._fd
        self._open()
        self._torn = False
        os.close(old)


def _who(caller: Caller, peer: str) -> dict[str, str]:
    return {"caller": caller.name, "role": caller.role.name.lower(), "peer": peer}


def _why_unwritable(fd: int) -> str:
    """Why every mutation would be refused for want of an audit line; empty when nothing speaks against it.

    Opening proves little: /dev/full opens, and so does a file on a full disk. Nothing is written to find out.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        disk = os.fstatvfs(fd)
        free = disk.f_bavail if os.geteuid() else disk.f_bfree
        return "no space left on its disk" if disk.f_blocks and not free else ""
    if stat.S_ISCHR(status.st_mode) and not os.isatty(fd) and status.st_rdev != os.stat(os.devnull).st_rdev:
        return f"it is a device; expected a file, {os.devnull}, or - for stdout"
    return ""
