"""kvctl when its streams cannot be written, its ids are empty, or nobody is there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import grpc
import pytest
from fake_sidecar_server import FakeSidecar
from kvctl.v1 import types_pb2
from test_cli_commands import KVCTL, environment, fleet, kvctl

from sidecar.rpc.errors import failure


def shell(tmp_path: Path, arguments: str, redirection: str) -> subprocess.CompletedProcess[str]:
    line = f"{' '.join(KVCTL)} {arguments} {redirection}"
    return subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60, env=environment(tmp_path), check=False
    )


def test_a_missing_stdout_is_as_good_as_dev_null(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        done = shell(tmp_path, f"reset --mode preempt --inventory {inventory}", ">&-")
    assert (done.returncode, done.stderr, len(fake.effects)) == (0, "", 1)


@pytest.mark.parametrize("form", ["json", "table"])
def test_a_result_that_cannot_be_written_names_the_operation_that_ran(tmp_path: Path, form: str) -> None:
    fake = FakeSidecar("r0")
    same = "11111111-2222-3333-4444-555555555555"
    with fleet(tmp_path, fake) as inventory:
        done = shell(tmp_path, f"reset --inventory {inventory} --request-id {same} -o {form}", ">/dev/full")
    assert len(fake.effects) == 1
    assert done.returncode == 5
    assert done.stderr == (
        f"kvctl: the operation ended (succeeded, 1 of 1 succeeded, operation {same}) "
        "but its result could not be written: No space left on device\n"
    )


@pytest.mark.parametrize("command", ["version", "--help", "--version", "replicas"])
def test_output_to_a_full_disk_is_one_clear_line(tmp_path: Path, command: str) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        flags = f"--inventory {inventory}" if command == "replicas" else ""
        done = shell(tmp_path, f"{command} {flags}", ">/dev/full")
    assert done.stderr == "kvctl: the output could not be written: No space left on device\n"
    assert done.returncode == 5


def test_an_empty_request_id_is_refused(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        done = kvctl(tmp_path, "reset", "--inventory", str(inventory), "--request-id", "")
    assert done.returncode == 2
    assert "request id '' is not a UUID" in done.stderr
    assert not fake.effects


def test_one_look_at_a_fleet_that_is_gone_exits_4(tmp_path: Path) -> None:
    assert kvctl(tmp_path, "top", "--once", "--target", "127.0.0.1:1").returncode == 4


def test_three_hundred_refusals_with_foreign_texts_are_three_hundred_rows_and_exit_1(tmp_path: Path) -> None:
    text = "ブロックが解放されていません。" * 5
    fakes = [FakeSidecar(f"r{number:03}") for number in range(300)]
    for fake in fakes:
        fake.fail_with = [failure(grpc.StatusCode.FAILED_PRECONDITION, "BLOCKS_HELD_BY_REQUESTS", text)]
    with fleet(tmp_path, *fakes) as inventory:
        done = kvctl(tmp_path, "reset", "--inventory", str(inventory), "--timeout", "2m")
    rows = [line.split()[:3] for line in done.stdout.splitlines() if " failed " in line and line.startswith("r")]
    assert rows == [[fake.name, "failed", "BLOCKS_HELD_BY_REQUESTS"] for fake in fakes]
    assert "  FAILED_PRECONDITION BLOCKS_HELD_BY_REQUESTS: r000" in done.stdout
    assert "".join(done.stdout.split()).count(text) == 1
    assert "300 replicas: 300 failed" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "surroundings", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"NO_COLOR": "1", "TERM": "xterm-256color"}]
)
def test_lines_of_top_are_plain_wherever_they_go(tmp_path: Path, surroundings: dict[str, str]) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        done = kvctl(tmp_path, "top", "--once", "--inventory", str(inventory), **surroundings)
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


@pytest.mark.parametrize("command", ["top --interval 200ms", "admission --watch --interval 200ms"])
def test_a_reader_that_goes_away_ends_what_prints_for_ever(tmp_path: Path, command: str) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        process = subprocess.Popen(
            [*KVCTL, *command.split(), "--inventory", str(inventory)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


@pytest.mark.parametrize("command", ["--help", "reset --help", "version"])
def test_help_for_a_reader_that_has_gone_is_no_failure(tmp_path: Path, command: str) -> None:
    nobody, here = os.pipe()
    os.close(nobody)
    try:
        done = subprocess.run(
            [*KVCTL, *command.split()], stdout=here, stderr=subprocess.PIPE, env=environment(tmp_path), check=False
        )
    finally:
        os.close(here)
    assert (done.returncode, done.stderr) == (0, b"")


def test_doctor_finds_a_stopped_engine(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    fake.verdict = types_pb2.VERDICT_ENGINE_STOPPED
    with fleet(tmp_path, fake) as inventory:
        done = kvctl(tmp_path, "doctor", "--inventory", str(inventory), KVCTL_ENGINE_DIR=str(tmp_path / "none"))
    assert done.returncode == 1
    assert "kill -CONT 4242" in " ".join(done.stdout.split())


def test_ctrl_c_while_modules_are_read_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    surroundings = environment(tmp_path)
    surroundings["PYTHONPATH"] = f"{tmp_path}:{surroundings['PYTHONPATH']}"
    done = subprocess.run([*KVCTL, "version"], capture_output=True, text=True, env=surroundings, check=False)
    assert (done.returncode, done.stderr) == (130, "kvctl: interrupted\n")
