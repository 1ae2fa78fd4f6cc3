"""Whose socket the sidecar speaks with, and what it says when it will not."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from sidecar.backends.bridge import ownership
from sidecar.backends.bridge.directory import EngineDirectory
from sidecar.backends.engine import Liveness
from tests.fake_engine.process import EngineProcess


class Status:
    def __init__(self, uid: int, mode: int) -> None:
        self.st_uid, self.st_gid, self.st_mode = uid, 7, mode


@pytest.fixture
def owned(monkeypatch, tmp_path):
    """Set whom the directory and the socket seem to belong to."""
    path = tmp_path / "engine-0-00000000.sock"

    def arrange(directory_uid: int, socket_uid: int, mode: int = stat.S_IFSOCK | 0o600) -> Path:
        monkeypatch.setattr(Path, "lstat", lambda self: Status(socket_uid, mode))
        monkeypatch.setattr(Path, "stat", lambda self, **_: Status(directory_uid, stat.S_IFDIR | 0o750))
        monkeypatch.setattr(os, "getuid", lambda: 1001)
        return path

    return arrange


def test_a_directory_everyone_may_write_in_is_not_trusted(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ownership.NotTrusted, match=r"mode 0777.*expected 0700"):
        ownership.check_directory(tmp_path)


@pytest.mark.parametrize(("directory_uid", "socket_uid"), [(1000, 1000), (0, 1001), (1000, 0)])
def test_sockets_of_the_directorys_owner_of_us_and_of_root_are_trusted(owned, directory_uid, socket_uid):
    assert ownership.check_socket(owned(directory_uid, socket_uid)) == socket_uid


def test_a_strangers_socket_is_not_trusted_and_every_uid_is_named(owned):
    with pytest.raises(ownership.NotTrusted) as caught:
        ownership.check_socket(owned(1000, 6666))
    assert all(f"uid {uid}" in str(caught.value) for uid in (6666, 1000, 1001))


def test_a_file_that_is_no_socket_is_not_trusted(owned):
    with pytest.raises(ownership.NotTrusted, match="not a socket"):
        ownership.check_socket(owned(1000, 1000, stat.S_IFREG | 0o600))


def test_a_process_that_is_not_the_sockets_owner_is_not_trusted():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert ownership.check_peer(ours, Path("x"), os.getuid()).pid == os.getpid()
        if os.getuid() != 0:
            with pytest.raises(ownership.NotTrusted, match=f"runs as uid {os.getuid()}"):
                ownership.check_peer(ours, Path("x"), os.getuid() + 1)


def test_root_at_the_other_end_is_trusted_and_anyone_else_is_not(monkeypatch):
    monkeypatch.setattr(ownership, "peer_of", lambda sock: ownership.Peer(5, 4242, 4242))
    with pytest.raises(ownership.NotTrusted, match="4242"):
        ownership.check_peer(None, Path("x"), 1000)
    monkeypatch.setattr(ownership, "peer_of", lambda sock: ownership.Peer(5, 0, 0))
    ownership.check_peer(None, Path("x"), 1000)


def test_a_denied_connection_names_uids_mode_and_the_setting_that_mends_it(owned):
    text = ownership.why_denied(owned(1000, 1000))
    assert "uid 1001" in text
    assert "uid 1000" in text
    assert "0600" in text
    assert "KVCTL_ENGINE_GROUP" in text


@pytest.mark.parametrize("note", ["[" * 60_000, '{"pid": 1e999}', '{"pid": 99999999999999999999}', '{"pid": -5}'])
async def test_a_note_of_nonsense_is_shown_and_does_not_stop_the_sidecar(tmp_path, note):
    tmp_path.chmod(0o700)
    (tmp_path / "engine-3-aabbccdd.failed").write_text(note)
    engines = EngineDirectory(tmp_path)
    await engines.start()
    try:
        (found,) = engines.engines()
        assert found.trouble.reason == "BRIDGE_NOT_ATTACHED"
        assert found.liveness() is Liveness.UNKNOWN
    finally:
        await engines.close()


async def test_a_pipe_in_the_place_of_a_note_does_not_stop_the_sidecar(tmp_path):
    tmp_path.chmod(0o700)
    os.mkfifo(tmp_path / "engine-3-aabbccdd.failed")
    engines = EngineDirectory(tmp_path)
    await engines.start()
    try:
        (found,) = engines.engines()
        assert found.trouble is not None
        assert "engine-3-aabbccdd.failed cannot be read" in found.trouble.message
    finally:
        await engines.close()


async def test_an_untrusted_directory_shows_as_no_engine_with_the_reason(tmp_path):
    directory = tmp_path / "engines"
    directory.mkdir(mode=0o700)
    engine = EngineProcess(directory)
    try:
        directory.chmod(0o777)
        engines = EngineDirectory(directory)
        await engines.start()
        try:
            trouble = engines.trouble()
            assert trouble is not None
            assert "0777" in trouble.message
            directory.chmod(0o700)
            changed = asyncio.Event()
            engines.on_change(changed.set)
            async with asyncio.timeout(5):
                while not any(one.connected for one in engines.engines()):
                    await changed.wait()
                    changed.clear()
        finally:
            await engines.close()
    finally:
        engine.end()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_users_sidecar_is_told_uids_and_mode(tmp_path):
    import subprocess
    import sys

    from tests.contract.sidecar_process import environment

    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
        else:
            break
    directory = tmp_path / "engines"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    engine = EngineProcess(directory)
    try:
        directory.chmod(0o755)
        script = (
            "import asyncio, os, pathlib, sys\n"
            "import grpc\n"
            "from sidecar.backends.bridge.directory import EngineDirectory\n"
            "os.setgid(4242); os.setuid(4242)\n"
            "async def main():\n"
            "    engines = EngineDirectory(pathlib.Path(sys.argv[1]))\n"
            "    await engines.start()\n"
            "    for _ in range(100):\n"
            "        found = engines.engines()\n"
            "        if found and found[0].trouble and 'uid' in found[0].trouble.message:\n"
            "            print(found[0].trouble.message); break\n"
            "        await asyncio.sleep(0.05)\n"
            "    await engines.close()\n"
            "asyncio.run(main())\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", script, str(directory)],
            env=environment(), capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    finally:
        engine.end()
    assert "uid 4242 may not connect" in ended.stdout, ended
    assert "belongs to uid 0" in ended.stdout
