"""The replicas of a fleet: a row a replica, and wide a row an engine with what it can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from sidecar.cli.printers.style import clean, named, table, words
from sidecar.coordinator.outcomes import TARGET_NOT_READY

_BACKENDS = {
    types_pb2.BACKEND_KIND_UNSPECIFIED: "-",
    types_pb2.BACKEND_KIND_BRIDGE: "bridge",
    types_pb2.BACKEND_KIND_HTTP: "http",
}


def print_table(console: Console, fleet: fleet_pb2.ListReplicasResponse) -> None:
    """A row a replica, readable at 80 columns: names and addresses keep their room, the model gives way first. Why a
    replica is not well stands under the table.
    """
    rows = [_cells(replica) for replica in _in_order(fleet)]
    columns = ["REPLICA", "ADDRESS", "ENGINES", "VLLM", "MODEL", "STATE"]
    widths = _widths(console.width, [columns, *([cell.plain for cell in row] for row in rows)])
    shown = [index for index, width in enumerate(widths) if width]
    made = table(*(columns[index] for index in shown))
    for column, index in zip(made.columns, shown, strict=True):
        column.width = widths[index]
    for row in rows:
        made.add_row(*(row[index] for index in shown))
    if rows:
        console.print(made)
    for text, names in _reasons(fleet):
        console.print(clean(f"{named(names)}: {text}"))
    _remarks(console, fleet)


def _cells(replica: fleet_pb2.FleetReplica) -> list[Text]:
    engines = replica.info.engines
    model = _each(engine.model.rstrip("/").rpartition("/")[2] for engine in engines)
    return [
        words(replica.name),
        words(replica.address),
        words(f"{sum(e.connected for e in engines)}/{len(engines)}" if replica.reachable else "-"),
        words(_each(engine.vllm_version for engine in engines)),
        words(model if len(model) <= _LONGEST_MODEL else f"{model[: _LONGEST_MODEL - 2]}.."),
        _state(replica),
    ]


_LONGEST_MODEL: Final = 24
_NAME, _ADDRESS, _MODEL = 0, 1, 4
_LEAST: Final = 24
"""Characters in a line that a folded name or address keeps."""


def _widths(room: int, rows: Sequence[Sequence[str]]) -> list[int]:
    """Widths of the columns; 0 leaves one out. What does not fit is taken from the model, then from the address and
    the name.
    """
    widths = [max(cell_len(row[index]) for row in rows) for index in range(len(rows[0]))]

    def excess() -> int:
        return sum(width + 2 for width in widths if width) - 2 - room

    if excess() > 0:
        widths[_MODEL] = 0
    for index in (_ADDRESS, _NAME):
        widths[index] = max(widths[index] - max(excess(), 0), min(widths[index], _LEAST))
    return widths


def _reasons(fleet: fleet_pb2.ListReplicasResponse) -> list[tuple[str, list[str]]]:
    """Why replicas or engines are not there, each reason once with the names; the rarest last."""
    found: dict[str, list[str]] = {}
    for replica in _in_order(fleet):
        lost = [engine.unavailable_reason for engine in replica.info.engines if not engine.connected]
        if not replica.reachable:
            text = replica.message.removeprefix(f"{replica.address}: ").replace(f" from {replica.address}", "")
        else:
            text = lost[0] if lost else ""
        if text:
            found.setdefault(text, []).append(replica.name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def print_wide(console: Console, fleet: fleet_pb2.ListReplicasResponse) -> None:
    """A row an engine."""
    made = table(
        "REPLICA", "ADDRESS", "LABELS", "SIDECAR", "ENGINE", "BACKEND", "PID", "VLLM", "BRIDGE", "MODEL", "BLOCKS",
        "BLOCK SIZE", "PREFIX CACHE", "STATE", "CANNOT",
    )  # fmt: skip
    for replica in _in_order(fleet):
        info = replica.info
        labels = ",".join(f"{key}={info.labels[key]}" for key in sorted(info.labels)) or "-"
        head = [replica.name, replica.address, labels, info.version or "-"]
        for engine in info.engines:
            cannot = [each.name for each in engine.capabilities if not each.available]
            figures = [
                str(engine.engine.data_parallel_rank),
                _BACKENDS.get(engine.backend, "-"),
                str(engine.pid or "-"),
                engine.vllm_version or "-",
                engine.bridge_version or "-",
                engine.model or "-",
                str(engine.blocks or "-"),
                str(engine.block_size or "-"),
                "on" if engine.prefix_caching_enabled else "off" if engine.connected else "-",
                "connected" if engine.connected else engine.unavailable_reason or "not connected",
                ", ".join(cannot) or "-",
            ]
            made.add_row(*[words(text) for text in [*head, *figures]])
        if not info.engines:
            state = _state(replica)
            if not replica.reachable:
                state = Text(clean(replica.message or replica.code), style=state.style)
            made.add_row(*[words(text) for text in [*head, *["-"] * 9]], state, words("-"))
    if fleet.replicas:
        console.print(made)
    _remarks(console, fleet)


def _in_order(fleet: fleet_pb2.ListReplicasResponse) -> list[fleet_pb2.FleetReplica]:
    """Those that are well first: what needs a look stays on the screen after many rows."""
    return sorted(fleet.replicas, key=lambda replica: (_place(replica), replica.name, replica.address))


def _place(replica: fleet_pb2.FleetReplica) -> int:
    engines = replica.info.engines
    if not replica.reachable:
        return 1 if replica.reason == TARGET_NOT_READY else 2
    return 0 if engines and all(engine.connected for engine in engines) else 1


def _state(replica: fleet_pb2.FleetReplica) -> Text:
    if replica.reason == TARGET_NOT_READY:
        return words("skipped", "doubtful")
    if not replica.reachable:
        return words(_NOT_REACHED.get(replica.code, "unreachable"), "bad")
    if not replica.info.engines:
        return words("no engine yet", "doubtful")
    if not all(engine.connected for engine in replica.info.engines):
        return words("engine lost", "doubtful")
    return words("ready", "good")


_NOT_REACHED: Final = {"UNAUTHENTICATED": "denied", "PERMISSION_DENIED": "denied"}


def _each(values: Iterable[str]) -> str:
    found = sorted({value for value in values if value})
    return ", ".join(found) or "-"


def _remarks(console: Console, fleet: fleet_pb2.ListReplicasResponse) -> None:
    if fleet.incomplete:
        console.print(clean("the list of replicas may be incomplete"))
