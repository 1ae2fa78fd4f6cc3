"""The live screen of `kvctl top`: a row an engine, what stalls first, q quits.

The screen shows the time of its last look, because a screen that stands still and one that is well look the same.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from sidecar.cli import exitcodes, output, reaching
from sidecar.cli.printers import admission, style
from sidecar.cli.printers.admission import known, length, tone, verdict_name
from sidecar.cli.settings import Settings
from sidecar.cli.terminal import Attended, attended
from sidecar.client.reach import Reach
from sidecar.client.remote import CoordinatorError
from sidecar.coordinator.outcomes import TARGET_NOT_READY

READ_TIMEOUT_S: Final = 5.0
REMARKS: Final = 3
COLUMNS: Final = ("ENGINE", "VERDICT", "RUN", "WAIT", "FREE", "CACHED", "TOK/S", "CONTIG", "LAST RESET")
LEAST_COLUMNS: Final = 4
NAME_COLUMNS: Final = 14
FLEET_COLUMNS: Final = 60


def live(settings: Settings, targets: fleet_pb2.Targets, interval_s: float, *, once: bool) -> int:
    """Show the fleet until q or Ctrl-C. Plain lines where there is no terminal, or one that cannot be drawn on."""
    somebody = sys.stdout.isatty() and sys.stdin.isatty() and not once

    async def work(reach: Reach) -> int:
        if once:
            return exitcodes.of_admission(await _print_once(reach, targets))
        seat: AbstractContextManager[Attended | None] = attended() if somebody else nullcontext()
        with seat as terminal:
            if terminal is None or style.dumb():
                return await _lines(terminal, reach, targets, interval_s)
            return await _screen(terminal, reach, targets, interval_s, _short(settings.fleet, FLEET_COLUMNS))

    try:
        return reaching.run(settings, work)
    except KeyboardInterrupt:
        if once:
            raise
        return 0


async def _print_once(reach: Reach, targets: fleet_pb2.Targets) -> fleet_pb2.FleetAdmissionResponse:
    fleet = await reach.admission(targets, READ_TIMEOUT_S)

    def show(console: Console) -> None:
        console.print(screen(fleet, _clock(), "", worst_last=True, width=console.width))

    output.show(show)
    return fleet


async def _lines(terminal: Attended | None, reach: Reach, targets: fleet_pb2.Targets, interval_s: float) -> int:
    answered = lost = False
    while True:
        looking = asyncio.ensure_future(_print_once(reach, targets))
        try:
            if terminal is not None and await terminal.quits(looking.done, READ_TIMEOUT_S * 4):
                return 0
            await looking
            if lost:
                output.note("the coordinator answers again")
            answered, lost = True, False
        except CoordinatorError as error:
            if not answered:
                raise
            if not lost:
                output.note(f"{error}; trying again")
            lost = True
        finally:
            looking.cancel()
        if output.reader_left():
            return 0
        if terminal is None:
            await asyncio.sleep(interval_s)
        elif await terminal.quits(lambda: False, interval_s):
            return 0


async def _screen(terminal: Attended, reach: Reach, targets: fleet_pb2.Targets, interval_s: float, fleet: str) -> int:
    console = style.console(sys.stdout)
    last: fleet_pb2.FleetAdmissionResponse | None = None
    when = foot = ""
    first = style.words("asking who is there   q quits", "quiet")
    with Live(first, console=console, screen=True, auto_refresh=False) as shown:

        def draw() -> None:
            size = console.size
            seen = first if last is None else screen(last, when, foot, _room(size.height, last), width=size.width)
            shown.update(seen, refresh=True)

        terminal.give_back, terminal.take_again = shown.stop, shown.start
        while True:
            reading = asyncio.ensure_future(reach.admission(targets, READ_TIMEOUT_S))
            try:
                if await terminal.quits(reading.done, READ_TIMEOUT_S * 4, draw):
                    return 0
                last, foot = await reading, f"{fleet}   q quits"
            except CoordinatorError as error:
                if last is None:
                    raise
                foot = f"{error}; trying again   q quits"
            finally:
                reading.cancel()
            when = _clock()
            draw()
            if await terminal.quits(lambda: False, interval_s, draw):
                return 0


def _room(height: int, fleet: fleet_pb2.FleetAdmissionResponse) -> int:
    """Rows of engines that leave room for the head, the remarks (two lines each at most) and the foot."""
    return max(height - 4 - 2 * len(admission.remarks(fleet)[:REMARKS]), 5)


def screen(
    fleet: fleet_pb2.FleetAdmissionResponse,
    when: str,
    foot: str,
    rows: int = 10_000,
    *,
    worst_last: bool = False,
    width: int = style.FULL_WIDTH,
) -> RenderableType:
    """What is shown, at most 80 columns wide: a head line, a row an engine, and why the first ones stall.

    What stalls and who is not reached comes first, because a screen is cut at its end; with `worst_last`, for lines
    that scroll, it comes last.
    """
    entries = [(replica, engine) for replica in fleet.replicas for engine in replica.admission.engines]
    entries.sort(key=lambda entry: (not entry[1].stalled, entry[0].replica, entry[1].engine.data_parallel_rank))
    lost = [replica for replica in fleet.replicas if replica.code != "OK"]
    skipped = sum(replica.reason == TARGET_NOT_READY for replica in lost)
    stalled = sum(engine.stalled for _, engine in entries)
    head = f"{when}  {style.count(len(fleet.replicas), 'replica')}, {style.count(len(entries), 'engine')}, "
    head += f"{stalled} stalled, {len(lost) - skipped} not reached"
    head += f", {skipped} skipped" if skipped else ""
    stuck = [_cells(replica, engine) for replica, engine in entries[:stalled]]
    gone = [
        [style.words(_ends(replica.replica)), admission.instead(replica), *[style.words("-")] * 7] for replica in lost
    ]
    well = [_cells(replica, engine) for replica, engine in entries[stalled:]]
    cells = [*well, *gone, *stuck] if worst_last else [*stuck, *gone, *well]
    shown = style.fitting(COLUMNS, cells[:rows], width, LEAST_COLUMNS)
    made = style.table(*COLUMNS[:shown])
    for row in cells[:rows]:
        made.add_row(*row[:shown])
    lines: list[RenderableType] = [style.words(head, "bad" if stalled or len(lost) > skipped else ""), made]
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
        style.words(_ends(f"{replica.replica}/{engine.engine.data_parallel_rank}")),
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


def _ends(text: str) -> str:
    """A name that fits its column. Names of pods begin alike, and ranks are at the end, so the middle is left out."""
    return text if len(text) <= NAME_COLUMNS else f"{text[: NAME_COLUMNS - 10]}..{text[-8:]}"


def _clock() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
