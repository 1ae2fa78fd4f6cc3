"""The terminal of a command that goes on until somebody stops it: keys, a new size, Ctrl-Z, and giving it back.

Keys are read one by one and not echoed, so a program that stops or ends otherwise leaves a terminal behind that shows
nothing of what is typed. SIGTERM counts as q, because the terminal is put back only by leaving. Ctrl-Z gives it back
first, and takes it again when the shell says `fg`.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_ESCAPE: Final = "\x1b"
_LOOK_S: Final = 0.1


class Attended:
    """A terminal at which somebody sits. `give_back` and `take_again` are called around a stop by Ctrl-Z."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._before = termios.tcgetattr(number)
        self._ending = False
        self._stopping = False
        self._size_before = self._size()
        self.give_back: Callable[[], None] = lambda: None
        self.take_again: Callable[[], None] = lambda: None

    def take(self) -> None:
        """Read keys one by one from here on. Call it on the running loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end)
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        tty.setcbreak(self._number)

    def release(self) -> None:
        """Put the terminal back as it was."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGTSTP):
            loop.remove_signal_handler(number)
        termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)

    async def quits(self, done: Callable[[], bool], within_s: float, redraw: Callable[[], None] | None = None) -> bool:
        """Whether somebody wants to leave, before `done` or the end of the time. `redraw` is called when the terminal
        shows something else than before: it has another size, or the shell had it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while not done() and loop.time() < until:
            if self._ending or self._asked_to_leave():
                return True
            size = self._size()
            if (self._stopped() or size != self._size_before) and redraw is not None:
                self._size_before = size
                redraw()
            await asyncio.sleep(_LOOK_S)
        return False

    def _asked_to_leave(self) -> bool:
        """Whether q, Escape or Ctrl-C was pressed since the last look. A cursor key is several characters, of which
        Escape is the first.
        """
        ready, _, _ = select.select([self._number], [], [], 0)
        if not ready:
            return False
        try:
            keys = os.read(self._number, 32).decode("ascii", "replace")
        except OSError:
            keys = ""
        if not keys:
            return True  # the terminal has gone
        return keys == _ESCAPE or (not keys.startswith(_ESCAPE) and any(key in keys for key in "qQ\x03"))

    def _stopped(self) -> bool:
        """Stop here when Ctrl-Z was pressed; whether this process was stopped and goes on."""
        if not self._stopping:
            return False
        self._stopping = False
        self.give_back()
        self.release()
        # With its default action again. To this thread, so that the call returns when the process goes on, not before
        # it stops.
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        self.take()
        self.take_again()
        return True

    def _size(self) -> tuple[int, int]:
        try:
            return os.get_terminal_size(self._number)
        except OSError:
            return 0, 0

    def _end(self) -> None:
        self._ending = True

    def _stop(self) -> None:
        self._stopping = True


@contextmanager
def attended() -> Iterator[Attended]:
    """The terminal of stdin; put back whatever happens."""
    terminal = Attended(sys.stdin.fileno())
    try:
        terminal.take()
        yield terminal
    finally:
        terminal.release()
