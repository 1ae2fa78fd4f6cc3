"""kvctl doctor and the certificates that sidecars show."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from fake_sidecar_server import FakeSidecar
from kvctl.v1 import replica_pb2_grpc

from sidecar.cli import certificates
from sidecar.rpc.tls import ClientTls
from tests.security.certificates import Authority

DAY = 86400.0


@pytest.fixture(autouse=True)
def time_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "HANDSHAKE_TIMEOUT_S", 60.0)


@asynccontextmanager
async def sidecar(authority: Authority) -> AsyncIterator[str]:
    pair = authority.issue("replica")
    server = grpc.aio.server()
    replica_pb2_grpc.add_CacheAdminServicer_to_server(FakeSidecar("r0"), server)
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("later", "level", "text"),
    [(-30 * DAY, "ok", "valid until"), (0.0, "warning", "expires on"), (DAY, "wrong", "expired")],
)
async def test_the_certificate_that_a_sidecar_shows_is_judged_by_its_end(
    tmp_path: Path, later: float, level: str, text: str
) -> None:
    authority = Authority(tmp_path)
    now = datetime.datetime.now(datetime.UTC).timestamp() + later
    async with sidecar(authority) as address:
        [found] = await certificates.served({"replica r0": address}, ClientTls(authority.file), now)
    assert (found.level, found.subject) == (level, "certificate of replica r0")
    assert text in found.found


async def test_a_certificate_that_is_not_trusted_is_told_with_openssls_reason(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other-ca")
    async with sidecar(authority) as address:
        [stranger] = await certificates.served({"replica r0": address}, ClientTls(other.file), 0.0)
        [misnamed] = await certificates.served(
            {"replica r0": address}, ClientTls(authority.file, server_name="kvctl.example"), 0.0
        )
    assert (stranger.level, misnamed.level) == ("wrong", "wrong")
    assert "is not trusted" in stranger.found
    assert "Hostname mismatch" in misnamed.found


async def test_nobody_there_and_a_unix_socket_show_no_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    servers = {"gone": "127.0.0.1:1", "local": "unix:/none/kvctl.sock"}
    assert await certificates.served(servers, ClientTls(authority.file), 0.0) == []
