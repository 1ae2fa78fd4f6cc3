"""Where text goes: data to stdout, everything else to stderr.

Output that cannot be written (a full disk) is Unwritten: its exit code never claims that nothing happened.
A reader that goes away (`kvctl ... | head`) is no error: the rest is thrown away and the exit code stays that of the
operation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from google.protobuf.message import Message
from rich.console import Console

from sidecar.cli.failures import unwritten
from sidecar.cli.printers import encoding, style

_left = False


def reader_left() -> bool:
    """Whether nobody reads stdout any more: what prints for ever may end."""
    return _left


def write(text: str) -> None:
    """Text to stdout as it is."""
    with _failing_plainly():
        sys.stdout.write(text)
        sys.stdout.flush()


def show(print_to: Callable[[Console], None], *, wide: bool = False) -> None:
    """A table to stdout."""
    console = style.console(sys.stdout, wide=wide)
    # Also when it captures, rich writes to the stream at the end (nothing, which a full disk refuses too).
    with _failing_plainly(), console.capture() as capture:
        print_to(console)
    write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def encoded(message: Message, output: str) -> None:
    """Json or yaml to stdout."""
    write(encoding.encode(message, output))


def note(text: str) -> None:
    """One line to stderr. When stderr cannot be written there is nowhere to say so, and the work goes on."""
    with suppress(OSError):
        print(style.clean(text), file=sys.stderr, flush=True)


def tell_of_nobody(found: Sequence[Message]) -> None:
    """An empty fleet is said, rather than shown as nothing."""
    if not found:
        note("no replica found; check the fleet's inventory or DNS name")


WARNINGS_SHOWN: Final = 10


def warn(texts: Sequence[str]) -> None:
    """Warnings of an answer to stderr, one a line, the first few."""
    for text in texts[:WARNINGS_SHOWN]:
        note(f"warning: {text}")
    if len(texts) > WARNINGS_SHOWN:
        note(f"{len(texts) - WARNINGS_SHOWN} more warnings; -o json has them all")


@contextmanager
def _failing_plainly() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        global _left
        _left = True
        _let_go()
    except OSError as error:
        _let_go()
        raise unwritten(error) from error


def _let_go() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
