"""Streams of admission: changes at once, a sample at the asked interval, and no reader can grow a buffer.

Interval samples are made when the reader is ready for one, so they never pile up. Changes must not be lost, so they
queue, up to QUEUE of them; a reader that lets its queue overflow, or that takes nothing for PATIENCE_S while something
is due, is dropped with SlowReaderError. It can subscribe again: the first message is always the whole present state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from kvctl.v1 import replica_pb2 as replica

from sidecar.replica.sampler import Sampler

QUEUE: Final = 32
PATIENCE_S: Final = 30.0
MIN_INTERVAL_S: Final = 0.1


class SlowReaderError(Exception):
    """The reader took too long and was dropped: RESOURCE_EXHAUSTED, reason SLOW_READER."""


class WatchEndedError(Exception):
    """The server is shutting down: UNAVAILABLE, reason SERVER_STOPPING."""


class Subscription(AsyncIterator[replica.WatchAdmissionResponse]):
    """One reader. Iterating raises SlowReaderError or WatchEndedError; `close` must be called in the end."""

    def __init__(self, sampler: Sampler, interval_s: float, queue: int, patience_s: float) -> None:
        """`interval_s` 0 means changes only."""
        self._sampler = sampler
        self._interval_s = max(interval_s, MIN_INTERVAL_S) if interval_s > 0 else 0.0
        self._limit = queue
        self._patience_s = patience_s
        self._changes: list[replica.WatchAdmissionResponse] = []
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._first = True
        self._taken_at = self._loop.time()
        self._due_at = self._taken_at
        self._waiting = False
        self.over = asyncio.Event()
        """Set once the reader is dropped or the server stops; `pump` looks at it while a write is blocked."""
        self._error: Exception | None = None
        self._unsubscribe: Callable[[], None] = sampler.on_change(self._changed)
        self._patience: asyncio.TimerHandle = self._loop.call_later(patience_s, self._check_patience)

    def __aiter__(self) -> Subscription:
        """Itself."""
        return self

    async def __anext__(self) -> replica.WatchAdmissionResponse:
        """The next change, or a sample when the interval has passed."""
        self._raise_if_over()
        self._taken_at = self._loop.time()
        if self._first:
            self._first = False
            self._due_at = self._taken_at + self._interval_s
            return replica.WatchAdmissionResponse(admission=self._sampler.snapshot(), changed=False)
        self._waiting = True
        try:
            if not self._changes:
                await self._wait()
        finally:
            self._waiting = False
            self._taken_at = self._loop.time()
        self._raise_if_over()
        if self._changes:
            change = self._changes.pop(0)
            if not self._changes:
                self._ready.clear()
            return change
        # The next one is due an interval after this one was, unless the reader has fallen behind.
        self._due_at = max(self._due_at + self._interval_s, self._loop.time())
        return replica.WatchAdmissionResponse(admission=self._sampler.snapshot(), changed=False)

    async def _wait(self) -> None:
        """Until a change, or until a sample is due."""
        if not self._interval_s:
            await self._ready.wait()
            return
        try:
            async with asyncio.timeout_at(self._due_at):
                await self._ready.wait()
        except TimeoutError:
            return

    def end(self, error: Exception) -> None:
        """Make the reader's next step raise this, and wake it."""
        if self._error is None:
            self._error = error
            self.over.set()
            self._ready.set()

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()
        self._patience.cancel()
        self._changes.clear()

    def raise_if_over(self) -> None:
        """SlowReaderError or WatchEndedError once `over` is set."""
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error

    def _changed(self) -> None:
        if self._error is not None:
            return
        if len(self._changes) >= self._limit:
            self._changes.clear()
            self.end(
                SlowReaderError(f"the reader left {self._limit} changes unread; subscribe again for the present state")
            )
            return
        self._changes.append(replica.WatchAdmissionResponse(admission=self._sampler.snapshot(), changed=True))
        self._ready.set()

    def _check_patience(self) -> None:
        idle_s = self._loop.time() - self._taken_at
        something_due = (
            bool(self._changes) or self._first or (self._interval_s > 0 and self._loop.time() > self._due_at)
        )
        if not self._waiting and something_due and idle_s >= self._patience_s:
            self.end(
                SlowReaderError(f"the reader took nothing for {idle_s:.0f} s; subscribe again for the present state")
            )
            return
        self._patience = self._loop.call_later(max(self._patience_s / 2, 0.01), self._check_patience)


class Watchers:
    """All readers of one replica."""

    def __init__(self, sampler: Sampler, queue: int = QUEUE, patience_s: float = PATIENCE_S) -> None:
        """`queue` is in changes, `patience_s` in seconds."""
        self._sampler = sampler
        self._queue = queue
        self._patience_s = patience_s
        self._subscriptions: set[Subscription] = set()
        self._ended = False

    def __len__(self) -> int:
        """Readers now."""
        return len(self._subscriptions)

    def subscribe(self, interval_s: float) -> Subscription:
        """A new reader. The first message is the present state, at once. 0 means changes only."""
        if self._ended:
            raise WatchEndedError("this sidecar is shutting down")
        subscription = Subscription(self._sampler, interval_s, self._queue, self._patience_s)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """The reader has gone."""
        subscription.close()
        self._subscriptions.discard(subscription)

    def end(self) -> None:
        """Tell every reader that the server stops."""
        self._ended = True
        for subscription in self._subscriptions:
            subscription.end(WatchEndedError("this sidecar is shutting down"))

    async def pump(self, interval_s: float, write: Callable[[replica.WatchAdmissionResponse], Awaitable[None]]) -> None:
        """Subscribe and write every message, until SlowReaderError, WatchEndedError or cancellation.

        A write that a stuck reader blocks is given up as soon as the reader is dropped: without that, the verdict on
        a slow reader would wait for the reader.
        """
        subscription = self.subscribe(interval_s)
        over = asyncio.ensure_future(subscription.over.wait())
        try:
            async for message in subscription:
                writing = asyncio.ensure_future(write(message))
                try:
                    await asyncio.wait((writing, over), return_when=asyncio.FIRST_COMPLETED)
                    if not writing.done():
                        subscription.raise_if_over()
                    await writing
                finally:
                    writing.cancel()
        finally:
            over.cancel()
            self.unsubscribe(subscription)
