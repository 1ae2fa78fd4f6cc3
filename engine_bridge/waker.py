"""Wakes an engine that is blocked for lack of work when a client has something to say, or a timer runs out.

While the engine is busy its own thread looks at the socket once per loop, so nobody must look for it: the waker's epoll
holds the listener's epoll with EPOLLONESHOT, armed only when the engine is about to block. It then fires once and is
silent until armed again, and the thread takes no GIL time from a busy engine.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

LONGEST_POLL_S: Final = 3600.0
"""A poll of more milliseconds than fit an int raises, and would end the thread; a later instant is polled for again."""


class Waker:
    """A daemon thread; `wake` is what it calls, and must be safe on any thread."""

    def __init__(self, watched_fd: int, wake: Callable[[], None]) -> None:
        """Start, not armed. `watched_fd` becomes readable when there is something to drain."""
        self._watched = watched_fd
        self._wake = wake
        self._wake_at_ns = 0
        self._closed = False
        with ExitStack() as undo:
            self._kick = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._kick)
            self._epoll = undo.enter_context(select.epoll(flags=select.EPOLL_CLOEXEC))
            self._epoll.register(watched_fd, 0)
            self._epoll.register(self._kick, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="kvctl-waker", daemon=True)
            self._thread.start()
            undo.pop_all()

    def arm(self, wake_at_ns: int, *, at_once: bool = False) -> None:
        """Watch until something arrives, or until `wake_at_ns` (CLOCK_MONOTONIC; 0: no timer)."""
        if at_once:
            self._wake()
            return
        # Level-triggered: what arrived between the last look and this line fires at once.
        self._epoll.modify(self._watched, select.EPOLLIN | select.EPOLLONESHOT)
        if wake_at_ns != self._wake_at_ns:
            self._wake_at_ns = wake_at_ns
            os.eventfd_write(self._kick, 1)

    def close(self) -> None:
        """End the thread and close. Called on another thread than the waker's."""
        self._closed = True
        os.eventfd_write(self._kick, 1)
        self._thread.join(timeout=1)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close descriptors only; in a forked child the thread does not exist."""
        self._closed = True
        self._epoll.close()
        os.close(self._kick)

    def _run(self) -> None:
        while not self._closed:
            wake_at = self._wake_at_ns
            # Rounded up, so that the timer has passed when the poll ends.
            left = (wake_at - time.monotonic_ns()) / 1e9 + 0.0005
            timeout = min(max(0.0, left), LONGEST_POLL_S) if wake_at else None
            events = self._epoll.poll(timeout)
            if self._closed:
                return
            fired = [fd for fd, _ in events]
            if self._kick in fired:
                os.eventfd_read(self._kick)
                fired.remove(self._kick)
            due = wake_at and wake_at == self._wake_at_ns and time.monotonic_ns() >= wake_at
            if due:
                self._wake_at_ns = 0
            if fired or due:
                self._wake()
