"""Who may call what: every method with every credential, and what is never said."""

from __future__ import annotations

import os
import ssl
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from kvctl.v1 import replica_pb2 as api

from sidecar.replica.service import ACCESS
from sidecar.rpc import addresses, channels, errors
from sidecar.rpc.auth import Authorizer, Role, TokenFile
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.tls import ClientTls
from tests.contract.sidecar_process import SidecarProcess, run_to_end, wait_until
from tests.fake_engine.process import EngineProcess
from tests.security.certificates import Authority

Code = grpc.StatusCode
SERVICE = api.DESCRIPTOR.services_by_name["CacheAdmin"]
SECRETS = {"viewer": "viewer-secret-1", "operator": "operator-secret-2", "admin": "admin-secret-3"}
RANK = {None: 0, "viewer": 1, "operator": 2, "admin": 3}


@dataclass
class Guarded:
    sidecar: SidecarProcess
    engine: EngineProcess
    tokens: dict[str, Path]
    authority: Authority


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    """mTLS and tokens, both."""
    root = tmp_path_factory.mktemp("guarded")
    authority = Authority(root)
    server = authority.issue("localhost", "server")
    tokens = {}
    for role, secret in SECRETS.items():
        tokens[role] = root / f"{role}-token"
        tokens[role].write_text(f"  {secret}\r\n\n")
    engine_dir = root / "engines"
    engine_dir.mkdir(mode=0o700)
    engine = EngineProcess(engine_dir)
    words = ["--listen", "0.0.0.0:0", "--tls-cert", str(server.cert), "--tls-key", str(server.key)]
    words += [word for role, path in tokens.items() for word in ("--token-file", f"{role}={path}")]
    sidecar = SidecarProcess(engine_dir, root, *words)
    sidecar.address = "127.0.0.1:" + sidecar.address.rpartition(":")[2]
    try:
        sidecar.wait_ready()
        yield Guarded(sidecar, engine, tokens, authority)
    finally:
        sidecar.end()
        engine.end()


def request_for(method) -> Message:
    """A request that changes as little as possible."""
    message: Message = getattr(api, method.input_type.name)()
    for field in method.input_type.fields:
        if field.name.endswith("request_id"):
            setattr(message, field.name, str(uuid.uuid4()))
        if field.name == "validate_only":
            message.validate_only = True
        if field.name == "lease":
            message.lease.seconds = 5
    return message


def call(channel: grpc.Channel, method, metadata) -> errors.Failure | None:
    path = f"/{SERVICE.full_name}/{method.name}"
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    answer_type = getattr(api, method.output_type.name)
    stub = make(path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer_type.FromString)
    try:
        answer = stub(request_for(method), timeout=30, metadata=metadata)
        if method.server_streaming:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return errors.parse(error)
    return None


@pytest.mark.parametrize("method", list(SERVICE.methods), ids=lambda method: method.name)
def test_every_method_is_denied_to_every_credential_that_is_too_small(guarded, method):
    path = f"/{SERVICE.full_name}/{method.name}"
    tls = ClientTls(ca_file=guarded.authority.file)
    for role in (None, "viewer", "operator", "admin"):
        security = ClientSecurity(tls, guarded.tokens[role] if role else None)
        with guarded.sidecar.channel(security) as channel:
            failed = call(channel, method, security.metadata())
        denied = failed is not None and failed.code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
        assert denied == (RANK[role] < ACCESS[path]), (method.name, role, failed)
        if denied:
            assert failed.code is (Code.UNAUTHENTICATED if role is None else Code.PERMISSION_DENIED)
            assert failed.reason == ("BAD_CREDENTIALS" if role is None else "ROLE_TOO_SMALL")
            assert failed.metadata["method"] == path
            assert failed.metadata["role_needed"] == ACCESS[path].name.lower()


def test_every_method_of_the_api_has_a_rule_and_no_rule_is_for_nothing():
    assert set(ACCESS) == {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}


def test_a_method_without_a_rule_is_denied_even_to_those_trusted_most():
    with pytest.raises(errors.Failure, match="denied to everyone"):
        Authorizer(rules={}).authorize("/kvctl.v1.CacheAdmin/ResetPrefixCache", (), {})


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer ", "Bearer", "Basic admin-secret-3", "admin-secret-3", "Bearer admin-secret-3x"]
)
def test_a_wrong_credential_is_unauthenticated_and_not_repeated(guarded, header):
    tls = ClientSecurity(ClientTls(ca_file=guarded.authority.file))
    with guarded.sidecar.channel(tls) as channel:
        failed = call(channel, SERVICE.methods_by_name["GetReplica"], (("authorization", header),))
    assert failed is not None
    assert failed.code is Code.UNAUTHENTICATED
    assert "secret" not in str(failed)


def test_probes_need_no_credentials(guarded):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with guarded.sidecar.channel(ClientSecurity(ClientTls(ca_file=guarded.authority.file))) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_is_not_served_beyond_loopback(guarded):
    security = ClientSecurity(ClientTls(ca_file=guarded.authority.file), guarded.tokens["admin"])
    with guarded.sidecar.channel(security) as channel:
        stub = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as raised:
            stub(b"", timeout=3, metadata=security.metadata())
    assert raised.value.code() is Code.UNIMPLEMENTED


def test_plain_text_is_not_served_on_a_tls_port(guarded):
    with guarded.sidecar.channel() as channel:
        failed = call(channel, SERVICE.methods_by_name["GetReplica"], ())
    assert failed is not None
    assert failed.code is Code.UNAVAILABLE


def test_no_secret_is_ever_logged_or_audited(guarded):
    security = ClientSecurity(ClientTls(ca_file=guarded.authority.file), guarded.tokens["operator"])
    with guarded.sidecar.channel(security) as channel:
        make = channel.unary_unary(
            f"/{SERVICE.full_name}/ResetPrefixCache",
            request_serializer=api.ResetPrefixCacheRequest.SerializeToString,
            response_deserializer=api.ResetPrefixCacheResponse.FromString,
        )
        make(api.ResetPrefixCacheRequest(running_requests=3), timeout=30, metadata=security.metadata())
        call(channel, SERVICE.methods_by_name["PauseScheduling"], (("authorization", "Bearer stolen-secret-9"),))
    said = guarded.sidecar.log() + guarded.sidecar.audit_file.read_text()
    assert "secret" not in said
    begin, end = guarded.sidecar.audit()[-2:]
    assert (begin["audit"], begin["caller"], begin["role"]) == ("begin", "token:operator-token", "operator")
    assert (end["audit"], end["code"]) == ("end", "OK")


def test_a_rotated_token_is_picked_up_and_the_old_one_is_refused(guarded):
    path = guarded.tokens["viewer"]
    tls = ClientTls(ca_file=guarded.authority.file)
    method = SERVICE.methods_by_name["GetReplica"]

    def accepted(token: str) -> bool:
        with guarded.sidecar.channel(ClientSecurity(tls)) as channel:
            return call(channel, method, (("authorization", f"Bearer {token}"),)) is None

    assert accepted(SECRETS["viewer"])
    replacement = path.with_suffix(".new")
    replacement.write_text("viewer-secret-new\n")
    replacement.rename(path)
    try:
        wait_until(lambda: accepted("viewer-secret-new"), 30)
        assert not accepted(SECRETS["viewer"])
        path.unlink()
        wait_until(lambda: "not reloaded" in guarded.sidecar.log() or not accepted("viewer-secret-new"), 30)
        assert accepted("viewer-secret-new"), "an unreadable file keeps what was in force"
    finally:
        path.write_text(SECRETS["viewer"] + "\n")
    wait_until(lambda: accepted(SECRETS["viewer"]), 30)


# --- listening ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", ":0"])
def test_it_refuses_to_serve_other_machines_unprotected(tmp_path, listen):
    ended = run_to_end("--engine-dir", str(tmp_path), "--listen", listen, "--metrics", "off")
    assert ended.returncode == 4
    assert "--insecure" in ended.stderr
    assert "TLS" in ended.stderr


def test_tokens_without_tls_are_not_enough_beyond_this_machine(tmp_path):
    token = tmp_path / "token"
    token.write_text("x")
    words = ["--engine-dir", str(tmp_path), "--listen", "0.0.0.0:0", "--metrics", "off"]
    ended = run_to_end(*words, "--token-file", f"admin={token}")
    assert ended.returncode == 4
    assert "TLS" in ended.stderr
    assert "credentials" not in ended.stderr


def test_insecure_says_what_it_does(tmp_path):
    sidecar = SidecarProcess(tmp_path, tmp_path, "--listen", "0.0.0.0:0", "--insecure")
    try:
        assert "anyone who can connect is admin" in sidecar.log()
    finally:
        sidecar.end()


def test_tokens_are_enforced_on_loopback_too(tmp_path):
    token = tmp_path / "token"
    token.write_text("x")
    sidecar = SidecarProcess(tmp_path, tmp_path, "--token-file", f"admin={token}")
    try:
        with sidecar.channel() as channel:
            failed = call(channel, SERVICE.methods_by_name["GetReplica"], ())
            assert failed is not None
            assert failed.code is Code.UNAUTHENTICATED
            assert call(channel, SERVICE.methods_by_name["GetReplica"], (("authorization", "bearer x"),)) is None
    finally:
        sidecar.end()


def test_a_client_does_not_send_a_token_in_plain_text_beyond_this_machine(tmp_path):
    token = tmp_path / "token"
    token.write_text("x")
    away = addresses.parse("replica.example:7700")
    with pytest.raises(ValueError, match="unencrypted"):
        channels.connect_blocking(away, ClientSecurity(token_file=token))
    channels.connect_blocking(away, ClientSecurity(token_file=token, insecure=True)).close()
    channels.connect_blocking(addresses.parse("127.0.0.1:1"), ClientSecurity(token_file=token)).close()


# --- mutual TLS --------------------------------------------------------------------------------------------------


@pytest.fixture
def mutual(tmp_path) -> Iterator[tuple[SidecarProcess, Authority]]:
    authority = Authority(tmp_path)
    server = authority.issue("localhost", "server")
    words = ["--listen", "0.0.0.0:0", "--tls-cert", str(server.cert), "--tls-key", str(server.key)]
    words += ["--tls-client-ca", str(authority.file), "--client-role", "coordinator=operator"]
    engine_dir = tmp_path / "engines"
    engine_dir.mkdir(mode=0o700)
    sidecar = SidecarProcess(engine_dir, tmp_path, *words)
    sidecar.address = "127.0.0.1:" + sidecar.address.rpartition(":")[2]
    try:
        yield sidecar, authority
    finally:
        sidecar.end()


def with_certificate(authority: Authority, name: str) -> ClientSecurity:
    pair = authority.issue(name, sans=False)
    return ClientSecurity(ClientTls(authority.file, pair.cert, pair.key))


def test_a_client_without_a_certificate_or_with_a_strangers_cannot_connect(mutual, tmp_path):
    sidecar, authority = mutual
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "other-ca").issue("coordinator", sans=False)
    for tls in (ClientTls(authority.file), ClientTls(authority.file, stranger.cert, stranger.key)):
        with sidecar.channel(ClientSecurity(tls)) as channel:
            failed = call(channel, SERVICE.methods_by_name["GetReplica"], ())
        assert failed is not None
        assert failed.code is Code.UNAVAILABLE


def test_the_role_of_a_certificate_is_what_was_configured_and_viewer_otherwise(mutual):
    sidecar, authority = mutual
    reset = SERVICE.methods_by_name["ResetPrefixCache"]
    pause = SERVICE.methods_by_name["PauseScheduling"]
    with sidecar.channel(with_certificate(authority, "coordinator")) as channel:
        assert call(channel, reset, ()).reason == "NO_ENGINE"
        assert call(channel, pause, ()).reason == "ROLE_TOO_SMALL"
    with sidecar.channel(with_certificate(authority, "someone")) as channel:
        assert call(channel, SERVICE.methods_by_name["GetReplica"], ()) is None
        failed = call(channel, reset, ())
    assert failed.reason == "ROLE_TOO_SMALL"
    assert "cert:someone has viewer" in failed.message


def test_a_rotated_server_certificate_is_served_without_dropping_a_call(mutual):
    sidecar, authority = mutual
    security = with_certificate(authority, "someone")
    with sidecar.stub_over(security) as stub:
        watch = stub.WatchAdmission(api.WatchAdmissionRequest(interval={"nanos": 100_000_000}), timeout=30)
        next(watch)
        before = served_serial(sidecar, authority, security)
        renewed = authority.issue("localhost", "server")
        assert renewed.serial != before
        wait_until(lambda: served_serial(sidecar, authority, security) == renewed.serial, 30)
        for _ in range(3):
            next(watch)
        watch.cancel()


def test_a_half_written_certificate_keeps_the_old_one_in_force(mutual):
    sidecar, authority = mutual
    security = with_certificate(authority, "someone")
    before = served_serial(sidecar, authority, security)
    server = authority.directory / "server.crt"
    whole = server.read_bytes()
    server.write_bytes(whole[: len(whole) // 2])
    assert served_serial(sidecar, authority, security) == before
    assert "not reloaded" in sidecar.log()
    renewed = authority.issue("localhost", "server")
    wait_until(lambda: served_serial(sidecar, authority, security) == renewed.serial, 30)


def served_serial(sidecar: SidecarProcess, authority: Authority, security: ClientSecurity) -> int:
    """Serial number of the certificate in force, from a fresh handshake."""
    import socket

    from cryptography import x509

    context = ssl.create_default_context(cafile=str(authority.file))
    context.set_alpn_protocols(["h2"])
    assert security.tls is not None
    context.load_cert_chain(str(security.tls.cert_file), str(security.tls.key_file))
    host, _, port = sidecar.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        der = wrapped.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


# --- token files -------------------------------------------------------------------------------------------------


def test_a_token_file_may_hold_two_tokens_and_comments(tmp_path):
    path = tmp_path / "t"
    path.write_text("# rotated on Monday\nold\n\n new \r\n")
    file = TokenFile(Role.VIEWER, path)
    assert [file.matches(token) for token in (b"old", b"new", b"# rotated on Monday", b"")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("content", "says"), [("", "empty"), ("\n \n", "empty"), ("a b\n", "space"), ("é\n", "ASCII")])
def test_a_token_file_that_protects_nothing_is_refused_without_its_content(tmp_path, content, says):
    path = tmp_path / "t"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=says) as caught:
        TokenFile(Role.ADMIN, path)
    assert str(path) in str(caught.value)


def test_an_unreadable_token_file_names_uid_and_path(tmp_path):
    with pytest.raises(OSError, match=f"uid {os.getuid()}"):
        TokenFile(Role.ADMIN, tmp_path / "absent")
