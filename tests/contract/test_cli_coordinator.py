"""kvctl and the client through a real coordinator: operations outlive the command that started them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest
from coordinator_in_process import coordinator, until
from fake_sidecar_server import FakeSidecar, serving
from kvctl.v1 import fleet_pb2, types_pb2

from sidecar.client import aio, errors

ROOT = Path(__file__).parents[2]


async def start(tmp_path: Path, *arguments: str, **extra: str) -> Process:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCTL_")}
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}", "HOME": str(tmp_path), "COLUMNS": "80"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidecar.cli.main", *arguments, stdout=PIPE, stderr=PIPE, env={**kept, **paths, **extra}
    )


async def kvctl(tmp_path: Path, *arguments: str, **extra: str) -> tuple[int, str, str]:
    process = await start(tmp_path, *arguments, **extra)
    output, problems = await asyncio.wait_for(process.communicate(), 60)
    assert b"Traceback" not in problems
    return process.returncode or 0, output.decode(), problems.decode()


async def test_the_same_message_is_printed_as_for_a_direct_operation(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    async with serving(*fakes) as addresses, coordinator(tmp_path, addresses) as running:
        there = ("--coordinator", running.address)
        code, through, _ = await kvctl(tmp_path, "reset", "--mode", "keep", "-o", "json", *there)
        assert code == 0
        operation_id = json.loads(through)["operationId"]
        _, fetched, _ = await kvctl(tmp_path, "ops", "get", operation_id, "-o", "json", *there)
        direct = [word for address in addresses for word in ("--target", address)]
        _, here, _ = await kvctl(tmp_path, "reset", "--mode", "keep", "-o", "json", *direct)
    assert json.loads(fetched)["results"] == json.loads(through)["results"]
    assert list(json.loads(through)) == list(json.loads(here))
    assert list(json.loads(through)["results"][0]) == list(json.loads(here)["results"][0])


async def test_the_shell_completes_names_of_a_coordinators_replicas_and_nothing_where_none_is(tmp_path: Path) -> None:
    def pressed(address: str) -> dict[str, str]:
        words = f"kvctl reset --coordinator {address} --replicas de"
        return {"_KVCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "5"}

    fakes = [FakeSidecar("prefill-0"), FakeSidecar("decode-0")]
    async with serving(*fakes) as addresses, coordinator(tmp_path, addresses) as running:
        assert await kvctl(tmp_path, **pressed(running.address)) == (0, "plain,decode-0\n", "")
    assert await kvctl(tmp_path, **pressed("127.0.0.1:1")) == (0, "\n", "")


async def test_ctrl_c_leaves_the_operation_running_and_says_how_to_get_back(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    under_way, let_go = asyncio.Event(), asyncio.Event()

    async def hold(kind: str) -> None:
        under_way.set()
        await let_go.wait()

    fake.before = hold
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        there = ("--coordinator", running.address)
        process = await start(tmp_path, "reset", "--mode", "keep", *there)
        await asyncio.wait_for(under_way.wait(), 30)
        process.send_signal(signal.SIGINT)
        output, problems = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, output) == (130, b"")
        assert fake.cancelled == []
        told = problems.decode()
        operation_id = told.split("operation ")[1].split()[0]
        assert f"kvctl ops watch {operation_id} --coordinator {running.address}" in told
        code, _, _ = await kvctl(tmp_path, "ops", "get", operation_id, *there)
        assert code == 5
        watching = asyncio.create_task(kvctl(tmp_path, "ops", "watch", operation_id, "-o", "json", *there))
        let_go.set()
        code, output_text, _ = await watching
    assert code == 0
    assert json.loads(output_text)["state"] == "OPERATION_STATE_SUCCEEDED"
    assert len(fake.effects) == 1


async def test_operations_are_listed_paused_resumed_and_cancelled(tmp_path: Path) -> None:
    first, second = FakeSidecar("r0"), FakeSidecar("r1")
    under_way, let_go = asyncio.Event(), asyncio.Event()

    async def hold(kind: str) -> None:
        under_way.set()
        await let_go.wait()

    first.before = hold
    async with serving(first, second) as addresses, coordinator(tmp_path, addresses) as running:
        there = ("--coordinator", running.address)
        rolling = asyncio.create_task(kvctl(tmp_path, "reset", "--mode", "keep", "--rolling", "-o", "json", *there))
        await asyncio.wait_for(under_way.wait(), 30)
        _, listed, _ = await kvctl(tmp_path, "ops", "list", "-o", "name", *there)
        [operation_id] = listed.split()
        code, held, _ = await kvctl(tmp_path, "ops", "pause", operation_id, *there)
        assert (code, f"operation {operation_id} (paused)" in held) == (0, True)
        let_go.set()
        await until(lambda: bool(first.effects), 15)
        assert (await kvctl(tmp_path, "ops", "resume", operation_id, *there))[0] == 0
        code, output, _ = await rolling
        assert (code, json.loads(output)["counts"]["succeeded"]) == (0, 2)
        under_way.clear()
        let_go.clear()
        rolling = asyncio.create_task(kvctl(tmp_path, "reset", "--mode", "keep", "--rolling", "-o", "json", *there))
        await asyncio.wait_for(under_way.wait(), 30)
        _, listed, _ = await kvctl(tmp_path, "ops", "list", "-o", "name", *there)
        assert (await kvctl(tmp_path, "ops", "pause", listed.split()[0], *there))[0] == 0
        code, stopping, said = await kvctl(tmp_path, "ops", "cancel", listed.split()[0], *there)
        assert (code, "ops resume" in stopping, "no further target is started" in said) == (0, False, True)
        let_go.set()
        code, output, _ = await rolling
        assert (code, json.loads(output)["counts"]["cancelled"]) == (3, 1)
        short = await kvctl(tmp_path, "ops", "get", operation_id[:8], *there)
        code, _, problems = await kvctl(tmp_path, "ops", "get", "11111111-2222-3333-4444-555555555555", *there)
    assert (short[0], "`kvctl ops list` shows" in short[2]) == (2, True)
    assert code == 1
    assert "is not on record" in problems


async def test_an_operation_that_is_looked_up_says_for_whose_health_its_rollout_waits(tmp_path: Path) -> None:
    ill, waiting = FakeSidecar("r0"), FakeSidecar("r1")
    ill.stalled, ill.verdict = True, types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK
    async with serving(ill, waiting) as addresses, coordinator(tmp_path, addresses) as running:
        there = ("--coordinator", running.address)
        rolling = asyncio.create_task(kvctl(tmp_path, "reset", "--mode", "keep", "--rolling", "-o", "name", *there))
        await until(lambda: bool(ill.effects))
        operation_id = (await kvctl(tmp_path, "ops", "list", "-o", "name", *there))[1].strip()
        async with asyncio.timeout(40):
            while "waiting for it to be healthy" not in (shown := await look(tmp_path, operation_id, *there)):
                pass
        assert "HELD_BLOCKS_DEADLOCK for 12 s" in shown
        await kvctl(tmp_path, "ops", "cancel", operation_id, *there)
        assert (await rolling)[1] == "r0\n"
    assert not waiting.effects


async def look(tmp_path: Path, operation_id: str, *there: str) -> str:
    return " ".join((await kvctl(tmp_path, "ops", "get", operation_id, *there))[1].split())


async def test_a_coordinator_of_nobody_is_told_and_not_shown_as_nothing(tmp_path: Path) -> None:
    inventory = tmp_path / "empty.yaml"
    inventory.write_text("replicas: []\n")
    async with coordinator(tmp_path, (), "--inventory", str(inventory)) as running:
        for command in ("replicas", "admission"):
            done = await kvctl(tmp_path, command, "--coordinator", running.address)
            assert done == (4, "", "no replica found; check the fleet's inventory or DNS name\n")


async def test_reads_go_through_the_coordinator_too(tmp_path: Path) -> None:
    async with serving(FakeSidecar("r0")) as addresses, coordinator(tmp_path, addresses) as running:
        there = ("--coordinator", running.address)
        assert (await kvctl(tmp_path, "replicas", "-o", "name", *there))[:2] == (0, "r0\n")
        assert "FLOWING" in (await kvctl(tmp_path, "admission", *there))[1]
        assert "1 replica, 1 engine" in (await kvctl(tmp_path, "top", "--once", *there))[1]
        code, output, _ = await kvctl(tmp_path, "doctor", *there)
        assert (code, "answers" in output) == (0, True)
        code, _, problems = await kvctl(tmp_path, "reset", "--replicas", "r9", *there)
    assert code == 2
    assert "no replica matches 'r9'; known: r0" in problems


async def test_a_request_id_that_belongs_to_another_operation_is_a_wrong_command(tmp_path: Path) -> None:
    same = ("--request-id", "11111111-2222-3333-4444-555555555555")
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses, coordinator(tmp_path, addresses) as running:
        there = ("--coordinator", running.address)
        assert (await kvctl(tmp_path, "reset", "--mode", "keep", *same, *there))[0] == 0
        code, _, told = await kvctl(tmp_path, "reset", "--mode", "keep", *same, *there)
        assert code == 0
        assert "nothing was run now: a new one needs a new id" in told
        code, _, problems = await kvctl(tmp_path, "reset", "--mode", "preempt", *same, *there)
    assert code == 2
    assert same[1] in problems
    assert "give a new id, or none" in problems
    assert len(fake.effects) == 1


async def test_a_sidecar_given_as_coordinator_is_told_apart(tmp_path: Path) -> None:
    async with serving(FakeSidecar("r0")) as [address]:
        code, _, problems = await kvctl(tmp_path, "reset", "--coordinator", address)
    assert code == 4
    assert "give a coordinator's address, or a sidecar's with --target" in problems


async def test_the_client_runs_operations_and_weight_updates_with_a_coordinator(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    async with (
        serving(fake) as addresses,
        coordinator(tmp_path, addresses) as running,
        aio.Fleet(coordinator=running.address) as fleet,
    ):
        result = await fleet.reset_prefix_cache(running_requests="keep")
        assert result.raise_for_failures().replicas[0].engines
        async with fleet.weight_update("v2") as update:
            assert update.replicas == ("r0",)
        assert not update.lost
        with pytest.raises(errors.RequestInvalid, match="no replica matches 'r9'"):
            await fleet.reset_prefix_cache(replicas="r9")
    assert len(fake.effects) == 4
    assert fleet_pb2.OperationState.Name(result.message.state) == "OPERATION_STATE_SUCCEEDED"
