"""How a command ends early: one clear line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import click


class Refusal(click.ClickException):
    """The command cannot go on. The text says what was found, what was expected, what to do next."""

    def __init__(self, message: str, code: int = 2) -> None:
        """`code`: see `exitcodes`; 2 for what the person typed or configured."""
        super().__init__(message)
        self.code = code

    def show(self, file: object = None) -> None:
        """One line on stderr."""
        click.echo(f"kvctl: {' '.join(self.message.split())}", err=True)
