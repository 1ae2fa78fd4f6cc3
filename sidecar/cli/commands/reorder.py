"""kvctl reorder."""

from __future__ import annotations

import click

from sidecar.cli.options import (
    OPERATION_FORMATS,
    connection_options,
    output_option,
    rollout_options,
    running_options,
    selection_options,
)
from sidecar.cli.settings import Settings


@click.command()
@click.option(
    "--scope",
    type=click.Choice(["idle", "uncached", "all-free"]),
    default="idle",
    show_default=True,
    help="idle: all free blocks, while none is held. uncached: while serving, blocks without cached content. "
    "all-free: while serving, all free blocks; gives up the order in which cached ones are evicted.",
)
@selection_options
@rollout_options
@running_options
@output_option(*OPERATION_FORMATS)
@connection_options
def reorder(settings: Settings, scope: str, **options: object) -> None:
    """Put free KV blocks back into block-id order, so that new requests get neighbouring blocks again."""
    from sidecar.cli.operating import exit_with, operate
    from sidecar.cli.specs import reorder_spec

    exit_with(operate(settings, reorder_spec(scope), options))
