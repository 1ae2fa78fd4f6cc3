"""A command group that imports a command only when it is run.

`kvctl --help` and shell completion must answer at once, and gRPC alone takes longer to import than everything else.
So the group knows each command's one-line help from a table, and the module only when the command is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple, TypedDict, Unpack

import click


class Entry(NamedTuple):
    """Where a command is, and the line that `--help` shows for it."""

    where: str
    """"module:attribute"."""
    help: str


class ReaderLeft(Exception):  # noqa: N818 - nothing went wrong
    """Whoever read the output has gone. As a BrokenPipeError click would make it exit code 1."""


class _GroupOptions(TypedDict, total=False):
    name: str | None
    help: str | None
    context_settings: dict[str, object]
    no_args_is_help: bool


class LazyGroup(click.Group):
    """A group whose commands are entries of a table."""

    def __init__(self, entries: Mapping[str, Entry], **options: Unpack[_GroupOptions]) -> None:
        super().__init__(**options)
        self._entries = entries

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        """As click does; this shows the group's own help."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError as error:
            raise ReaderLeft from error

    def invoke(self, ctx: click.Context) -> object:
        """As click does."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderLeft from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table: what is used most comes first."""
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.where.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.where} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a hint at the nearest name."""
        if args and args[0] not in self._entries and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self._entries.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        """Names and help from the table; options as click completes them."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=entry.help)
            for name, entry in self._entries.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]
