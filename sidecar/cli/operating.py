"""Run one operation for a command: progress, Ctrl-C, the result, the exit code."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import click
from kvctl.v1 import fleet_pb2

from sidecar.cli import exitcodes, output, reaching
from sidecar.cli.exitcodes import Exit
from sidecar.cli.failures import Refusal, Unwritten
from sidecar.cli.printers import encoding
from sidecar.cli.printers.operation import print_table, print_wide
from sidecar.cli.printers.operations import state_name
from sidecar.cli.progress import Progress
from sidecar.cli.settings import Settings
from sidecar.client.reach import Reach, given_id, new_id
from sidecar.client.remote import CoordinatorReach, Detached, NotStarted

INTERRUPTED: Final = 130


Look = Callable[[Reach, fleet_pb2.Targets], Awaitable[None]]


def operate(
    settings: Settings, spec: fleet_pb2.OperationSpec, options: Mapping[str, object], look_first: Look | None = None
) -> int:
    """Run the spec with a command's common options; prints the result and returns the exit code.

    `look_first`: something to read, and perhaps to warn of, before the operation starts.
    """
    replicas, selector = str(options["replicas"]), options.get("selector")
    spec.targets.CopyFrom(reaching.targets_of(replicas, str(selector) if selector else None))
    _fill_rollout(spec, options)
    spec.timeout.FromTimedelta(timedelta(seconds=float(str(options["timeout"]))))
    spec.wait, spec.validate_only = bool(options.get("wait")), bool(options.get("dry_run"))
    given = options.get("request_id")
    with reaching.told_plainly():
        operation_id = new_id() if given is None else given_id(str(given))
    form = str(options["output"])

    async def work(reach: Reach) -> int:
        if look_first is not None:
            await look_first(reach, spec.targets)
        with Progress(sys.stderr) as progress, interruptible(reach, operation_id) as interrupts:
            try:
                operation = await reach.run(spec, operation_id, progress.changed)
            except Detached as left:
                progress.close()
                tell_detached(left.operation_id, settings, started=left.started)
                return INTERRUPTED
            except NotStarted:
                progress.close()
                output.note("interrupted: the coordinator had not answered yet, nothing was started")
                return INTERRUPTED
        if interrupts and operation.state != fleet_pb2.OPERATION_STATE_SUCCEEDED:
            output.note("interrupted: nothing more was started; this is what is known")
        return conclude(operation, form)

    return reaching.run(settings, work)


def conclude(operation: fleet_pb2.FleetOperation, form: str) -> int:
    """Print an operation; its exit code. When it cannot be printed, stderr says that it ran, and 0 becomes 5."""
    code = exitcodes.of_operation(operation)
    try:
        show_operation(operation, form)
    except Unwritten as error:
        counts = operation.counts
        text = (
            f"the operation ended ({state_name(operation.state)}, {counts.succeeded} of {counts.total} succeeded, "
            f"operation {operation.operation_id}) but its result could not be written: {error.why}"
        )
        raise Refusal(text, code or error.code) from error
    return code


def show_operation(operation: fleet_pb2.FleetOperation, form: str) -> None:
    """Print an operation in the form asked for; warnings go to stderr."""
    output.warn(operation.warnings)
    if form == "table":
        output.show(lambda console: print_table(console, operation))
    elif form == "wide":
        output.show(lambda console: print_wide(console, operation), wide=True)
    elif form == "name":
        done = [row for row in operation.results if row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED]
        output.write(encoding.names([row.replica for row in done]))
        for row in operation.results:
            if row.outcome != fleet_pb2.TARGET_OUTCOME_SUCCEEDED:
                output.note(f"{row.replica}: {row.code} {row.reason}: {row.message}")
    else:
        output.encoded(operation, form)


@contextmanager
def interruptible(reach: Reach, operation_id: str) -> Iterator[list[int]]:
    """Ctrl-C or SIGTERM stops the run in an orderly way; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []
    stopping: set[asyncio.Task[None]] = set()

    def stop(number: int) -> None:
        seen.append(number)
        loop.remove_signal_handler(number)
        if not isinstance(reach, CoordinatorReach):
            output.note(f"stopping {operation_id}: what has had no effect yet is taken back (again: leave at once)")
        task = asyncio.ensure_future(reach.stop())
        stopping.add(task)
        task.add_done_callback(stopping.discard)

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop, number)
    try:
        yield seen
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def tell_detached(operation_id: str, settings: Settings, *, started: bool = True) -> None:
    """How to get back to an operation that goes on without us."""
    output.note(f"operation {operation_id} {'goes on' if started else 'may have been started'} at the coordinator")
    there = shlex.join(settings.coordinator_flags)
    output.note(f"  watch it:  kvctl ops watch {operation_id} {there}")
    output.note(f"  stop it:   kvctl ops cancel {operation_id} {there}")


def _fill_rollout(spec: fleet_pb2.OperationSpec, options: Mapping[str, object]) -> None:
    rolling_only = ("max_unavailable", "canary", "min_healthy_time")
    strategy = options.get("strategy")
    if options.get("rolling") and strategy == "all-at-once":
        raise click.UsageError("--rolling and --strategy all-at-once exclude each other")
    rolling = bool(options.get("rolling")) or strategy == "rolling"
    given = [name for name in rolling_only if options.get(name) is not None]
    if given and not rolling:
        raise click.UsageError(f"--{given[0].replace('_', '-')} needs --rolling")
    if rolling:
        spec.rollout.strategy = fleet_pb2.ROLLOUT_STRATEGY_ROLLING
    if value := options.get("max_unavailable"):
        spec.rollout.max_unavailable = str(value)
    for name in ("canary", "max_failures", "concurrency"):
        if value := options.get(name):
            setattr(spec.rollout, name, value)
    if value := options.get("min_healthy_time"):
        spec.rollout.min_healthy_time.FromTimedelta(timedelta(seconds=float(str(value))))


def exit_with(code: int | Exit) -> None:
    """Leave the command with a code."""
    if code:
        raise click.exceptions.Exit(int(code))
