"""The file by which a server says that it serves; whoever started it waits for that.

It is locked for as long as its server lives, so that a second one that was given the same name says so at its start
instead of replacing it, and taking it away at its own end. The kernel drops the lock with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Final

from sidecar.rpc.addresses import Address

_MOST_BYTES: Final = 4096


def check(path: Path | None) -> None:
    """OSError when it could not be written once serving, or is another server's: too late to say so then."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, f"--ready-file {path} is a directory; expected a file's name")
    if path.exists() and not path.is_file():  # /dev/null, a pipe: it would be replaced for everybody
        raise OSError(errno.EINVAL, f"--ready-file {path} is there and no regular file; expected a file's name")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        why = "may not write in it" if path.parent.is_dir() else "finds no such directory"
        raise OSError(errno.EACCES, f"--ready-file {path}: uid {os.getuid()} {why}")
    if path.is_file() and (owner := _owner(path)):
        raise OSError(errno.EBUSY, f"--ready-file {path} is in use by {owner}; give each server one of its own")


class ReadyFile:
    """Written once, and held until `remove` or the end of the process."""

    def __init__(self, path: Path, bound: list[Address], metrics_at: Address | None) -> None:
        """Write it, whole or not at all: whoever waits for the file must not read half of it."""
        content = {
            "pid": os.getpid(),
            "listen": [str(address) for address in bound],
            "metrics": str(metrics_at) if metrics_at else "",
        }
        self._path = path
        partial = path.with_name(path.name + ".partial")
        partial.unlink(missing_ok=True)
        self._fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: there a second server is not found out
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._fd, (json.dumps(content) + "\n").encode())
        partial.rename(path)

    def remove(self) -> None:
        """Take it away, unless another's has taken its place."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == os.fstat(self._fd).st_ino:
                self._path.unlink()
        os.close(self._fd)


def _owner(path: Path) -> str:
    """Who holds the file; empty when nobody does, or that cannot be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""  # it is replaced, which needs no right to read it
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return f"pid {json.loads(os.read(fd, _MOST_BYTES))['pid']}"
        return "another server"
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ""
