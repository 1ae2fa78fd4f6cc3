"""Whose socket is that? Asked before a word is said to it.

Whoever can put a file into the engine directory could pose as an engine. So the directory must not be writable by
everyone, the socket must belong to the directory's owner, to us or to root, and the process at the other end must run
as the socket's owner. The usual cause of a failure is not an attack but two containers with different users; the error
therefore names both uids, the mode, and the setting that mends it.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PEER: Final = struct.Struct("iII")


class NotTrusted(Exception):  # noqa: N818 - read as a sentence
    """The text names the path, the uids, the mode, and what to do."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as the kernel knows it."""

    pid: int
    """In this process's pid namespace; 0 when it is not visible from here."""
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """SO_PEERCRED."""
    return Peer(*_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))


def check_directory(directory: Path) -> None:
    """NotTrusted when everyone may write in it. OSError when it cannot be looked at."""
    status = directory.stat()
    if status.st_mode & stat.S_IWOTH:
        raise NotTrusted(
            f"engine directory {directory} can be written by everyone (uid {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}); expected 0700, or 0750 with a shared group"
        )


def check_socket(path: Path) -> int:
    """The uid that owns a socket we may trust. NotTrusted when it belongs to a stranger; OSError when it is gone."""
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode):
        raise NotTrusted(f"{path} is not a socket (mode {status.st_mode:o}); an engine puts a socket there")
    directory = path.parent.stat()
    if status.st_uid not in (directory.st_uid, os.getuid(), 0):
        raise NotTrusted(
            f"{path} belongs to uid {status.st_uid} and its directory to uid {directory.st_uid}; this sidecar runs as "
            f"uid {os.getuid()} and trusts neither: run the engine as the directory's owner"
        )
    return status.st_uid


def check_peer(sock: socket.socket, path: Path, owner: int) -> Peer:
    """NotTrusted when the process at the other end is not the socket's owner (or root)."""
    peer = peer_of(sock)
    if peer.uid not in (owner, 0):
        raise NotTrusted(
            f"{path} belongs to uid {owner} and the process that listens on it (pid {peer.pid}) runs as uid {peer.uid}"
        )
    return peer


def why_denied(path: Path) -> str:
    """One sentence for EACCES on a socket, with the uids, the mode and the setting that mends it."""
    try:
        status = path.lstat()
    except OSError:
        return f"uid {os.getuid()} may not look into {path.parent}; give it a group both containers have"
    return (
        f"uid {os.getuid()} may not connect to {path}: it belongs to uid {status.st_uid}, group {status.st_gid}, mode "
        f"{stat.S_IMODE(status.st_mode):04o}; set KVCTL_ENGINE_GROUP at the engine to a group this sidecar is in"
    )
