"""What a coordinator's probes are told about its store."""

from __future__ import annotations

from pathlib import Path

from sidecar.coordinator.app import Application
from sidecar.coordinator.config import load
from sidecar.coordinator.store import Store
from sidecar.rpc.health import Health


async def test_a_store_damaged_while_running_is_noted_beside_ready(tmp_path: Path) -> None:
    path = tmp_path / "ops.db"
    application = Application(load(["--targets", "127.0.0.1:1", "--store", str(path)], {}))
    application._health = Health("kvctl.v1.FleetAdmin")
    application._health.set_serving(True)
    application._store = Store(path)
    assert application._readyz().body == b"ready\n"
    path.write_bytes(b"\xa5" * 8192)
    path.with_name("ops.db-wal").write_bytes(b"\xa5" * 8192)
    await application._store.verify()
    told = application._readyz().body.decode()
    await application._store.close()
    assert told.startswith("ready\nnote: the store is corrupt")
    assert str(path) in told
