"""A few plain-HTTP pages: /metrics, /livez, /readyz.

Prometheus scrapes and kubelet probes bring no client certificate and speak no gRPC. All they need is GET of a few fixed
paths, on the same event loop, so there is no framework and no thread: a request line, headers that are ignored, one
answer, and the connection closes. Everything is bounded, because this port may face other machines.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from sidecar.rpc import addresses
from sidecar.rpc.addresses import Address

LOG: Final = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S: Final = 5.0
_MAX_HEADER_BYTES: Final = 8192
_MAX_CONNECTIONS: Final = 64

PLAIN: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """One answer."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = PLAIN


Routes = Mapping[str, Callable[[], Page]]


class PlainHttp:
    """Serves fixed paths."""

    def __init__(self, routes: Routes) -> None:
        """Each route is called for each request; it must not block."""
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def start(self, address: Address) -> Address:
        """Listen; returns the address with the port the kernel chose. OSError names an address that cannot be had."""
        why = addresses.why_not_bindable(address)
        if why:
            raise OSError(why)
        at = addresses.served(address)
        if at.everywhere and ":" in at.host:
            # asyncio would serve IPv6 alone: a probe of kubelet's may come by either.
            both = socket.create_server((at.host, at.port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
            self._server = await asyncio.start_server(self._serve, sock=both, limit=_MAX_HEADER_BYTES)
        else:
            self._server = await asyncio.start_server(
                self._serve, at.host, at.port, limit=_MAX_HEADER_BYTES, backlog=64
            )
        return address.with_port(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop what is open."""
        if self._server is None:
            return
        self._server.close()
        for writer in tuple(self._open):
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            # The one that has been here longest: idle connections must not keep a probe out.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            LOG.debug("http request dropped reason=%s", type(error).__name__)
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, target = _request_line(head)
        path = target.partition("?")[0]
        route = self._routes.get(path)
        if method not in ("GET", "HEAD"):
            page = Page(b"only GET and HEAD are served here\n", HTTPStatus.METHOD_NOT_ALLOWED)
        elif route is None:
            known = " ".join(sorted(self._routes))
            page = Page(f"not found; served here: {known}\n".encode(), HTTPStatus.NOT_FOUND)
        else:
            page = self._call(path, route)
        header = (
            f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n"
            f"Content-Length: {len(page.body)}\r\nConnection: close\r\nCache-Control: no-store\r\n\r\n"
        )
        return header.encode() + (b"" if method == "HEAD" else page.body)

    def _call(self, path: str, route: Callable[[], Page]) -> Page:
        try:
            return route()
        except Exception:
            LOG.exception("http page failed path=%s", path)
            return Page(b"this page failed; the log has the trace\n", HTTPStatus.INTERNAL_SERVER_ERROR)


def _request_line(head: bytes) -> tuple[str, str]:
    parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    return (parts[0], parts[1]) if len(parts) == 3 else ("", "")
