"""Where a local fleet keeps its things, and what stops it before anything is started."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from sidecar.coordinator.inventory import load_inventory
from sidecar.local import programs
from sidecar.local.layout import (
    Fleet,
    LocalError,
    Replica,
    make_run_directory,
    prepare_state,
    read_record,
    remove_record,
    state_directory,
    take_lock,
    write_inventory,
    write_record,
)
from sidecar.local.processes import ProcessRef
from sidecar.local.programs import Settings

REPLICA = Replica("r0", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "/logs/e", "/logs/s", ProcessRef(5, 6))


def test_the_state_directory_follows_xdg_and_ignores_a_relative_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory() == tmp_path / "kvctl" / "local"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert state_directory() == Path("/home/someone/.local/state/kvctl/local")


def test_only_one_can_hold_the_lock_and_the_kernel_gives_it_back(tmp_path):
    held = take_lock(tmp_path)
    assert held is not None
    assert take_lock(tmp_path) is None
    os.close(held)
    again = take_lock(tmp_path)
    assert again is not None
    os.close(again)


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    fleet = Fleet(ProcessRef(1, 2), "/run/x", [REPLICA], booted=True)
    assert read_record(tmp_path) is None
    write_record(tmp_path, fleet)
    assert read_record(tmp_path) == fleet
    assert fleet.leaders() == [ProcessRef(5, 6)]
    remove_record(tmp_path)
    assert read_record(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "fleet.json").write_text('{"keeper": 3')
    with pytest.raises(LocalError, match=r"fleet\.json is not a fleet record"):
        read_record(tmp_path)


def test_the_inventory_is_one_that_kvctl_reads(tmp_path):
    write_inventory(tmp_path, [REPLICA])
    (target,) = load_inventory(tmp_path / "inventory.yaml")
    assert (target.name, target.address, dict(target.labels)) == ("r0", "127.0.0.1:2", {"fleet": "local"})
    assert yaml.safe_load((tmp_path / "inventory.yaml").read_text())["replicas"][0]["name"] == "r0"


def test_a_write_that_fails_leaves_the_old_inventory(tmp_path, monkeypatch):
    write_inventory(tmp_path, [REPLICA])
    before = (tmp_path / "inventory.yaml").read_bytes()

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_inventory(tmp_path, [])
    assert [path.name for path in tmp_path.iterdir()] == ["inventory.yaml"]
    assert (tmp_path / "inventory.yaml").read_bytes() == before


def test_the_socket_directory_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    made = make_run_directory(None, 2)
    try:
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert made.name.startswith("kvctl-local-")
    finally:
        made.rmdir()


def test_a_socket_path_of_107_bytes_is_the_longest(tmp_path):
    fixed = len("/kvctl-local-01234567/r0/00000000-0000-0000-0000-000000000000")
    fits = "/tmp/" + "x" * (107 - fixed - len("/tmp/"))
    with pytest.raises(LocalError, match="No such file"):
        make_run_directory(fits, 1)  # short enough: it gets as far as making it
    with pytest.raises(LocalError, match="1 bytes over the 107"):
        make_run_directory(fits + "x", 1)


def test_a_state_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "kvctl").write_text("")
    with pytest.raises(LocalError, match="cannot be written"):
        prepare_state(tmp_path / "kvctl" / "local")


def test_free_ports_are_all_different(tmp_path):
    replicas = programs.plan(Settings(replicas=5), tmp_path)
    addresses = [address for r in replicas for address in (r.api, r.sidecar, r.metrics)]
    assert len(set(addresses)) == 15


def test_a_base_port_gives_ports_in_a_row(tmp_path):
    for base in range(42000, 43000, 50):
        with suppress(LocalError):  # somebody else has one of these
            replicas = programs.plan(Settings(replicas=2, base_port=base), tmp_path)
            break
    assert [r.sidecar for r in replicas] == [f"127.0.0.1:{base + 1}", f"127.0.0.1:{base + 4}"]


def test_a_port_that_listens_already_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalError, match=f"port {port} "):
            programs.plan(Settings(replicas=1, base_port=port), tmp_path)


@pytest.mark.parametrize("replicas", [0, -3, 17])
def test_a_senseless_number_of_replicas_is_refused(replicas):
    with pytest.raises(LocalError, match="1 to 16 replicas"):
        programs.check(Settings(replicas=replicas))


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalError, match="make demo"):
        programs.check(Settings())


def test_an_engine_starts_as_in_production_and_leaves_its_files_in_the_fleets_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("KVCTL_BRIDGE", "0")
    (replica,) = programs.plan(Settings(replicas=1), tmp_path)
    program = programs.engine(replica, Path("/run/f"), Settings(engine_arguments=("--seed=3",)))
    assert program.environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert program.environment["KVCTL_BRIDGE"] == "1"
    for name in ("KVCTL_ENGINE_DIR", "TMPDIR", "VLLM_RPC_BASE_PATH", "VLLM_CACHE_ROOT"):
        assert program.environment[name].startswith("/run/f")
    assert program.arguments[-1] == "--seed=3"


def test_a_sidecar_takes_no_settings_that_were_meant_for_another(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCTL_LISTEN", "0.0.0.0:1")
    (replica,) = programs.plan(Settings(replicas=1), tmp_path)
    assert "KVCTL_LISTEN" not in programs.sidecar(replica, Path("/run/f")).environment
