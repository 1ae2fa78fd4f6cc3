"""The live screen of `kvctl top`: a row an engine, what stalls first, q quits.

The screen shows the time of its last look, because a screen that stands still and one that is well look the same.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from sidecar.cli import exitcodes, output, reaching
from sidecar.cli.printers import admission, style
from sidecar.cli.printers.admission import known, length, tone, verdict_name
from sidecar.cli.settings import Settings
from sidecar.client.reach import Reach
from sidecar.client.remote import CoordinatorError

READ_TIMEOUT_S: Final = 5.0
REMARKS: Final = 3
_KEYS_S: Final = 0.1


def live(settings: Settings, targets: fleet_pb2.Targets, interval_s: float, *, once: bool) -> int:
    """Show the fleet until q or Ctrl-C. Plain lines when stdin or stdout is no terminal."""
    interactive = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM") != "dumb" and not once

    async def work(reach: Reach) -> int:
        if interactive:
            return await _screen(reach, targets, interval_s, settings.source)
        return await _lines(reach, targets, interval_s, once=once)

    try:
        return reaching.run(settings, work)
    except KeyboardInterrupt:
        if once:
            raise
        return 0


async def _lines(reach: Reach, targets: fleet_pb2.Targets, interval_s: float, *, once: bool) -> int:
    while True:
        fleet = await reach.admission(targets, READ_TIMEOUT_S)
        shown = screen(fleet, _clock(), "", worst_last=True)
        output.show(lambda console, shown=shown: console.print(shown))  # type: ignore[misc]
        if once:
            return exitcodes.of_admission(fleet)
        if output.reader_left():
            return 0
        await asyncio.sleep(interval_s)


async def _screen(reach: Reach, targets: fleet_pb2.Targets, interval_s: float, source: str) -> int:
    console = style.console(sys.stdout)
    last: fleet_pb2.FleetAdmissionResponse | None = None
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as shown:
        while True:
            reading = asyncio.ensure_future(reach.admission(targets, READ_TIMEOUT_S))
            try:
                if await _quits(pressed, reading.done, READ_TIMEOUT_S * 4):
                    return 0
                last, foot = await reading, f"{source}   q quits"
            except CoordinatorError as error:
                if last is None:
                    raise
                foot = f"{error}; trying again   q quits"
            finally:
                reading.cancel()
            frame = screen(last, _clock(), foot, rows=_room(console.height, last))
            shown.update(frame, refresh=True)
            if await _quits(pressed, lambda: False, interval_s):
                return 0


async def _quits(pressed: Callable[[], str], done: Callable[[], bool], within_s: float) -> bool:
    """Whether somebody wants to leave, before `done` or the end of the time: keys count also while a replica hangs."""
    until = asyncio.get_running_loop().time() + within_s
    while not done() and asyncio.get_running_loop().time() < until:
        if pressed() in ("q", "Q", "\x03", "\x1b"):
            return True
        await asyncio.sleep(_KEYS_S)
    return False


def _room(height: int, fleet: fleet_pb2.FleetAdmissionResponse) -> int:
    """Rows of engines that leave room for the head, the remarks (two lines each at most) and the foot."""
    return max(height - 4 - 2 * len(admission.remarks(fleet)[:REMARKS]), 5)


def screen(
    fleet: fleet_pb2.FleetAdmissionResponse, when: str, foot: str, rows: int = 10_000, *, worst_last: bool = False
) -> RenderableType:
    """What is shown, at most 80 columns wide: a head line, a row an engine, and why the first ones stall.

    What stalls and who is not reached comes first, because a screen is cut at its end; with `worst_last`, for lines
    that scroll, it comes last.
    """
    entries = [(replica, engine) for replica in fleet.replicas for engine in replica.admission.engines]
    entries.sort(key=lambda entry: (not entry[1].stalled, entry[0].replica, entry[1].engine.data_parallel_rank))
    lost = [replica for replica in fleet.replicas if replica.code != "OK"]
    stalled = sum(engine.stalled for _, engine in entries)
    head = f"{when}  {style.count(len(fleet.replicas), 'replica')}, {style.count(len(entries), 'engine')}, "
    head += f"{stalled} stalled, {len(lost)} not reached"
    made = style.table("ENGINE", "VERDICT", "RUN", "WAIT", "FREE", "CACHED", "TOK/S", "CONTIG", "LAST RESET")
    stuck = [_cells(replica, engine) for replica, engine in entries[:stalled]]
    gone = [
        [style.words(_short(replica.replica, 14)), style.words(replica.code, "bad"), *[style.words("-")] * 7]
        for replica in lost
    ]
    well = [_cells(replica, engine) for replica, engine in entries[stalled:]]
    cells = [*well, *gone, *stuck] if worst_last else [*stuck, *gone, *well]
    for row in cells[:rows]:
        made.add_row(*row)
    lines: list[RenderableType] = [style.words(head, "bad" if stalled or lost else ""), made]
    hidden = len(cells) - rows
    if hidden > 0:
        lines.append(style.words(f"{style.count(hidden, 'more row')}; --replicas shows a part", "quiet"))
    lines += [style.words(text) for text in admission.remarks(fleet)[:REMARKS]]
    if foot:
        lines.append(style.words(foot, "quiet"))
    return Group(*lines)


def _cells(replica: fleet_pb2.ReplicaAdmission, engine: types_pb2.EngineAdmission) -> list[Text]:
    rate = engine.tokens_per_second
    return [
        style.words(_short(f"{replica.replica}/{engine.engine.data_parallel_rank}", 14)),
        style.words(_short(verdict_name(engine.verdict), 20), tone(engine)),
        style.words(known(engine.requests.running)),
        style.words(known(engine.requests.waiting)),
        style.words(_share(engine.blocks.free, engine.blocks.total)),
        style.words(_share(engine.blocks.cached, engine.blocks.total)),
        style.words("-" if rate < 0 else f"{rate:.0f}"),
        style.words(f"{engine.contiguity.ratio:.2f}" if engine.HasField("contiguity") else "-"),
        style.words(_reset(engine)),
    ]


def _share(part: int, whole: int) -> str:
    if part < 0 or whole <= 0:
        return "-"
    return f"{100 * part / whole:.0f}%"


def _reset(engine: types_pb2.EngineAdmission) -> str:
    return style.seconds(length(engine.since_last_reset)) + " ago" if engine.HasField("since_last_reset") else "-"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 2]}.."


def _clock() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """A function that returns the key pressed, or nothing; the terminal is put back whatever happens.

    SIGTERM counts as q, because the screen is put back only by leaving it.
    """
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    loop = asyncio.get_running_loop()
    ending: list[str] = []

    def pressed() -> str:
        if ending:
            return ending[0]
        ready, _, _ = select.select([number], [], [], 0)
        return os.read(number, 1).decode("ascii", "replace") if ready else ""

    loop.add_signal_handler(signal.SIGTERM, ending.append, "q")
    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
