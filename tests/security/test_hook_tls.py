"""A container's hook reaches the sidecar of its pod, whose certificate has a name and no address."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import grpc.aio
from kvctl.v1 import replica_pb2_grpc

from tests.contract.fake_sidecar_server import FakeSidecar
from tests.security.certificates import Authority


async def test_a_hook_expects_the_name_that_it_is_given(tmp_path: Path):
    authority = Authority(tmp_path)
    own, client = authority.issue("kvctl-sidecar", sans=False), authority.issue("hook")
    server = grpc.aio.server()
    replica_pb2_grpc.add_CacheAdminServicer_to_server(FakeSidecar("r0"), server)
    pair = [(own.key.read_bytes(), own.cert.read_bytes())]
    credentials = grpc.ssl_server_credentials(pair, authority.file.read_bytes(), require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    words = ["--ca", str(authority.file), "--cert", str(client.cert), "--key", str(client.key)]
    words += ["--sidecar", f"127.0.0.1:{port}", "--timeout", "20s", "--server-name", "kvctl-sidecar"]
    try:
        hook = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidecar.cli.main", "hook", "post-start", *words, stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(hook.communicate(), 60)
    finally:
        await server.stop(0)
    assert said.decode() == "post-start: the sidecar r0 answers\n"
