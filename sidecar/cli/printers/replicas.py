"""The replicas of a fleet: a row a replica, and wide a row an engine with what it can do."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Console
from rich.text import Text

from sidecar.cli.printers.style import clean, table, words

_BACKENDS = {
    types_pb2.BACKEND_KIND_UNSPECIFIED: "-",
    types_pb2.BACKEND_KIND_BRIDGE: "bridge",
    types_pb2.BACKEND_KIND_HTTP: "http",
}


def print_table(console: Console, fleet: fleet_pb2.ListReplicasResponse) -> None:
    """A row a replica, readable at 80 columns."""
    made = table("REPLICA", "ADDRESS", "ENGINES", "VLLM", "MODEL", "STATE")
    for replica in _in_order(fleet):
        engines = replica.info.engines
        made.add_row(
            words(replica.name),
            words(replica.address),
            words(f"{sum(e.connected for e in engines)}/{len(engines)}" if replica.reachable else "-"),
            words(_each(engine.vllm_version for engine in engines)),
            words(_each(engine.model for engine in engines)),
            _state(replica),
        )
    if fleet.replicas:
        console.print(made)
    _remarks(console, fleet)


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
            made.add_row(*[words(text) for text in [*head, *["-"] * 9]], _state(replica), words("-"))
    if fleet.replicas:
        console.print(made)
    _remarks(console, fleet)


def _in_order(fleet: fleet_pb2.ListReplicasResponse) -> list[fleet_pb2.FleetReplica]:
    """Those that are well first: what needs a look stays on the screen after many rows."""
    return sorted(fleet.replicas, key=lambda replica: (_place(replica), replica.name, replica.address))


def _place(replica: fleet_pb2.FleetReplica) -> int:
    engines = replica.info.engines
    if not replica.reachable:
        return 2
    return 0 if engines and all(engine.connected for engine in engines) else 1


def _state(replica: fleet_pb2.FleetReplica) -> Text:
    if not replica.reachable:
        return words(replica.message or replica.code, "bad")
    lost = [engine for engine in replica.info.engines if not engine.connected]
    if not replica.info.engines:
        return words("no engine yet", "doubtful")
    if lost:
        return words(lost[0].unavailable_reason or "engine not connected", "doubtful")
    return words("ready", "good")


def _each(values: Iterable[str]) -> str:
    found = sorted({value for value in values if value})
    return ", ".join(found) or "-"


def _remarks(console: Console, fleet: fleet_pb2.ListReplicasResponse) -> None:
    if fleet.incomplete:
        console.print(clean("the list of replicas may be incomplete"))
