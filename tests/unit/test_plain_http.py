"""The plain pages answer a probe whatever else is connected."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

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


async def livez(host: str, port: int) -> bytes:
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 10)
    writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer.rpartition(b"\r\n")[2]


@pytest.mark.parametrize("listen", [":0", "[::]:0"])
@pytest.mark.parametrize("kernel_has_ipv6", [True, False])
async def test_every_interface_is_served_by_ipv4_and_by_ipv6_where_there_is_any(
    listen: str, kernel_has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
    loopbacks = [host for host, family in here if can_bind(host, family)]
    if not kernel_has_ipv6:
        monkeypatch.setattr(socket, "socket", WithoutIpv6)
        loopbacks = ["127.0.0.1"]
    pages = PlainHttp({"/livez": lambda: Page(b"alive\n")})
    at = await pages.start(parse_listen(listen))
    monkeypatch.undo()
    assert "127.0.0.1" in loopbacks
    assert [await livez(host, at.port) for host in loopbacks] == [b"alive\n"] * len(loopbacks)
    await pages.close()


def can_bind(host: str, family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


class WithoutIpv6(socket.socket):
    """Sockets of a kernel that was started with ipv6.disable=1."""

    def __init__(self, family: int = -1, *more: object, **named: object) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *more, **named)  # type: ignore[arg-type]
