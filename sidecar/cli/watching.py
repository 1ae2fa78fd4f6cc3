"""Admission for a command: once, or as it changes."""

from __future__ import annotations

import asyncio
import signal
from datetime import datetime

from kvctl.v1 import fleet_pb2

from sidecar.cli import exitcodes, output, reaching
from sidecar.cli.printers import admission, encoding
from sidecar.cli.settings import Settings
from sidecar.client.reach import Reach


def once(settings: Settings, targets: fleet_pb2.Targets, timeout_s: float, form: str) -> int:
    """Print admission as it is now; 1 when an engine stalls."""

    async def work(reach: Reach) -> fleet_pb2.FleetAdmissionResponse:
        return await reach.admission(targets, timeout_s)

    fleet = reaching.run(settings, work)
    output.warn(fleet.warnings)
    output.tell_of_nobody(fleet.replicas)
    if form == "table":
        output.show(lambda console: admission.print_table(console, fleet))
    elif form == "wide":
        output.show(lambda console: admission.print_wide(console, fleet), wide=True)
    elif form == "name":
        output.write(encoding.names([row.replica for row in fleet.replicas if row.code == "OK"]))
    else:
        output.encoded(fleet, form)
    return exitcodes.of_admission(fleet)


def watch(settings: Settings, targets: fleet_pb2.Targets, interval_s: float, form: str) -> int:
    """Print samples until Ctrl-C, which is the way to end it and therefore success."""

    async def work(reach: Reach) -> int:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            if task is not None:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            async for sample in reach.watch(targets, interval_s):
                _print(sample, form)
                if output.reader_left():
                    break
        except asyncio.CancelledError:
            if not stopped or task is None:
                raise
            task.uncancel()
        return 0

    return reaching.run(settings, work)


def _print(sample: fleet_pb2.WatchFleetAdmissionResponse, form: str) -> None:
    if form == "json":
        output.write(encoding.encode_line(sample))
        return
    when = datetime.now().astimezone().strftime("%H:%M:%S")
    output.write("".join(f"{line}\n" for line in admission.change_line(when, sample)))
