"""kvctl version."""

from __future__ import annotations

import click


@click.command()
def version() -> None:
    """Print the version of kvctl and of Python."""
    import sys

    from engine_bridge import __version__

    click.echo(f"kvctl {__version__} (Python {sys.version.split()[0]})")
