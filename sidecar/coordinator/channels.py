"""The pool of channels to replicas, within the process's file descriptors.

One connection is one descriptor, and a container's default limit is 1,024. So the pool closes the channel that has
been idle longest before it would pass its share, and a lease keeps a channel that is in use from being closed. A
replaced certificate gives new channels; those in use finish on the old ones, and so does everybody while the files are
half written.
"""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import grpc.aio

from sidecar.coordinator.targets import Target
from sidecar.rpc import addresses
from sidecar.rpc.channels import NO_SECURITY, ClientSecurity, connect

LOG: Final = logging.getLogger(__name__)

RESERVED_DESCRIPTORS: Final = 256
"""For everything else a process has open: listeners, the store, event loops, DNS, a second attempt at IPv6."""

LEAST_CHANNELS: Final = 16
MOST_CHANNELS: Final = 4096


def channel_limit() -> int:
    """How many channels may be open: what the descriptor limit leaves, after raising it as far as it may be raised.

    OSError with what to do when the limit is too small for any work.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    wanted = RESERVED_DESCRIPTORS + MOST_CHANNELS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if unlimited else min(wanted, hard)
        if raised > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY:
        return MOST_CHANNELS
    room = min(soft - RESERVED_DESCRIPTORS, MOST_CHANNELS)
    if room >= LEAST_CHANNELS:
        return room
    if soft >= 4 * LEAST_CHANNELS:
        return LEAST_CHANNELS
    raise OSError(f"this process may open {soft} files; at least {4 * LEAST_CHANNELS} are needed: raise `ulimit -n`")


@dataclass(slots=True)
class _Pooled:
    channel: grpc.aio.Channel
    stamp: object
    users: int = 0
    closing: bool = False


class Channels:
    """Open channels by address. Belongs to one event loop; close it."""

    def __init__(self, security: ClientSecurity = NO_SECURITY, limit: int | None = None) -> None:
        """`limit`: channels open at once, in use ones apart; None takes what the descriptor limit leaves."""
        self._security = security
        self._limit = limit if limit is not None else channel_limit()
        self._open: OrderedDict[tuple[str, str], _Pooled] = OrderedDict()

    def check(self, target: Target) -> None:
        """ValueError when the address is none, or a token would travel there in plain text."""
        self._security.check(addresses.parse(target.address))

    @asynccontextmanager
    async def lease(self, target: Target) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to a target, kept open at least until the block ends."""
        key = (target.address, target.server_name)
        pooled = await self._take(key, target)
        pooled.users += 1
        try:
            yield pooled.channel
        finally:
            pooled.users -= 1
            if pooled.closing and not pooled.users:
                await pooled.channel.close()
            else:
                await self._shrink()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Credentials of one call: the bearer token as its file now has it."""
        return self._security.metadata()

    async def close(self) -> None:
        """Close every channel; calls under way end as cancelled."""
        pooled, self._open = list(self._open.values()), OrderedDict()
        for each in pooled:
            await each.channel.close()

    async def _take(self, key: tuple[str, str], target: Target) -> _Pooled:
        pooled = self._open.get(key)
        if pooled is not None and (pooled.stamp == self._stamp() or self._half_replaced(target)):
            self._open.move_to_end(key)
            return pooled
        if pooled is not None:
            del self._open[key]
            pooled.closing = True
            if not pooled.users:
                await pooled.channel.close()
        stamp, torn = self._stamp(), []
        channel = connect(addresses.parse(target.address), self._security_for(target))
        while stamp != self._stamp():
            # Certificate and key were read from files of different ages.
            torn.append(channel)
            stamp = self._stamp()
            channel = connect(addresses.parse(target.address), self._security_for(target))
        fresh = self._open[key] = _Pooled(channel, stamp)
        for each in torn:
            await each.close()
        return fresh

    def _stamp(self) -> object:
        return self._security.tls.version() if self._security.tls else None

    def _half_replaced(self, target: Target) -> bool:
        """Whether the certificate files, which have changed, cannot be used as they are now."""
        tls = self._security.tls
        if tls is None:
            return False
        try:
            tls.check()
        except (OSError, ValueError) as error:
            LOG.warning("certificate not read again for %s, the previous one stays in use: %s", target.address, error)
            return True
        return False

    def _security_for(self, target: Target) -> ClientSecurity:
        tls = self._security.tls
        if tls is None or not target.server_name or tls.server_name:
            return self._security
        return replace(self._security, tls=replace(tls, server_name=target.server_name))

    async def _shrink(self) -> None:
        if len(self._open) <= self._limit:
            return
        for key in [key for key, pooled in self._open.items() if not pooled.users][: len(self._open) - self._limit]:
            await self._open.pop(key).channel.close()

    @property
    def limit(self) -> int:
        """Channels open at once, those apart that are in use."""
        return self._limit

    def __len__(self) -> int:
        return len(self._open)
