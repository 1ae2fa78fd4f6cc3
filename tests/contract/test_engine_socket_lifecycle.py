"""Attaching, detaching and breaking, on the fake engine: the engine serves on whatever becomes of the bridge."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_bridge import attach, protocol
from engine_bridge.page import PageReader, Phase
from tests.fake_engine import running_engine, spawn_engine
from tests.fake_engine.client import BridgeClient, deadline, new_id


def note_in(directory: Path) -> dict[str, object]:
    (path,) = directory.glob("*.failed")
    note: dict[str, object] = json.loads(path.read_text())
    return note


def test_files_are_private_and_named_by_rank_and_incarnation(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with running_engine(directory, rank=3) as engine:
        name = f"engine-3-{engine.incarnation[:8]}"
        assert {path.name for path in directory.iterdir()} == {f"{name}.sock", f"{name}.page"}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(engine.socket_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(engine.page_path.stat().st_mode) == 0o600
    assert list(directory.iterdir()) == []


def test_a_group_shares_directory_socket_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    monkeypatch.setenv("KVCTL_ENGINE_GROUP", grp.getgrgid(os.getgid()).gr_name)
    directory = tmp_path / "run"
    with running_engine(directory) as engine:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o750
        assert stat.S_IMODE(engine.socket_path.stat().st_mode) == 0o660
        assert stat.S_IMODE(engine.page_path.stat().st_mode) == 0o640
        with BridgeClient(engine.socket_path) as client:
            assert client.reset().state == "done"


def test_a_group_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_ENGINE_GROUP", "no-such-group")
    with running_engine(tmp_path / "run") as engine:
        assert engine.bridge is None
        assert "no-such-group" in str(note_in(tmp_path / "run")["reason"])


def test_too_long_a_socket_path_leaves_the_engine_serving_and_a_note(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    with running_engine(directory, rank=1) as engine:
        assert engine.bridge is None
        note = note_in(directory)
        assert "107" in str(note["reason"])
        assert "KVCTL_ENGINE_DIR" in str(note["reason"])
        assert note["rank"] == 1
        assert note["pid"] == os.getpid()
        assert engine.do("hold")["ok"]


def test_a_file_where_the_directory_should_be_leaves_the_engine_serving(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running_engine(tmp_path / "file" / "run") as engine:
        assert engine.bridge is None
        assert engine.do("hold")["ok"]


def test_a_directory_that_someone_else_prepared_below_tmp_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = shared / "kvctl"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(attach.places.AttachError, match="nobody else writing"):
        attach.places.prepare_directory(planted, "", configured=False)


def test_what_a_killed_engine_left_is_removed_by_the_next_of_its_rank(tmp_path: Path) -> None:
    with spawn_engine(tmp_path, "--rank", "0") as killed, spawn_engine(tmp_path, "--rank", "1") as other_rank:
        killed.kill()
        assert killed.socket_path.exists()
        assert killed.page_path.exists()
        (tmp_path / "engine-0-deadbeef.failed").write_text(json.dumps({"reason": "x", "pid": killed.pid, "rank": 0}))
        with spawn_engine(tmp_path, "--rank", "0") as successor:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {
                f"{engine.name}{suffix}" for engine in (other_rank, successor) for suffix in (".sock", ".page")
            }
            assert successor.incarnation != killed.incarnation


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


def nested(path: Path) -> None:
    path.write_text("[" * 70_000)


def no_number(path: Path) -> None:
    path.write_text('{"pid": 1e999}')


def huge_number(path: Path) -> None:
    path.write_text('{"pid": %s}' % ("9" * 4000))


def cut_short(path: Path) -> None:
    path.write_bytes(b"KVCTLPG\x01")


@pytest.mark.parametrize("make", [pipe, link_to_itself, folder, nested, no_number, huge_number, cut_short])
@pytest.mark.parametrize("suffix", [".failed", ".page", ".sock"])
def test_whatever_lies_under_an_engines_name_does_not_keep_the_next_one_from_its_bridge(
    tmp_path: Path, make: Callable[[Path], None], suffix: str
) -> None:
    tmp_path.chmod(0o700)
    make(tmp_path / f"engine-0-deadbeef{suffix}")
    with running_engine(tmp_path) as engine, BridgeClient(engine.socket_path) as client:
        assert client.reset().state == "done"


def test_a_live_engine_of_the_same_rank_keeps_its_files(tmp_path: Path) -> None:
    with spawn_engine(tmp_path) as first, spawn_engine(tmp_path) as second:
        for engine in (first, second):
            with BridgeClient(engine.socket_path) as client:
                assert client.welcome is not None
                assert client.welcome.incarnation == engine.incarnation


def test_sigterm_answers_who_waits_and_leaves_nothing(tmp_path: Path) -> None:
    with spawn_engine(tmp_path, "--requests", "1") as engine, BridgeClient(engine.socket_path) as client:
        request_id = new_id()
        call = client.post(lambda n: protocol.Reset(n, request_id, deadline(30), "fail", wait_for_idle=True))
        client.ask(protocol.Ping)
        os.kill(engine.pid, signal.SIGTERM)
        outcome = client.answer(call)
        assert isinstance(outcome, protocol.Outcome)
        assert outcome.state == "stopping"
        assert isinstance(client.read(), protocol.Goodbye)
        assert engine.process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_defect_of_the_bridge_detaches_it_and_leaves_a_note(tmp_path: Path) -> None:
    with running_engine(tmp_path, requests=1) as engine:
        assert engine.bridge is not None
        client = BridgeClient(engine.socket_path)
        engine.bridge.page.publish = None  # type: ignore[method-assign,assignment]
        goodbye = client.read()
        assert isinstance(goodbye, protocol.Goodbye)
        assert "detached" in goodbye.reason
        with pytest.raises((EOFError, ConnectionError)):
            client.read()
        client.close()
        until = time.monotonic() + 10
        while not list(tmp_path.glob("*.failed")):
            assert time.monotonic() < until
            threading.Event().wait(0.01)
        assert "detached" in str(note_in(tmp_path)["reason"])
        assert not list(tmp_path.glob("*.sock"))
        before = engine.do("state")["tokens"]
        while engine.do("state")["tokens"] == before:
            assert time.monotonic() < until


def test_a_text_that_is_no_utf8_reaches_the_caller(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine, BridgeClient(engine.socket_path) as client:
        engine.do("raise_in", method="holders", message="boom \udcff")
        outcome = client.reset()
        assert outcome.state == "raised"
        assert outcome.message.startswith("RuntimeError: boom")
        engine.call(lambda: engine.engine.add("waiting", 1))
        engine.call(lambda: setattr(next(iter(engine.engine.requests.values())), "request_id", "\udcff"))
        assert isinstance(client.ask(lambda call: protocol.Admission(call)), protocol.Fault)


def test_a_hung_engine_is_told_apart_by_its_page_and_answers_later(tmp_path: Path) -> None:
    with running_engine(tmp_path, requests=1) as engine, BridgeClient(engine.socket_path) as client:
        engine.do("hang", seconds=60)
        reader = PageReader(engine.page_path)
        first = reader.read().counters
        call = client.post(lambda n: protocol.Reset(n, new_id(), deadline(0.05), "keep"))
        threading.Event().wait(0.1)
        second = reader.read().counters
        assert first.phase == second.phase == Phase.STEP
        assert first.phase_since_ns == second.phase_since_ns
        engine.do("unhang")
        outcome = client.answer(call)
        assert isinstance(outcome, protocol.Outcome)
        assert outcome.state == "expired"
        reader.close()


def test_an_idle_engine_uses_no_time(tmp_path: Path) -> None:
    with spawn_engine(tmp_path) as engine, BridgeClient(engine.socket_path) as client:
        client.ask(protocol.Ping)
        before = _cpu_ticks(engine.pid)
        threading.Event().wait(0.5)
        assert _cpu_ticks(engine.pid) - before <= 1
        assert isinstance(client.ask(protocol.Ping), protocol.Pong)


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_forked_child_leaves_the_parents_socket_alone(tmp_path: Path) -> None:
    with running_engine(tmp_path) as engine:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if engine.bridge is not None and engine.bridge.closed else 1)
        assert os.waitpid(pid, 0)[1] == 0
        with BridgeClient(engine.socket_path) as client:
            assert isinstance(client.ask(protocol.Ping), protocol.Pong)


def test_a_peer_of_another_user_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path) as engine:
        listener = engine.bridge._listener  # type: ignore[union-attr]
        monkeypatch.setattr(listener, "_stranger", lambda sock: "uid 4711 may not use this engine")
        with BridgeClient(engine.socket_path, hello=False) as client:
            reply = client.read()
            assert isinstance(reply, protocol.Goodbye)
            assert "4711" in reply.reason


def test_who_a_peer_is_comes_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path) as engine:
        listener = engine.bridge._listener  # type: ignore[union-attr]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert listener._stranger(ours) == ""
        real = os.getuid()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert (listener._stranger(ours) == "") == (real == 0)
        ours.close()
        theirs.close()


def test_the_fake_engine_counts_effects_by_request_id_and_incarnation(tmp_path: Path) -> None:
    effects = tmp_path / "effects.jsonl"
    with (
        spawn_engine(tmp_path / "run", "--effects", str(effects)) as engine,
        BridgeClient(engine.socket_path) as client,
    ):
        request_id = new_id()
        for _ in range(3):
            client.reset("keep", request_id=request_id)
        entries = [json.loads(line) for line in effects.read_text().splitlines()]
        assert [(entry["request_id"], entry["incarnation"], entry["effect"]) for entry in entries] == [
            (request_id, engine.incarnation, "reset")
        ]
