"""The coordinator's audit log: a line before and after each request and each call, or neither happens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from kvctl.v1 import fleet_pb2

from sidecar.rpc import errors
from tests.contract.coordinator_in_process import coordinator, keep_reset, until
from tests.contract.fake_sidecar_server import FakeSidecar, serving

Out = fleet_pb2.TargetOutcome


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def make_unwritable(folder: Path) -> None:
    """As if the file had been rotated away and could not be made again; also for root."""
    file = folder / "audit.jsonl"
    file.unlink()
    file.mkdir()


async def test_each_request_and_each_call_has_a_line_before_and_one_after(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    announced: list[list[str]] = []

    async def look(kind: str) -> None:
        if kind == "reset":
            announced.append(
                [line["replica"] for line in lines(tmp_path) if line["audit"] == "begin" and "replica" in line]
            )

    for fake in fakes:
        fake.before = look
    async with serving(*fakes) as addresses, coordinator(tmp_path, [f"a={addresses[0]}", f"b={addresses[1]}"]) as it:
        ended = await it.run(keep_reset(strategy=fleet_pb2.ROLLOUT_STRATEGY_ROLLING), timeout=60)
    assert announced == [["a"], ["a", "b"]], "each call has its line before it arrives"
    written = lines(tmp_path)
    ids = [row.request_id for row in ended.results]
    assert [(line["audit"], line["request_id"]) for line in written] == [
        ("begin", ended.operation_id),
        ("begin", ids[0]),
        ("end", ids[0]),
        ("begin", ids[1]),
        ("end", ids[1]),
        ("end", ended.operation_id),
    ]
    first, call, answer, last = written[0], written[1], written[2], written[-1]
    assert (first["operation"], first["caller"], first["role"]) == ("reset", "local", "admin")
    assert first["peer"].startswith("ipv4:127.0.0.1:")
    assert first["spec"]["reset"] == {"running_requests": "RUNNING_REQUESTS_KEEP"}
    assert (call["fleet_operation"], call["replica"], call["address"]) == (ended.operation_id, "a", addresses[0])
    assert (answer["outcome"], answer["code"]) == ("succeeded", "OK")
    assert (last["state"], last["succeeded"], last["total"]) == ("succeeded", 2, 2)
    assert all(line["coordinator"] and line["time"] for line in written)


async def test_steering_has_its_lines_too(tmp_path: Path) -> None:
    fake, arrived, gate = FakeSidecar("r0"), asyncio.Event(), asyncio.Event()

    async def wait(kind: str) -> None:
        arrived.set()
        await gate.wait()

    fake.before = wait
    async with serving(fake) as addresses, coordinator(tmp_path, [f"r0={addresses[0]}"]) as it:
        by_id = {"operation_id": (await it.start(keep_reset(timeout=60))).operation_id}
        await arrived.wait()
        await it.stub.PauseOperation(fleet_pb2.PauseOperationRequest(**by_id))
        await it.stub.ResumeOperation(fleet_pb2.ResumeOperationRequest(**by_id))
        await it.stub.CancelOperation(fleet_pb2.FleetAdminCancelOperationRequest(**by_id))
        gate.set()
        await it.ended(by_id["operation_id"], 60)
    steered = [(line["audit"], line["operation"]) for line in lines(tmp_path) if line["operation"] != "reset"]
    assert steered == [(event, what) for what in ("hold", "release", "cancel") for event in ("begin", "end")]


async def test_a_request_whose_line_cannot_be_written_is_refused_and_not_on_record(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses, coordinator(tmp_path, [f"r0={addresses[0]}"]) as it:
        make_unwritable(tmp_path)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await it.start(keep_reset())
        refusal = errors.parse(raised.value)
        listed = await it.stub.ListOperations(fleet_pb2.ListOperationsRequest())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "STORE_FAILED")
    assert refusal.message.startswith("nothing was changed: the audit log ")
    assert not listed.operations
    assert fake.requests == []


async def test_a_call_whose_line_cannot_be_written_is_not_made_nor_is_any_after_it(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{index}") for index in range(3)]

    async def lose_the_log(kind: str) -> None:
        make_unwritable(tmp_path)

    fakes[0].before = lose_the_log
    async with serving(*fakes) as addresses:
        targets = [f"r{index}={address}" for index, address in enumerate(addresses)]
        async with coordinator(tmp_path, targets) as it:
            ended = await it.run(keep_reset(concurrency=1, timeout=30), timeout=60)
    assert [Out.Name(row.outcome) for row in ended.results] == [
        "TARGET_OUTCOME_SUCCEEDED",
        "TARGET_OUTCOME_SKIPPED",
        "TARGET_OUTCOME_SKIPPED",
    ]
    assert ended.results[1].reason == "STORE_FAILED"
    assert "audit log" in ended.results[1].message
    assert [len(fake.effects) for fake in fakes] == [1, 0, 0]


async def test_an_operation_taken_up_after_a_restart_has_a_line_that_says_so(tmp_path: Path) -> None:
    fake, gate = FakeSidecar("r0"), asyncio.Event()

    async def wait(kind: str) -> None:
        await gate.wait()

    fake.before = wait
    async with serving(fake) as addresses:
        targets = [f"r0={addresses[0]}"]
        async with coordinator(tmp_path, targets, "--grace", "1s") as it:
            operation_id = (await it.start(keep_reset(timeout=60))).operation_id
            await until(lambda: bool(fake.requests), 60)
        gate.set()
        async with coordinator(tmp_path, targets) as it:
            await it.ended(operation_id, 60)
    [resumed] = [line for line in lines(tmp_path) if line.get("resumed")]
    assert (resumed["audit"], resumed["request_id"], resumed["caller"]) == ("begin", operation_id, "local")
