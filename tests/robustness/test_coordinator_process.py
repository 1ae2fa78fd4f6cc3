"""kvctl-coordinator as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import fleet_pb2

from sidecar.rpc import errors
from tests.contract.coordinator_in_process import ENDED, keep_reset
from tests.contract.fake_sidecar_server import FakeSidecar, serving
from tests.contract.sidecar_process import environment, wait_until
from tests.robustness.coordinator_process import WORDS, CoordinatorProcess, get


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(
    made: ExitStack, folder: Path, targets: list[str], *arguments: str, under: Sequence[str] = ()
) -> CoordinatorProcess:
    process = CoordinatorProcess(folder, targets, *arguments, under=under)
    made.callback(process.end)
    return process


async def test_sigterm_lets_calls_under_way_end_starts_no_more_and_the_next_one_finishes(
    made: ExitStack, tmp_path: Path
) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(3)]

    async def slow(kind: str) -> None:
        if kind == "reset":
            await asyncio.sleep(1.0)

    for fake in fakes:
        fake.before = slow
    async with serving(*fakes) as found:
        targets = [f"r{index}={address}" for index, address in enumerate(found)]
        first = start(made, tmp_path, targets)
        stub = await asyncio.to_thread(first.serve)
        spec = keep_reset(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING)
        request = fleet_pb2.StartOperationRequest(spec=spec)
        started = (await asyncio.to_thread(stub.StartOperation, request, 30)).operation
        await asyncio.to_thread(wait_until, lambda: bool(fakes[0].requests), 60)
        first.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.process.wait, 60) == 0
        assert [len(fake.effects) for fake in fakes] == [1, 0, 0]

        second = start(made, tmp_path, targets)
        stub = await asyncio.to_thread(second.serve)
        left = await asyncio.to_thread(get, stub, started.operation_id)
        assert left.results[0].outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
        await asyncio.to_thread(wait_until, lambda: get(stub, started.operation_id).state in ENDED, 60)
        assert [len(fake.effects) for fake in fakes] == [1, 1, 1]


async def test_a_watch_is_told_that_the_server_stops_and_new_operations_are_refused(
    made: ExitStack, tmp_path: Path
) -> None:
    fake = FakeSidecar("r0")

    async def slow(kind: str) -> None:
        if kind == "reset":
            await asyncio.sleep(2.0)

    fake.before = slow
    async with serving(fake) as found:
        process = start(made, tmp_path, [f"r0={found[0]}"])
        stub = await asyncio.to_thread(process.serve)
        request = fleet_pb2.StartOperationRequest(spec=keep_reset())
        started = (await asyncio.to_thread(stub.StartOperation, request, 30)).operation
        watch = stub.WatchOperation(fleet_pb2.WatchOperationRequest(operation_id=started.operation_id))
        await asyncio.to_thread(next, watch)
        process.process.send_signal(signal.SIGTERM)

        def to_the_end() -> errors.Failure | None:
            try:
                for _ in watch:
                    pass
            except grpc.RpcError as error:
                return errors.parse(error)
            return None

        told = await asyncio.to_thread(to_the_end)
        assert told is not None
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING")
        assert await asyncio.to_thread(process.process.wait, 60) == 0
    assert len(fake.effects) == 1


def test_a_second_coordinator_of_a_store_ends_with_the_pid_of_the_first(made: ExitStack, tmp_path: Path) -> None:
    first = start(made, tmp_path, ["127.0.0.1:1"])
    first.serve()
    second = start(made, tmp_path, ["127.0.0.1:1"])
    assert second.process.wait(60) == 4
    assert f"in use by pid {first.process.pid}" in second.log()


def test_a_taken_port_is_named(made: ExitStack, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = start(made, tmp_path, ["127.0.0.1:1"])
    first.serve()
    second = start(made, tmp_path / "other", ["127.0.0.1:1"], "--listen", first.address)
    assert second.process.wait(60) == 4
    assert first.address.rpartition(":")[2] in second.log()
    assert "in use" in second.log()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--targets", "nonsense"], 2, "no port"),
        (["--targets", "127.0.0.1:1", "--grace", "soon"], 2, "--grace"),
        (["--targets", "127.0.0.1:1", "--unknown"], 2, "--unknown"),
        ([], 2, "no replicas"),
        (["--targets", "127.0.0.1:1", "--listen", "0.0.0.0:0"], 4, "--insecure"),
        (["--inventory", "/nonexistent/fleet.yaml"], 2, "/nonexistent/fleet.yaml"),
        (["--inventory", "/nonexistent/fleet.yaml", "--check"], 2, "/nonexistent/fleet.yaml"),
        (["--targets", "dns://x", "--check"], 2, "dns:///name:port"),
        (["--targets", "dns://x"], 2, "dns:///name:port"),
        (["--targets", "127.0.0.1:1", "--audit-log", "/nonexistent/audit"], 4, "--audit-log /nonexistent/audit"),
        (["--targets", "127.0.0.1:1", "--tls-cert", "/nonexistent"], 2, "--tls-key"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_with_an_exit_code(
    tmp_path: Path, words: list[str], code: int, told: str
) -> None:
    ended = subprocess.run(
        [*WORDS, "--store", str(tmp_path / "ops.db"), "--metrics", "off", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert told in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "Traceback" not in ended.stderr


def test_check_says_what_the_settings_mean_and_leaves_nothing_running(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *WORDS,
            "--targets",
            "a=127.0.0.1:1",
            "--store",
            str(tmp_path / "ops.db"),
            "--listen",
            "127.0.0.1:0",
            "--check",
        ],
        env=environment(KVCTL_COORDINATOR_METRICS="off", KVCTL_COORDINATOR_PORT="tcp://10.0.0.1:7710"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "settings are valid" in ended.stdout
    assert str(tmp_path / "ops.db") in ended.stdout


async def test_a_disk_that_fills_up_refuses_operations_and_reads_go_on(made: ExitStack, tmp_path: Path) -> None:
    # No file may grow beyond 300 kB or 600 kB, depending on the shell: as if the disk were full.
    small_files = ("sh", "-c", 'ulimit -f 600; exec "$0" "$@"')
    fake = FakeSidecar("r0")
    async with serving(fake) as found:
        process = start(made, tmp_path, [f"r0={found[0]}"], "--audit-log", os.devnull, under=small_files)
        stub = await asyncio.to_thread(process.serve)

        def until_full() -> tuple[list[str], errors.Failure]:
            done = []
            for _ in range(400):
                try:
                    answer = stub.StartOperation(fleet_pb2.StartOperationRequest(spec=keep_reset()), timeout=30)
                except grpc.RpcError as error:
                    return done, errors.parse(error)
                done.append(answer.operation.operation_id)
            raise AssertionError("the disk did not fill up")

        done, refusal = await asyncio.to_thread(until_full)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "STORE_FAILED")
        assert "free space" in refusal.message
        assert len(fake.effects) <= len(done)
        first = await asyncio.to_thread(get, stub, done[0])
        assert first.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
        listed = await asyncio.to_thread(stub.ListOperations, fleet_pb2.ListOperationsRequest(), 30)
        assert listed.operations
        os.kill(process.process.pid, signal.SIGTERM)
        assert await asyncio.to_thread(process.process.wait, 60) == 0
