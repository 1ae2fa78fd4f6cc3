"""The plain pages answer a probe whatever else is connected."""

from __future__ import annotations

import asyncio

from sidecar.rpc.addresses import parse_listen
from sidecar.rpc.plain_http import _MAX_CONNECTIONS, Page, PlainHttp


async def test_idle_connections_keep_no_probe_out():
    pages = PlainHttp({"/livez": lambda: Page(b"alive\n")})
    at = await pages.start(parse_listen("127.0.0.1:0"))
    idle = [await asyncio.open_connection(at.host, at.port) for _ in range(_MAX_CONNECTIONS + 5)]
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"alive\n")
    for _, one in [*idle, (reader, writer)]:
        one.close()
    await pages.close()
