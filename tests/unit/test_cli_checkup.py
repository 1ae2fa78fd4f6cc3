"""What `kvctl doctor` makes of what it finds."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kvctl.v1 import fleet_pb2, types_pb2

from engine_bridge import __version__
from sidecar.cli import certificates, checkup
from sidecar.cli.exitcodes import Exit
from sidecar.cli.finding import Finding

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def certificate(folder: Path, ends: datetime.datetime, *, authority: bool) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "cert.pem"
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.mark.parametrize("authority", [True, False])
@pytest.mark.parametrize(
    ("days", "level", "text"), [(-1, "wrong", "expired on"), (3, "warning", "expires on"), (90, "ok", "valid")]
)
def test_certificates_are_judged_by_their_end(
    tmp_path: Path, days: int, level: str, text: str, authority: bool
) -> None:
    file = certificate(tmp_path, NOW + datetime.timedelta(days=days), authority=authority)
    found = certificates.in_file("CA", file, NOW.timestamp())
    assert found.level == level
    assert text in found.found


def test_a_file_that_is_no_certificate_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    file.write_text("hello")
    assert certificates.in_file("CA", file, 0.0).level == "wrong"
    assert "cannot be read" in certificates.in_file("CA", tmp_path / "none", 0.0).found


def replica(**engine: object) -> fleet_pb2.FleetReplica:
    info = types_pb2.ReplicaInfo(name="r0", version=__version__)
    fields: dict[str, object] = {
        "backend": types_pb2.BACKEND_KIND_BRIDGE, "connected": True, "bridge_version": __version__,
        "prefix_caching_enabled": True,
    }  # fmt: skip
    info.engines.add(**{**fields, **engine})  # type: ignore[arg-type]
    return fleet_pb2.FleetReplica(name="r0", address="a:1", reachable=True, code="OK", info=info)


def findings(found: fleet_pb2.FleetReplica) -> list[Finding]:
    return list(checkup.of_replica(found, NOW.timestamp()))


def test_a_healthy_replica_has_nothing_wrong() -> None:
    assert {finding.level for finding in findings(replica())} == {"ok"}


@pytest.mark.parametrize(
    ("engine", "level", "text"),
    [
        ({"connected": False, "unavailable_reason": "the process is gone"}, "wrong", "the process is gone"),
        ({"backend": types_pb2.BACKEND_KIND_HTTP}, "warning", "HTTP only"),
        ({"bridge_version": "0.0.1"}, "warning", "bridge 0.0.1"),
        ({"prefix_caching_enabled": False}, "warning", "prefix caching is off"),
        ({"capabilities": [types_pb2.Capability(name="relieve", reason="vLLM lacks x")]}, "warning", "cannot relieve"),
    ],
)
def test_what_an_engine_lacks_is_a_finding(engine: dict[str, object], level: str, text: str) -> None:
    assert [f for f in findings(replica(**engine)) if f.level == level and text in f.found]


def test_events_that_nobody_configured_are_no_warning() -> None:
    found = findings(replica(capabilities=[types_pb2.Capability(name="events.publish", reason="not configured")]))
    assert {finding.level for finding in found} == {"ok"}
    assert found[-1].found == "cannot events.publish: not configured"


def test_a_replica_without_an_engine_or_of_another_version_or_clock_is_a_finding() -> None:
    bare = fleet_pb2.FleetReplica(name="r0", reachable=True, code="OK", info=types_pb2.ReplicaInfo(version="9.9"))
    bare.info.started_at.FromSeconds(int(NOW.timestamp()) + 3600)
    texts = " / ".join(f.found for f in findings(bare))
    assert "sidecar 9.9" in texts
    assert "60 min ahead" in texts
    assert "found no engine" in texts


def test_a_pod_that_is_not_called_is_a_warning_and_nobody_is_told_to_start_a_sidecar_there() -> None:
    leaving = fleet_pb2.FleetReplica(
        name="r0", code="UNAVAILABLE", reason="TARGET_NOT_READY", message="not called: the pod is terminating"
    )
    [found] = findings(leaving)
    assert (found.level, found.found) == ("warning", "not called: the pod is terminating")
    assert "skip" in found.advice
    assert "start kvctl-sidecar" not in found.advice


@pytest.mark.parametrize(
    ("offset", "told"), [(-7200, "2 h behind this one"), (7200, "2 h ahead of this one"), (-40, ""), (40, "")]
)
def test_a_clock_that_is_wrong_is_told_in_both_directions(offset: int, told: str) -> None:
    found = replica()
    found.info.started_at.FromSeconds(int(NOW.timestamp()) - 90_000)
    found.info.now.FromSeconds(int(NOW.timestamp()) + offset)
    warnings = [finding.found for finding in findings(found) if finding.level == "warning"]
    assert warnings == ([f"its clock is {told}"] if told else [])


def test_what_is_wrong_is_printed_last(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [Finding("wrong", "a", "gone"), Finding("warning", "b", "old"), Finding("ok", "c", "fine")]
    checkup.print_findings(listed, "table")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["ok", "warning", "wrong"]


def test_a_socket_that_this_user_may_not_use_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "engine-0-aabbccdd.sock").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    [_, found] = checkup._engine_directory(tmp_path)
    assert (found.level, "cannot be used by uid" in found.found) == ("wrong", True)


def test_a_pipe_in_the_place_of_a_note_is_told_and_not_waited_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.mkfifo(tmp_path / "engine-1-aabbccdd.failed")
    [_, found] = checkup._engine_directory(tmp_path)
    assert "cannot be read" in found.found


def test_notes_of_failed_attachments_are_shown(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "engine-0-aabbccdd.sock").touch()
    (tmp_path / "engine-1-aabbccdd.failed").write_text(json.dumps({"reason": "no free file descriptor"}))
    (tmp_path / "engine-2-aabbccdd.failed").write_text("[")
    found = list(checkup._engine_directory(tmp_path))
    assert "1 engine socket" in found[0].found
    assert found[1].found == "could not attach: no free file descriptor"
    assert "cannot be read" in found[2].found
    tmp_path.chmod(0o755)
    assert [f for f in checkup._engine_directory(tmp_path) if "open to everyone" in f.found]


def test_the_exit_code_tells_wrong_from_out_of_reach(capsys: pytest.CaptureFixture[str]) -> None:
    lost = Finding("wrong", "replica r0", "gone", unreachable=True)
    good = Finding("ok", "replica r1", "fine")
    bad = Finding("wrong", "engine r1/0", "gone")
    assert checkup.print_findings([good], "json") is Exit.SUCCEEDED
    assert checkup.print_findings([lost], "json") is Exit.UNREACHABLE
    assert checkup.print_findings([lost, good], "json") is Exit.FAILED
    assert checkup.print_findings([good, bad], "table") is Exit.FAILED
    assert "2 checks: 1 wrong, 0 warnings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdict", "level", "advice"),
    [
        (types_pb2.VERDICT_ENGINE_STOPPED, "wrong", "kill -CONT 4242"),
        (types_pb2.VERDICT_ENGINE_HUNG, "wrong", "4242"),
        (types_pb2.VERDICT_ENGINE_DEAD, "wrong", "restart"),
        (types_pb2.VERDICT_UNKNOWN, "wrong", "log"),
        (types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK, "wrong", "kvctl relieve --replicas r0"),
        (99, "wrong", "kvctl admission"),
        (types_pb2.VERDICT_PAUSED, "warning", "scheduling resume"),
        (types_pb2.VERDICT_FLOWING, "ok", ""),
    ],
)
def test_what_an_engine_does_with_requests_is_judged(verdict: int, level: str, advice: str) -> None:
    replica = fleet_pb2.FleetReplica(name="r0", address="a:1", reachable=True, code="OK")
    replica.info.engines.add(pid=4242)
    row = fleet_pb2.ReplicaAdmission(replica="r0", address="a:1", code="OK")
    row.admission.engines.add(verdict=verdict, explanation="so it is")
    (found,) = checkup.of_admission(replica, row)
    assert found.level == level
    assert advice in found.advice
    assert "so it is" in found.found
