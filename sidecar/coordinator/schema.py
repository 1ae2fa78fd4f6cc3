"""The tables of the operation store, their version, and how a row becomes a message and back.

One row an operation and one a target. Requests, results and warnings are stored as the API's own messages: a newer
field survives a coordinator that does not know it, and what is read is what was sent.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.outcomes import count
from sidecar.coordinator.port import Aim, Recorded

APPLICATION_ID: Final = 0x6B76636C
"""SQLite's application_id: "kvcl". Another program's database must not be taken for a store."""

SCHEMA_VERSION: Final = 1
"""SQLite's user_version. Older stores are migrated in `create_tables`; newer ones are refused."""

_TABLES: Final = """
CREATE TABLE operations (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    operation BLOB NOT NULL,         -- FleetOperation without results
    caller TEXT NOT NULL,
    created_at REAL NOT NULL,        -- wall clock, for people and retention
    ended INTEGER NOT NULL DEFAULT 0,
    held INTEGER NOT NULL DEFAULT 0,
    cancelled TEXT NOT NULL DEFAULT ''
);
CREATE INDEX operations_ended ON operations (ended, created_at);
CREATE TABLE targets (
    operation TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE,
    apart INTEGER NOT NULL,          -- 1: shown, never called (not ready, duplicate)
    name TEXT NOT NULL,
    address TEXT NOT NULL,
    position INTEGER NOT NULL,       -- order in which targets are taken
    aim TEXT NOT NULL,               -- JSON: labels, server_name, identity
    request_id TEXT NOT NULL DEFAULT '',  -- not empty: an intent is on record
    wave INTEGER NOT NULL DEFAULT 0,
    result BLOB,                     -- TargetResult once it has ended
    unhealthy TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (operation, apart, name, address)
) WITHOUT ROWID;
"""


class StoreError(Exception):
    """The store cannot do what was asked. One sentence for a person: which file, what was found, what to do."""


@dataclass(slots=True)
class StoredOperation:
    """Everything on record of one operation."""

    operation: fleet_pb2.FleetOperation
    """As last recorded, with a row for every target."""
    aims: list[Aim]
    """Targets to call, in order; targets that were set apart at the start are rows only."""
    recorded: dict[str, Recorded] = field(default_factory=dict)
    """Targets with an intent or a result."""
    ended: bool = False
    held: bool = False
    cancelled: str = ""
    caller: str = ""


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Create the tables in an empty file, accept our own, refuse anything else with StoreError."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not tables and not version:
        connection.executescript(
            f"BEGIN; {_TABLES} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
        return
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program; give the coordinator a file of its own (--store)")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version} and this coordinator reads up to {SCHEMA_VERSION}; "
            "start the newer kvctl that wrote it, or give another file (--store)"
        )


def insert(
    connection: sqlite3.Connection,
    operation: fleet_pb2.FleetOperation,
    aims: Sequence[Aim],
    apart: Sequence[fleet_pb2.TargetResult],
    caller: str,
    created_at: float,
) -> None:
    """Put a new operation on record, with the targets to call and the rows of those that are not called."""
    operation_id = operation.operation_id
    connection.execute(
        "INSERT INTO operations (id, operation, caller, created_at) VALUES (?, ?, ?, ?)",
        (operation_id, _without_rows(operation), caller, created_at),
    )
    rows: list[tuple[str, int, str, str, int, str, bytes | None]] = []
    for position, aim in enumerate(aims):
        rows.append((operation_id, 0, aim.name, aim.address, position, _aim_to_json(aim), None))
    for position, row in enumerate(apart, len(aims)):
        rows.append((operation_id, 1, row.replica, row.address, position, "", row.SerializeToString()))
    connection.executemany(
        "INSERT INTO targets (operation, apart, name, address, position, aim, result) VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def update(connection: sqlite3.Connection, operation: fleet_pb2.FleetOperation, *, ended: bool) -> None:
    """Record the operation's own fields, without its rows."""
    connection.execute(
        "UPDATE operations SET operation = ?, ended = ? WHERE id = ?",
        (_without_rows(operation), ended, operation.operation_id),
    )


def read(connection: sqlite3.Connection, operation_id: str) -> StoredOperation | None:
    """One operation whole, None when it is not on record."""
    found = connection.execute(
        "SELECT operation, ended, held, cancelled, caller FROM operations WHERE id = ?", (operation_id,)
    ).fetchone()
    if found is None:
        return None
    stored = StoredOperation(
        fleet_pb2.FleetOperation.FromString(found[0]),
        [],
        ended=bool(found[1]),
        held=bool(found[2]),
        cancelled=found[3],
        caller=found[4],
    )
    for apart, name, address, aim_text, request_id, wave, result, unhealthy in connection.execute(
        "SELECT apart, name, address, aim, request_id, wave, result, unhealthy FROM targets WHERE operation = ? "
        "ORDER BY position",
        (operation_id,),
    ):
        row = fleet_pb2.TargetResult.FromString(result) if result is not None else None
        if row is not None and unhealthy:
            row.health = unhealthy
        if apart and row is not None:
            stored.operation.results.append(row)
            continue
        aim = _aim_from_json(name, address, aim_text)
        stored.aims.append(aim)
        if request_id or row is not None:
            stored.recorded[name] = Recorded(request_id, wave, row, unhealthy)
        stored.operation.results.append(row or started_row(aim, wave, request_id))
    rows = sorted(stored.operation.results, key=lambda each: (each.replica, each.address))
    copies = [fleet_pb2.TargetResult.FromString(each.SerializeToString()) for each in rows]
    del stored.operation.results[:]
    stored.operation.results.extend(copies)
    stored.operation.counts.CopyFrom(count(stored.operation.results))
    return stored


def started_row(aim: Aim, wave: int, request_id: str) -> fleet_pb2.TargetResult:
    """The row of a target without a result: under way when its intent is on record."""
    outcome = fleet_pb2.TARGET_OUTCOME_RUNNING if request_id else fleet_pb2.TARGET_OUTCOME_UNSPECIFIED
    return fleet_pb2.TargetResult(
        replica=aim.name,
        address=aim.address,
        outcome=outcome,
        wave=wave,
        request_id=request_id,
        labels=dict(aim.labels),
    )


def _without_rows(operation: fleet_pb2.FleetOperation) -> bytes:
    bare = fleet_pb2.FleetOperation()
    bare.CopyFrom(operation)
    del bare.results[:]
    return bare.SerializeToString()


def _aim_to_json(aim: Aim) -> str:
    return json.dumps({"labels": dict(aim.labels), "server_name": aim.server_name, "identity": aim.identity})


def _aim_from_json(name: str, address: str, text: str) -> Aim:
    values = json.loads(text)
    return Aim(name, address, values["labels"], values["server_name"], values["identity"])
