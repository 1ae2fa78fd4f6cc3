"""Where an engine and its sidecar meet: names, modes and the remains of engines that are gone.

A socket and a page survive the process that made them, so an engine that attaches clears away what dead engines of its
rank left. It removes only what it can prove dead: a socket nobody listens on, a note or page of a process that is gone.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import re
import socket
import stat
from pathlib import Path

from engine_bridge import note, protocol
from engine_bridge.page import PageError, PageReader

logger = logging.getLogger("vllm.kvctl")

_NAME = re.compile(r"engine-(\d+)-([0-9a-f]{8})")


class AttachError(Exception):
    """Why a bridge cannot be had here, in words for an operator."""


def engine_name(rank: int, incarnation: str) -> str:
    """Stem of an engine's files; `incarnation` is 32 hex digits."""
    return f"engine-{rank}-{incarnation[:8]}"


def process_start_ticks() -> int:
    """Field 22 of /proc/self/stat: with the pid it names this process even after the pid is reused. 0 if unreadable."""
    try:
        # The second field, the command, may hold spaces and parentheses: count from the last one.
        return int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def prepare_directory(directory: Path, group: str, *, configured: bool) -> None:
    """Make the directory, or see that the one there is fit. AttachError or OSError says what is wrong."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        _check_directory(directory, configured=configured)
    except OSError as error:
        raise AttachError(
            f"the engine directory {directory} cannot be made: {error.strerror}; set KVCTL_ENGINE_DIR"
        ) from error
    if directory.stat().st_uid == os.geteuid() and group:
        share(directory, group, 0o700, 0o750)


def _check_directory(directory: Path, *, configured: bool) -> None:
    found = directory.lstat() if not configured else directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise AttachError(f"{directory} is not a directory; set KVCTL_ENGINE_DIR")
    # Below a directory like /tmp anyone may have made it first, to listen where our sidecar will look.
    ours_alone = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    if not configured and _world_writable(directory.parent) and not ours_alone:
        raise AttachError(
            f"{directory} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, expected uid "
            f"{os.geteuid()} and nobody else writing; remove it or set KVCTL_ENGINE_DIR"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise AttachError(
            f"{directory} is not writable for uid {os.geteuid()}: it belongs to uid {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}; change that or set KVCTL_ENGINE_DIR"
        )


def _world_writable(directory: Path) -> bool:
    return bool(directory.stat().st_mode & stat.S_IWOTH)


def check_socket_path(path: Path) -> None:
    """Linux cuts Unix socket paths short, with an error that names neither path nor limit."""
    length = len(os.fsencode(path))
    if length > protocol.MAX_SOCKET_PATH_BYTES:
        raise AttachError(
            f"the socket path {path} has {length} bytes, the system's limit is {protocol.MAX_SOCKET_PATH_BYTES}; "
            "set KVCTL_ENGINE_DIR to a shorter directory"
        )


def group_id(group: str) -> int:
    """The id of a group, given by name or by number: in a container a shared group (fsGroup) has no name. AttachError
    when there is no such name.
    """
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise AttachError(
            f"KVCTL_ENGINE_GROUP names the group {group!r}, which does not exist here; give its number"
        ) from error


def share(path: Path, group: str, alone: int, shared: int) -> None:
    """Give `path` the mode `alone`, or the group and the mode `shared`."""
    if not group:
        path.chmod(alone)
        return
    try:
        os.chown(path, -1, group_id(group))
    except PermissionError as error:
        raise AttachError(f"{path} cannot be given to group {group!r}: this user is not a member of it") from error
    path.chmod(shared)


def write_failure(directory: Path, name: str, reason: str, rank: int) -> None:
    """Leave a note for the sidecar, where that can be done."""
    try:
        note.write(directory / f"{name}.failed", reason, rank)
    except OSError as error:
        logger.warning("kvctl: no note could be left in %s: %s", directory, error.strerror)


def remove_stale(directory: Path, rank: int) -> None:
    """Remove what dead engines of this rank left behind."""
    for path in sorted(directory.iterdir()):
        match = _NAME.fullmatch(path.stem)
        if match is None or int(match[1]) != rank:
            continue
        if path.suffix == ".sock" and not _anyone_listens(path):
            _remove(path)
            _remove(path.with_suffix(".page"))
        if path.suffix == ".failed" and not _alive(_pid_of_note(path)):
            _remove(path)
        if path.suffix == ".page" and not path.with_suffix(".sock").exists() and not _alive(_pid_of_page(path)):
            _remove(path)


def _remove(path: Path) -> None:
    """What cannot be removed, such as a directory, is in nobody's way: our own files have names that are new."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("kvctl: %s is no engine's and cannot be removed: %s", path, error.strerror)


def _anyone_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            # EAGAIN is a full backlog: alive and slow. Anything we do not understand is not ours to remove.
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _alive(pid: int) -> bool:
    """Whether a process with this pid exists. Pid 0 stands for one that could not be read: nobody's."""
    return pid != os.getpid() and pid > 0 and Path(f"/proc/{pid}").exists()


def _pid_of_note(path: Path) -> int:
    try:
        return note.read(path).pid
    except note.NoteError:
        return 0


def _pid_of_page(path: Path) -> int:
    try:
        reader = PageReader(path)
    except PageError:
        return 0
    try:
        return reader.read().counters.pid
    except PageError:
        return 0
    finally:
        reader.close()
