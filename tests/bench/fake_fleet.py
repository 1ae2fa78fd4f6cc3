"""Many fake replicas in one process, for the fan-out benchmark: gRPC sidecars, or HTTP engines for a router.

Commands on stdin: "effects" answers the CLOCK_MONOTONIC nanoseconds of every effect since the last time, as JSON. That
clock is the machine's, so instants of several processes compare.

Each replica is a server of its own on a port of its own, with a connection of its own, as in a real fleet. They answer
at once: what is measured is the caller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
import uuid

EFFECTS: list[int] = []


async def serve_grpc(count: int, first: int) -> list[str]:
    import grpc.aio
    from kvctl.v1 import replica_pb2, replica_pb2_grpc, types_pb2

    class Sidecar(replica_pb2_grpc.CacheAdminServicer):
        def __init__(self, name: str) -> None:
            self.info = types_pb2.ReplicaInfo(name=name, instance_id=uuid.uuid4().hex, version="0.1.0")

        async def GetReplica(self, request: object, context: object) -> object:  # noqa: N802
            return replica_pb2.GetReplicaResponse(replica=self.info)

        async def ResetPrefixCache(  # noqa: N802
            self, request: replica_pb2.ResetPrefixCacheRequest, context: object
        ) -> object:
            EFFECTS.append(time.monotonic_ns())
            answer = replica_pb2.ResetPrefixCacheResponse(request_id=request.request_id)
            engine = answer.engines.add(cached_blocks_dropped=812, requests_running=3, requests_kept=3)
            engine.prefix_cache.state = types_pb2.TIER_STATE_DONE
            return answer

    targets = []
    for index in range(first, first + count):
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        replica_pb2_grpc.add_CacheAdminServicer_to_server(Sidecar(f"r{index:04}"), server)
        targets.append(f"r{index:04}=127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        KEPT.append(server)
    return targets


KEPT: list[object] = []
"""A gRPC server that nobody holds is stopped."""

_ROUTES = {
    "/health": b"OK",
    "/get_server_info": b'{"model_path":"tiny","served_model_name":"tiny","dp_size":1}',
    "/server_info": b'{"model_path":"tiny","served_model_name":"tiny","dp_size":1}',
    "/get_model_info": b'{"model_path":"tiny","is_generation":true}',
    "/model_info": b'{"model_path":"tiny","is_generation":true}',
    "/v1/models": b'{"object":"list","data":[{"id":"tiny","object":"model"}]}',
    "/flush_cache": b"Cache flushed.",
}


async def serve_http(count: int, first: int) -> list[str]:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                words = head.split(" ", 2)
                if len(words) < 3 or not words[1].startswith("/"):
                    return  # a probe for another protocol
                if length := re.search(r"(?i)content-length: *([0-9]+)", head):
                    await reader.readexactly(int(length[1]))
                path = words[1].partition("?")[0]
                if path == "/flush_cache":
                    EFFECTS.append(time.monotonic_ns())
                found = _ROUTES.get(path)
                body = found or b"{}"
                kind = "application/json" if body.startswith(b"{") else "text/plain"
                line = f"HTTP/1.1 {'200 OK' if found else '404 Not Found'}\r\nContent-Type: {kind}\r\n"
                writer.write(f"{line}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    targets = []
    for _ in range(first, first + count):
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        KEPT.append(server)
        targets.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    return targets


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("grpc", "http"))
    parser.add_argument("count", type=int)
    parser.add_argument("first", type=int)
    options = parser.parse_args()
    serve = serve_grpc if options.kind == "grpc" else serve_http
    print(json.dumps(await serve(options.count, options.first)), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "effects":
            print(json.dumps(EFFECTS), flush=True)
            EFFECTS.clear()
    # A thousand servers need no orderly end, and one of gRPC's writes a trace each when its loop is gone.
    os._exit(0)


asyncio.run(main())
