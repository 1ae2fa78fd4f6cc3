"""kvctl ops: operations on record at a coordinator."""

from __future__ import annotations

import click

from sidecar.cli.options import OPERATION_FORMATS, connection_options, output_option
from sidecar.cli.settings import Settings


@click.group()
def ops() -> None:
    """Operations that a coordinator keeps on record."""


@ops.command("list")
@click.option("--limit", type=click.IntRange(1, 10000), default=20, show_default=True, help="At most this many.")
@output_option("table", "json", "yaml", "name")
@connection_options
def list_operations(settings: Settings, limit: int, output: str) -> None:
    """Operations, newest first."""
    from kvctl.v1 import fleet_pb2

    from sidecar.cli import output as out
    from sidecar.cli import reaching
    from sidecar.cli.printers import encoding, operations
    from sidecar.client.reach import Reach

    async def work(reach: Reach) -> list[fleet_pb2.FleetOperation]:
        return await reaching.coordinator_only(reach, "ops list").operations(limit)

    found = reaching.run(settings, work)
    if output == "table":
        out.show(lambda console: operations.print_table(console, found))
    elif output == "name":
        out.write(encoding.names([operation.operation_id for operation in found]))
    else:
        out.encoded(fleet_pb2.ListOperationsResponse(operations=found), output)


@ops.command()
@click.argument("operation_id")
@output_option(*OPERATION_FORMATS)
@connection_options
def get(settings: Settings, operation_id: str, output: str) -> None:
    """One operation with every target. Exit code as of the operation; 5 while it runs."""
    _change(settings, operation_id, output, "get")


@ops.command()
@click.argument("operation_id")
@output_option(*OPERATION_FORMATS)
@connection_options
def watch(settings: Settings, operation_id: str, output: str) -> None:
    """Follow an operation to its end. Ctrl-C leaves it running."""
    import sys

    from kvctl.v1 import fleet_pb2

    from sidecar.cli import reaching
    from sidecar.cli.operating import INTERRUPTED, conclude, exit_with, interruptible, tell_detached
    from sidecar.cli.progress import Progress
    from sidecar.client.reach import Reach
    from sidecar.client.remote import Detached

    async def work(reach: Reach) -> fleet_pb2.FleetOperation | None:
        coordinator = reaching.coordinator_only(reach, "ops watch")
        with Progress(sys.stderr) as progress, interruptible(reach, operation_id):
            try:
                return await coordinator.follow(operation_id, progress.changed)
            except Detached:
                return None

    operation = reaching.run(settings, work)
    if operation is None:
        tell_detached(operation_id, settings)
        exit_with(INTERRUPTED)
        return
    exit_with(conclude(operation, output))


@ops.command()
@click.argument("operation_id")
@output_option(*OPERATION_FORMATS)
@connection_options
def pause(settings: Settings, operation_id: str, output: str) -> None:
    """Hold a rollout before its next wave. To stop engines instead, use `kvctl scheduling pause`."""
    _change(settings, operation_id, output, "pause")


@ops.command()
@click.argument("operation_id")
@output_option(*OPERATION_FORMATS)
@connection_options
def resume(settings: Settings, operation_id: str, output: str) -> None:
    """Let a held rollout go on."""
    _change(settings, operation_id, output, "resume")


@ops.command()
@click.argument("operation_id")
@output_option(*OPERATION_FORMATS)
@connection_options
def cancel(settings: Settings, operation_id: str, output: str) -> None:
    """Start no further target; those under way finish."""
    _change(settings, operation_id, output, "cancel")


def _change(settings: Settings, operation_id: str, form: str, what: str) -> None:
    from kvctl.v1 import fleet_pb2

    from sidecar.cli import output, reaching
    from sidecar.cli.operating import conclude, exit_with
    from sidecar.client.reach import Reach
    from sidecar.client.remote import ENDED

    async def work(reach: Reach) -> fleet_pb2.FleetOperation:
        coordinator = reaching.coordinator_only(reach, f"ops {what}")
        calls = {
            "get": coordinator.get,
            "pause": coordinator.pause,
            "resume": coordinator.resume,
            "cancel": coordinator.cancel,
        }
        return await calls[what](operation_id)

    operation = reaching.run(settings, work)
    code = conclude(operation, form)
    if what == "cancel" and operation.state not in ENDED:
        output.note("cancelled: no further target is started; `kvctl ops watch` with this id waits for those under way")
    if what == "get":
        exit_with(code)
