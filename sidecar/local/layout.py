"""Where a local fleet keeps its things, and the record by which later commands find it.

State (inventory, record, logs) lives under the user's state directory and the logs outlive the fleet. Sockets live in a
private directory with a short path, because Linux allows a Unix socket path 107 bytes and home directories can be long.
One fleet a user at a time: an flock on a file in the state directory, held by the fleet's keeper for as long as it
lives, decides; the kernel drops it however the keeper ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import yaml

from engine_bridge.protocol import MAX_SOCKET_PATH_BYTES
from sidecar.local.processes import ProcessRef

INVENTORY: Final = "inventory.yaml"
RECORD: Final = "fleet.json"
LOCK: Final = "lock"
LOGS: Final = "logs"

_SAMPLE_SOCKET: Final = "engine-0-01234567.sock"
_SAMPLE_ZMQ: Final = "00000000-0000-0000-0000-000000000000"
"""vLLM puts its own sockets, named by a UUID, into the directory it is given."""


class LocalError(Exception):
    """A local fleet cannot do what was asked. One line for a person, and the exit code for it."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        """`exit_code`: 2 for what was typed or configured, 1 for what went wrong on the way."""
        super().__init__(message)
        self.exit_code = exit_code


class Replica(msgspec.Struct, frozen=True):
    """One replica of a local fleet: a vLLM server and the sidecar beside it."""

    name: str
    api: str
    """host:port of vLLM's OpenAI API."""
    sidecar: str
    """host:port of the sidecar's gRPC server."""
    metrics: str
    """host:port of the sidecar's metrics and probes."""
    engine_log: str
    sidecar_log: str
    engine: ProcessRef | None = None
    """vLLM's API server, the leader of its session; None before it is started."""
    sidecar_process: ProcessRef | None = None


class Fleet(msgspec.Struct, frozen=True):
    """The record of a fleet that runs."""

    keeper: ProcessRef
    directory: str
    """Private directory with the sockets; working directory of every process of the fleet."""
    replicas: list[Replica]
    booted: bool = False

    def leaders(self) -> list[ProcessRef]:
        """Every session leader that was started."""
        pairs = ((replica.sidecar_process, replica.engine) for replica in self.replicas)
        return [process for pair in pairs for process in pair if process is not None]


def state_directory() -> Path:
    """$XDG_STATE_HOME/kvctl/local, by default ~/.local/state/kvctl/local. Not made here."""
    configured = os.environ.get("XDG_STATE_HOME", "")
    # The XDG rules say to ignore a relative path.
    base = Path(configured) if configured.startswith("/") else Path.home() / ".local" / "state"
    return base / "kvctl" / "local"


def prepare_state(state: Path) -> None:
    """Make the state directory; LocalError naming it when it cannot be written."""
    try:
        (state / LOGS).mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=state):
            pass
    except OSError as error:
        where = error.filename or state
        raise LocalError(
            f"the local fleet's state directory {state} cannot be written ({where}: {error.strerror}); "
            "make it writable or set XDG_STATE_HOME"
        ) from error


def take_lock(state: Path) -> int | None:
    """The fleet's lock as a file descriptor, or None when somebody holds it. Closing it gives it back."""
    fd = os.open(state / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def make_run_directory(parent: str | None, replicas: int) -> Path:
    """A new private directory for sockets, under `parent` or the user's runtime directory or /tmp.

    LocalError when it cannot be made, or when a socket in it would have a path longer than Linux allows.
    """
    base = Path(parent or os.environ.get("XDG_RUNTIME_DIR") or "/tmp").absolute()  # noqa: S108 - mkdtemp makes it 0700
    longest = base / "kvctl-local-01234567" / f"r{replicas - 1}" / max(_SAMPLE_SOCKET, _SAMPLE_ZMQ, key=len)
    excess = len(os.fsencode(longest)) - MAX_SOCKET_PATH_BYTES
    if excess > 0:
        raise LocalError(
            f"socket paths under {base} would be {excess} bytes over the {MAX_SOCKET_PATH_BYTES} that Linux allows; "
            "give a shorter one with --directory"
        )
    try:
        return Path(tempfile.mkdtemp(prefix="kvctl-local-", dir=base)).resolve()
    except OSError as error:
        raise LocalError(
            f"no directory for sockets can be made in {base}: {error.strerror}; give another one with --directory"
        ) from error


def write_inventory(state: Path, replicas: list[Replica]) -> None:
    """The inventory that later commands read."""
    listed = [{"name": r.name, "address": r.sidecar, "labels": {"fleet": "local"}} for r in replicas]
    text = "# Written by `kvctl local up`, removed by `kvctl local down`.\n"
    _replace(state / INVENTORY, (text + yaml.safe_dump({"replicas": listed}, sort_keys=False)).encode())


def write_record(state: Path, fleet: Fleet) -> None:
    """The record, replaced at once or not at all."""
    _replace(state / RECORD, msgspec.json.format(msgspec.json.encode(fleet)))


def read_record(state: Path) -> Fleet | None:
    """The record; None when there is none. LocalError when it cannot be understood."""
    try:
        return msgspec.json.decode((state / RECORD).read_bytes(), type=Fleet)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LocalError(f"{state / RECORD}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise LocalError(f"{state / RECORD} is not a fleet record ({error}); remove it by hand") from error


def remove_record(state: Path) -> None:
    """Forget the fleet. The logs stay."""
    (state / INVENTORY).unlink(missing_ok=True)
    (state / RECORD).unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
