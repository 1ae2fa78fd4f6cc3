"""A coordinator beyond this machine: mutual TLS towards its callers, TLS and a token towards its replicas."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2, fleet_pb2_grpc, replica_pb2_grpc

from sidecar.rpc import addresses, channels, errors
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.tls import ClientTls
from tests.contract.coordinator_in_process import coordinator, keep_reset
from tests.contract.fake_sidecar_server import FakeSidecar
from tests.security.certificates import Authority


async def test_certificates_decide_who_starts_what_and_the_token_goes_to_replicas_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, replica_cert = authority.issue("coordinator"), authority.issue("replica")
    boss, guest = authority.issue("boss"), authority.issue("guest")
    token = tmp_path / "replica-token"
    token.write_text("for-replicas\n")
    fake = FakeSidecar("r0")
    replica = grpc.aio.server()
    replica_pb2_grpc.add_CacheAdminServicer_to_server(fake, replica)
    credentials = grpc.ssl_server_credentials([(replica_cert.key.read_bytes(), replica_cert.cert.read_bytes())])
    port = replica.add_secure_port("localhost:0", credentials)
    await replica.start()
    flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.file)]
    flags += ["--client-role", "boss=operator", "--replica-ca", str(authority.file)]
    flags += ["--replica-token-file", str(token)]

    def as_client(pair: object) -> ClientSecurity:
        return ClientSecurity(ClientTls(authority.file, pair.cert, pair.key, "localhost"))  # type: ignore[attr-defined]

    async with coordinator(tmp_path, [f"r0=localhost:{port}"], *flags, security=as_client(boss)) as running:
        ended = await running.run(keep_reset())
        assert ended.state == fleet_pb2.OPERATION_STATE_SUCCEEDED, ended
        assert ("authorization", "Bearer for-replicas") in fake.metadata
        other = channels.connect(addresses.parse(running.address), as_client(guest))
        stub = fleet_pb2_grpc.FleetAdminStub(other)
        assert (await stub.ListOperations(fleet_pb2.ListOperationsRequest())).operations
        with pytest.raises(grpc.aio.AioRpcError) as denied:
            await stub.StartOperation(fleet_pb2.StartOperationRequest(spec=keep_reset()))
        assert errors.parse(denied.value).code == grpc.StatusCode.PERMISSION_DENIED
        await other.close()
        bare = channels.connect(addresses.parse(running.address))
        with pytest.raises(grpc.aio.AioRpcError) as unreachable:
            await fleet_pb2_grpc.FleetAdminStub(bare).ListOperations(fleet_pb2.ListOperationsRequest(), timeout=5)
        assert unreachable.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        await bare.close()
    await replica.stop(None)
    assert len(fake.effects) == 1
    assert "for-replicas" not in str(ended)
