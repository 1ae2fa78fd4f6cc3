"""One HTTP/1.1 request over one connection, with an exact account of how far it got.

A reset must not be repeated on a guess, so a caller has to know whether the request was ever sent: a refused connection
means that nothing happened, a broken one that anything may have. Client libraries fold that into one exception, retry
by themselves, or take proxies from the environment, which capture loopback. Hence these few lines over asyncio streams
instead of a dependency: no redirect, no keep-alive, no proxy, no retry, bounded in size and time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

MAX_BODY_BYTES: Final = 8 * 1024 * 1024
"""Far above any /metrics page seen (a few hundred KiB)."""
MAX_HEADERS: Final = 100
_LINE_BYTES: Final = 64 * 1024


class HttpError(Exception):
    """No usable reply.

    HttpError
    ├── NotSentError       the connection did not come about: nothing happened at the server
    └── NoReplyError       the request was sent and no whole reply came back: anything may have happened
        └── NotHttpError   what came back is not HTTP, or too large
    """


class NotSentError(HttpError):
    """The connection was refused, timed out, or broke before the request was out."""


class NoReplyError(HttpError):
    """The request is out, and no whole reply came."""


class NotHttpError(NoReplyError):
    """The reply cannot be read as HTTP."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    prefix: str
    """Path before every route, without a slash at its end."""

    @property
    def url(self) -> str:
        """As a person writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    @property
    def loopback(self) -> bool:
        """Whether it is this machine, as far as the address tells."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    status: int
    content_type: str
    body: bytes


def parse_url(url: str) -> Target:
    """`http://127.0.0.1:8000` and the like; ValueError names what is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"engine URL {url!r}: expected http:// or https://, e.g. http://127.0.0.1:8000")
    if not parts.hostname:
        raise ValueError(f"engine URL {url!r}: it names no host")
    if parts.username or parts.password:
        raise ValueError(f"engine URL of host {parts.hostname}: it must not hold credentials, use a token file")
    if parts.query or parts.fragment:
        raise ValueError(f"engine URL {url!r}: it must end with the path, without ? or #")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"engine URL {url!r}: {error}") from error
    tls = parts.scheme == "https"
    return Target(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


async def request(
    target: Target, method: str, path: str, timeout_s: float, token: str = "", tls: ssl.SSLContext | None = None
) -> Reply:
    """Send one request without a body and read the reply; HttpError says how far it got.

    `path` starts with a slash and may have a query. `timeout_s` bounds everything.
    """
    sent = False
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            context = (tls or ssl.create_default_context()) if target.tls else None
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context, limit=_LINE_BYTES)
            sent = True  # from the first byte handed to the kernel on
            writer.write(_head(target, method, path, token))
            await writer.drain()
            return await _read_reply(reader)
    except TimeoutError as error:
        text = f"{target.url}{path}: no answer within {timeout_s:.1f} s"
        raise (NoReplyError(text) if sent else NotSentError(text)) from error
    except (OSError, ssl.SSLError) as error:
        text = f"{target.url}: {_why(error)}"
        raise (NoReplyError(text) if sent else NotSentError(text)) from error
    except (asyncio.IncompleteReadError, EOFError) as error:
        raise NoReplyError(f"{target.url}{path}: the connection ended before the reply") from error
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise NotHttpError(f"{target.url}{path}: what came back is not an HTTP reply: {error}") from error
    finally:
        if writer is not None:
            writer.close()


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return error.strerror or str(error) or type(error).__name__


def _head(target: Target, method: str, path: str, token: str) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    lines = [
        f"{method} {target.prefix}{path} HTTP/1.1",
        f"Host: {host}:{target.port}",
        "User-Agent: kvctl",
        "Accept: */*",
        "Content-Length: 0",
        "Connection: close",
    ]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def _read_reply(reader: asyncio.StreamReader) -> Reply:
    while True:
        status = _status(await _line(reader))
        headers = await _headers(reader)
        if status >= 200:  # 1xx announces the real one
            break
    body = b"" if status in (204, 304) else await _body(reader, headers)
    return Reply(status, headers.get("content-type", ""), body)


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readuntil(b"\n")
    return line.decode("latin-1").rstrip("\r\n")


def _status(line: str) -> int:
    parts = line.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise ValueError(f"it begins with {line[:40]!r}")
    return int(parts[1])


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await _line(reader)
        if not line:
            return headers
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"a header line reads {line[:40]!r}")
        headers[name.strip().lower()] = value.strip()
    raise ValueError(f"more than {MAX_HEADERS} headers")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader)
    length = headers.get("content-length")
    if length is None:
        body = await reader.read(MAX_BODY_BYTES + 1)
        while len(body) <= MAX_BODY_BYTES and (more := await reader.read(MAX_BODY_BYTES + 1 - len(body))):
            body += more
        return _within(body)
    if not length.isdigit():
        raise ValueError(f"Content-Length is {length[:20]!r}")
    if int(length) > MAX_BODY_BYTES:
        raise ValueError(f"its body has {length} bytes, at most {MAX_BODY_BYTES} are read")
    return await reader.readexactly(int(length))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = int((await _line(reader)).partition(";")[0].strip(), 16)
        if size < 0 or len(body) + size > MAX_BODY_BYTES:
            raise ValueError(f"its body has more than {MAX_BODY_BYTES} bytes")
        if size == 0:
            await _headers(reader)
            return bytes(body)
        body += await reader.readexactly(size)
        await _line(reader)


def _within(body: bytes) -> bytes:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"its body has more than {MAX_BODY_BYTES} bytes")
    return body
