"""Engine and sidecar as the pod runs them: two users, one shared group that has a number and no name (fsGroup)."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_bridge import protocol
from engine_bridge.listener import Listener
from engine_bridge.places import AttachError, group_id, prepare_directory

ROOT = Path(__file__).resolve().parents[2]
GROUP = 7700
CLIENT = """
import os, socket, sys
from engine_bridge import protocol
# Not by Popen(user=...): that user may not be allowed to read this Python.
os.setgroups([int(group) for group in sys.argv[4:]])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[2]))
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(10)
try:
    s.connect(sys.argv[1])
except PermissionError:
    sys.exit("denied")
s.send(protocol.encoder.encode(protocol.Hello(1, 1, "test")))
print(type(protocol.reply_decoder.decode(s.recv(65536))).__name__)
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root; CI is root")


def welcome() -> protocol.Welcome:
    return protocol.Welcome(1, "ab" * 16, os.getpid(), 0, 0, 1, "0", "0", "tiny", 16, 10, True, {}, 0)


def client(path: Path, uid: int, gid: int, *more: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(path), *map(str, (uid, gid, *more))],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def volume() -> Iterator[Path]:
    """An emptyDir with fsGroup 7700, as kubelet makes it: everyone may write, new files get the group.

    Not below pytest's own folder, which another session may close to other users at any time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2777)
        yield folder


def served(volume: Path, uid: int, gid: int, *more: int) -> tuple[str, str]:
    """(what the client printed, what it complained of), with the engine's end drained meanwhile."""
    engines = volume / "engine"
    prepare_directory(engines, str(GROUP), configured=True)
    listener = Listener(engines / "engine-0-abcdabcd.sock", welcome, lambda *_: None, group=str(GROUP))
    try:
        process = client(listener.path, uid, gid, *more)
        while process.poll() is None:
            listener.drain()
        out, err = process.communicate(timeout=10)
        return out.strip(), err.strip()
    finally:
        listener.close("the test is over")


def test_a_sidecar_of_another_user_gets_in_through_the_shared_group(volume: Path) -> None:
    assert served(volume, 7700, GROUP) == ("Welcome", "")
    mode = (volume / "engine").stat()
    assert (stat.S_IMODE(mode.st_mode) & 0o7, mode.st_gid) == (0, GROUP), "closed to everyone else"


def test_the_group_may_be_a_supplementary_one_as_fs_group_makes_it(volume: Path) -> None:
    assert served(volume, 1000, 1000, 4, GROUP) == ("Welcome", "")


def test_a_container_outside_the_group_does_not(volume: Path) -> None:
    out, err = served(volume, 7701, 7701)
    assert (out, err.splitlines()[-1]) == ("", "denied")


def test_a_group_is_taken_by_name_or_by_number_and_an_unknown_name_says_what_to_do() -> None:
    assert group_id("7700") == 7700
    assert group_id("root") == 0
    with pytest.raises(AttachError, match=r"does not exist here; give its number"):
        group_id("no-such-group")
