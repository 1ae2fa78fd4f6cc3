"""kvctl reset."""

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


@click.command(
    epilog="\b\n"
    "kvctl reset --mode keep                       no request is interrupted\n"
    "kvctl reset --mode fail --wait-for-idle       at a moment when nothing runs\n"
    "kvctl reset --mode keep --quarantine --for weight-update --connector\n"
    "kvctl reset --mode keep --rolling --max-unavailable 25% --canary 1"
)
@click.option(
    "--mode",
    type=click.Choice(["fail", "preempt", "keep"]),
    default="fail",
    show_default=True,
    help="Requests that hold blocks: refuse then, preempt them, or keep them undisturbed.",
)
@selection_options
@click.option("--connector", is_flag=True, help="Also clear the KV connector's tier.")
@click.option("--mm", is_flag=True, help="Also clear the multimodal cache.")
@click.option("--encoder", is_flag=True, help="Also clear the encoder cache.")
@click.option("--reorder", is_flag=True, help="Also put the free blocks into block-id order.")
@click.option("--wait-for-idle", is_flag=True, help="Mode fail: fire at the first moment without a held block.")
@click.option("--quarantine", is_flag=True, help="Mode keep: what kept requests still fill never enters the cache.")
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["benchmark", "weight-update"]),
    help="Why: refuses combinations that would be wrong for it.",
)
@rollout_options
@running_options
@output_option(*OPERATION_FORMATS)
@connection_options
def reset(
    settings: Settings,
    mode: str,
    connector: bool,
    mm: bool,
    encoder: bool,
    reorder: bool,
    wait_for_idle: bool,
    quarantine: bool,
    purpose: str | None,
    **options: object,
) -> None:
    """Forget every cached prefix on the chosen replicas."""
    refuse_contradictions(mode, wait_for_idle=wait_for_idle, quarantine=quarantine, purpose=purpose)
    from sidecar.cli.operating import exit_with, operate
    from sidecar.cli.specs import reset_spec

    spec = reset_spec(
        mode,
        connector=connector,
        mm=mm,
        encoder=encoder,
        reorder=reorder,
        wait_for_idle=wait_for_idle,
        quarantine=quarantine,
        purpose=purpose,
    )
    exit_with(operate(settings, spec, options))


def refuse_contradictions(mode: str, *, wait_for_idle: bool, quarantine: bool, purpose: str | None) -> None:
    """UsageError for flags that exclude each other: what every sidecar refuses, in the words of the command line and
    before gRPC is loaded.
    """
    if wait_for_idle and mode != "fail":
        raise click.UsageError(f"--wait-for-idle goes with --mode fail, which it makes succeed; --mode is {mode}")
    if quarantine and mode != "keep":
        raise click.UsageError(f"--quarantine goes with --mode keep, whose kept requests it concerns; --mode is {mode}")
    if purpose == "weight-update" and mode == "keep" and not quarantine:
        raise click.UsageError(
            "--for weight-update with --mode keep needs --quarantine: kept requests would fill the cache "
            "with KV of the old weights"
        )
