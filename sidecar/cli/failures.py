"""How a command ends early: one clear line on stderr and an exit code, never a traceback."""

from __future__ import annotations

from typing import Final

import click

UNWRITTEN: Final = 5
"""Exit code when the result could not be written: whatever was asked may have been done."""


class Refusal(click.ClickException):
    """The command cannot go on. The text says what was found, what was expected, what to do next."""

    def __init__(self, message: str, code: int = 2) -> None:
        """`code`: see `exitcodes`; 2 for what the person typed or configured."""
        super().__init__(message)
        self.code = code

    def show(self, file: object = None) -> None:
        """One line on stderr."""
        click.echo(f"kvctl: {' '.join(self.message.split())}", err=True)


class Unwritten(Refusal):
    """Stdout cannot be written, so nobody has seen the result."""

    def __init__(self, message: str, why: str) -> None:
        """`why`: the system's words, such as "No space left on device"."""
        super().__init__(message, UNWRITTEN)
        self.why = why


def unwritten(error: OSError) -> Unwritten:
    """What to tell when stdout gave this error."""
    why = error.strerror or str(error)
    return Unwritten(f"the output could not be written: {why}", why)
