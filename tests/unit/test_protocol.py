"""The messages between sidecar and engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_bridge import protocol
from tests.fake_engine.client import new_id


def test_requests_survive_the_wire() -> None:
    requests: list[protocol.Request] = [
        protocol.Hello(1, 2, "c"),
        protocol.Reset(1, new_id(), 5, "keep", connector=True, mm=True, encoder=True, reorder=True, quarantine=True),
        protocol.Reorder(2, new_id(), 5, "uncached"),
        protocol.Relieve(3, new_id(), 5),
        protocol.Pause(4, new_id(), 5, 6, resume_when_abandoned=True),
        protocol.Renew(5, new_id(), 6, weights_complete=True),
        protocol.Resume(6, new_id(), 5, new_id(), "v2"),
        protocol.Resume(6, new_id(), 5, force=True),
        protocol.Admission(7, 12),
        protocol.Lookup(8, new_id()),
        protocol.Cancel(9, new_id()),
        protocol.Ping(10),
    ]
    for request in requests:
        assert protocol.request_decoder.decode(protocol.encoder.encode(request)) == request


def test_fields_of_a_newer_peer_are_ignored() -> None:
    frame = msgspec.msgpack.encode({"type": "ping", "call": 4, "colour": "blue"})
    assert protocol.request_decoder.decode(frame) == protocol.Ping(4)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "ping"})])
def test_what_is_no_request_is_a_decoding_error(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        protocol.request_decoder.decode(frame)


def test_the_engine_directory_is_the_configured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_ENGINE_DIR", "/somewhere/else")
    assert protocol.default_engine_dir() == Path("/somewhere/else")


def test_without_configuration_the_directory_is_one_this_user_can_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCTL_ENGINE_DIR", raising=False)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert protocol.default_engine_dir() == Path("/run/user/7/kvctl")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert protocol.default_engine_dir() == Path("/tmp/kvctl-7")
    monkeypatch.setattr("os.access", lambda path, mode: True)
    assert protocol.default_engine_dir() == Path("/run/kvctl")
