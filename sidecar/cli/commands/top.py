"""kvctl top."""

from __future__ import annotations

import click

from sidecar.cli.options import Duration, connection_options, selection_options
from sidecar.cli.settings import Settings


@click.command()
@selection_options
@click.option("--interval", type=Duration(least_s=0.2), default="2s", show_default=True, help="Between two looks.")
@click.option("--once", is_flag=True, help="One look, then end.")
@connection_options
def top(settings: Settings, replicas: str, selector: str | None, interval: float, once: bool) -> None:
    """A live screen of the fleet: verdicts, queues, blocks, contiguity, last reset. q quits.

    Without a terminal, or on a dumb one, it prints the table at each interval as plain lines.
    """
    from sidecar.cli.live import live
    from sidecar.cli.operating import exit_with
    from sidecar.cli.reaching import targets_of

    exit_with(live(settings, targets_of(replicas, selector), interval, once=once))
