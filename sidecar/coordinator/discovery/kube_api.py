"""A small client of the Kubernetes API: requests, and watches that end cleanly.

Answers come back as bytes; whoever asked decodes them into the few fields that matter to it (msgspec structs), so
that an object of any size or version costs no more than that. One client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final, Literal

import aiohttp
import msgspec

from sidecar.coordinator.discovery.kube_access import Access

REQUEST_TIMEOUT_S: Final = 15.0
"""For one request. An API server answers in milliseconds or is in trouble."""

WATCH_SECONDS: Final = 290
"""How long the server keeps one watch open before it ends it; every client should let watches move over servers."""

_MAX_LINE_BYTES: Final = 4 * 1024 * 1024
_SILENCE_S: Final = WATCH_SECONDS + 30.0

MergePatch: Final = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused, or could not be reached."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        """`status`: HTTP status, 0 when there was no answer. `reason`: Kubernetes' own word, e.g. "Conflict"."""
        super().__init__(message)
        self.status = status
        self.reason = reason


class _Status(msgspec.Struct):
    reason: str = ""
    message: str = ""
    code: int = 0


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class Api:
    """Requests to one API server."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: aiohttp.ClientSession | None = None
        self._stamp: tuple[tuple[int, int, int], ...] = ()

    async def request(
        self,
        method: Literal["GET", "POST", "PATCH", "PUT", "DELETE"],
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """The body of the answer. ApiError when it is no success."""
        headers = {"Content-Type": content_type, "Accept": "application/json", **self.access.headers()}
        session = await self._connected()
        limit = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        try:
            async with session.request(
                method, self.access.server + path, params=params, data=body, headers=headers, timeout=limit
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if answer.status >= 400:
            raise _refusal(answer.status, content, f"{method} {path}")
        return content

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[WatchEvent]:
        """Changes from `params["resourceVersion"]` on, with bookmarks, until the server ends the watch.

        ApiError with status 410 when that version is no longer kept: list again.
        """
        asked = {**params, "watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        session = await self._connected()
        limit = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=_SILENCE_S)
        try:
            async with session.get(
                self.access.server + path, params=asked, headers=self.access.headers(), timeout=limit
            ) as answer:
                if answer.status >= 400:
                    raise _refusal(answer.status, await answer.read(), f"watch {path}")
                async for line in answer.content:
                    if not line.strip():
                        continue
                    event = msgspec.json.decode(line, type=WatchEvent)
                    if event.type == "ERROR":
                        raise _refusal(500, bytes(event.object), f"watch {path}")
                    yield event
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _connected(self) -> aiohttp.ClientSession:
        stamp = self.access.stamp()
        if self._session is not None and stamp == self._stamp:
            return self._session
        await self.close()
        context = self.access.ssl_context()
        connector = aiohttp.TCPConnector(ssl=context if context is not None else True)
        # trust_env stays off: a proxy in the environment must not capture the way to the API server.
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=_MAX_LINE_BYTES)
        self._stamp = stamp
        return self._session

    def _unreachable(self, error: Exception) -> ApiError:
        what = "no answer in time" if isinstance(error, TimeoutError | asyncio.TimeoutError) else str(error)
        return ApiError(0, "Unreachable", f"the Kubernetes API at {self.access.server} cannot be reached: {what}")


def _refusal(status: int, content: bytes, what: str) -> ApiError:
    try:
        told = msgspec.json.decode(content, type=_Status)
    except (msgspec.DecodeError, msgspec.ValidationError):
        told = _Status(message=content[:200].decode("utf-8", "replace"))
    code = told.code or status
    return ApiError(code, told.reason, f"{what}: {code} {told.reason}: {told.message}".rstrip(": "))
