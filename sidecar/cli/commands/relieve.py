"""kvctl relieve."""

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
@selection_options
@rollout_options
@running_options
@output_option(*OPERATION_FORMATS)
@connection_options
def relieve(settings: Settings, **options: object) -> None:
    """Where waiting requests hold blocks that the head of the queue needs and nothing runs, take the blocks of one
    back; it is computed again. Refused where admissions are not deadlocked.
    """
    from kvctl.v1 import fleet_pb2, replica_pb2

    from sidecar.cli.operating import exit_with, operate

    spec = fleet_pb2.OperationSpec(relieve=replica_pb2.RelieveAdmissionRequest())
    exit_with(operate(settings, spec, options))
