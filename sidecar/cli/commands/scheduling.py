"""kvctl scheduling: pause and resume engines.

Apart from `ops pause`, which holds a rollout: this stops engines from running requests, under a lease.
"""

from __future__ import annotations

import click

from sidecar.cli.options import (
    OPERATION_FORMATS,
    Duration,
    connection_options,
    output_option,
    running_options,
    selection_options,
)
from sidecar.cli.settings import Settings


@click.group()
def scheduling() -> None:
    """Pause and resume the schedulers of engines. To hold a rollout instead, use `kvctl ops pause`."""


@scheduling.command()
@selection_options
@click.option(
    "--lease",
    type=Duration(least_s=1.0, most_s=600.0),
    required=True,
    help="How long: the engine acts by itself then, so that nobody strands a fleet.",
)
@click.option("--then-resume", is_flag=True, help="When the lease ends: reset and resume. Default: reset, stay paused.")
@running_options
@output_option(*OPERATION_FORMATS)
@connection_options
def pause(settings: Settings, lease: float, then_resume: bool, **options: object) -> None:
    """Stop scheduling; running requests stay where they are. Note the operation id: `resume --pause ID` ends it."""
    from datetime import timedelta

    from kvctl.v1 import fleet_pb2, replica_pb2

    from sidecar.cli.operating import exit_with, operate

    policy = replica_pb2.ABANDON_POLICY_RESUME if then_resume else replica_pb2.ABANDON_POLICY_STAY_PAUSED
    request = replica_pb2.PauseSchedulingRequest(on_abandon=policy)
    request.lease.FromTimedelta(timedelta(seconds=lease))
    exit_with(operate(settings, fleet_pb2.OperationSpec(pause=request), options))


@scheduling.command()
@selection_options
@click.option("--pause", "pause_id", metavar="UUID", help="The pause to end: its operation, or the id a refusal shows.")
@click.option("--force", is_flag=True, help="End also a live lease that somebody else holds.")
@click.option("--weight-version", metavar="TEXT", help="Recorded at the engine as the version of its weights.")
@running_options
@output_option(*OPERATION_FORMATS)
@connection_options
def resume(
    settings: Settings, pause_id: str | None, force: bool, weight_version: str | None, **options: object
) -> None:
    """Schedule again: what vLLM's own pause or an abandoned weight update left behind. A pause whose lease is alive
    has an owner, perhaps a trainer in the middle of writing weights: end it by its id with --pause, or with --force.
    """
    if force and pause_id is not None:
        raise click.UsageError("--force ends whatever pause there is, --pause the one it names; give one of them")
    from functools import partial

    from kvctl.v1 import fleet_pb2, replica_pb2

    from sidecar.cli import abandoned
    from sidecar.cli.operating import exit_with, operate
    from sidecar.cli.reaching import told_plainly
    from sidecar.client.reach import given_id

    with told_plainly():
        request = replica_pb2.ResumeSchedulingRequest(
            pause_request_id=given_id(pause_id) if pause_id is not None else "",
            weight_version=weight_version or "",
            force=force,
        )
    look_first = partial(abandoned.warn, dry_run=bool(options["dry_run"]))
    exit_with(operate(settings, fleet_pb2.OperationSpec(resume=request), options, look_first))
