"""kvctl admission."""

from __future__ import annotations

import click

from sidecar.cli.options import Duration, connection_options, output_option, selection_options
from sidecar.cli.settings import Settings


@click.command()
@selection_options
@click.option("--watch", "-w", is_flag=True, help="Go on, with a line for each change, until Ctrl-C.")
@click.option("--interval", type=Duration(least_s=0.1), help="With --watch: also a line every so often.")
@click.option("--timeout", type=Duration(least_s=0.05), default="5s", show_default=True, help="For one replica.")
@output_option("table", "wide", "json", "yaml", "name")
@connection_options
def admission(
    settings: Settings,
    replicas: str,
    selector: str | None,
    watch: bool,
    interval: float | None,
    timeout: float,
    output: str,
) -> None:
    """Say for each engine whether requests are admitted, and if not, why.

    Exit code 1 when an engine stalls. With -o json, --watch prints one JSON line a sample.
    """
    if interval is not None and not watch:
        raise click.UsageError("--interval goes with --watch")
    if watch and output in ("yaml", "name"):
        raise click.UsageError(f"--watch prints lines or -o json; -o {output} has no streaming form")
    from sidecar.cli import watching
    from sidecar.cli.operating import exit_with
    from sidecar.cli.reaching import targets_of

    targets = targets_of(replicas, selector)
    if watch:
        exit_with(watching.watch(settings, targets, interval or 0.0, output))
        return
    exit_with(watching.once(settings, targets, timeout, output))
