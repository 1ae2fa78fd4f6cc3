"""What a person gets wrong: one clear line and exit 2 or 4, never a traceback."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tests.e2e.fleet_program import SCRIPTS


def test_an_unknown_mode_names_the_modes(fleet):
    done = fleet.run("reset", "--mode", "gently", "--replicas", "all")
    assert done.code == 2
    line = done.one_line_on_stderr()
    assert "gently" in line
    assert "keep" in line


def test_an_unknown_replica_names_those_there_are(fleet):
    done = fleet.run("reset", "--mode", "keep", "--replicas", "r7")
    assert done.code in (2, 4)
    line = done.one_line_on_stderr()
    assert "r7" in line


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("replicas: [{name: r0, addres: '127.0.0.1:1'}]", "addres"),
        ("replicas: {r0: 1}", "list"),
        ("replicas: [", "YAML"),
        ("", "empty"),
    ],
)
def test_a_malformed_inventory_is_named_with_its_fault(scratch, text, named):
    path = scratch.home / "inventory.yaml"
    path.write_text(text)
    done = scratch.run("reset", "--mode", "keep", "--replicas", "all", "--inventory", str(path))
    assert done.code == 2
    line = done.one_line_on_stderr()
    assert "inventory.yaml" in line
    assert named in line


def test_an_inventory_that_is_not_there_is_named(scratch):
    done = scratch.run("reset", "--mode", "keep", "--inventory", str(scratch.home / "none.yaml"))
    assert done.code == 2
    assert "none.yaml" in done.one_line_on_stderr()


def test_a_replica_that_nobody_serves_is_unreachable(scratch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = scratch.run("reset", "--mode", "keep", "--target", address, "-o", "json")
    assert done.code == 4
    assert "UNAVAILABLE" in done.out
    assert "Traceback" not in done.err


def test_without_any_fleet_the_error_says_how_to_get_one(scratch):
    done = scratch.run("reset", "--mode", "keep", "--replicas", "all")
    assert done.code in (2, 4)
    assert "local up" in done.one_line_on_stderr()


def test_a_base_port_in_use_is_named_and_nothing_is_left(scratch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = scratch.run("local", "up", "--base-port", str(port))
    assert done.code == 2
    assert str(port) in done.one_line_on_stderr()
    assert not (scratch.state / "fleet.json").exists()


def test_a_socket_directory_that_cannot_be_made_is_named(scratch):
    done = scratch.run("local", "up", "--directory", "/proc/nowhere")
    assert done.code == 2
    assert "/proc/nowhere" in done.one_line_on_stderr()


def test_a_socket_path_over_107_bytes_is_refused_before_anything_starts(scratch, tmp_path):
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    done = scratch.run("local", "up", "--directory", str(deep))
    assert done.code == 2
    assert "107" in done.one_line_on_stderr()


def test_a_state_directory_that_cannot_be_written_is_named(scratch):
    environment = scratch.environment | {"XDG_STATE_HOME": "/proc/nowhere"}
    done = subprocess.run(
        [str(SCRIPTS / "kvctl"), "local", "up"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "/proc/nowhere" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("replicas", ["0", "-1", "17", "many"])
def test_a_senseless_number_of_replicas_is_refused(scratch, replicas):
    done = scratch.run("local", "up", "--replicas", replicas)
    assert done.code == 2
    assert replicas in done.one_line_on_stderr()


def run_sidecar(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / "kvctl-sidecar"), "--name", "s", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_sidecar_names_the_port_that_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_sidecar("--engine-dir", str(tmp_path), "--listen", address, "--metrics", "127.0.0.1:0")
    assert done.returncode in (2, 4)
    assert address in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sidecar_refuses_an_engine_directory_whose_sockets_would_have_too_long_a_path(tmp_path):
    directory = str(tmp_path / ("z" * 120))
    done = run_sidecar("--engine-dir", directory, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    assert done.returncode == 2
    assert directory in done.stderr
    assert "107" in done.stderr
    assert len(done.stderr.splitlines()) == 1
