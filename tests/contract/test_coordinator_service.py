"""FleetAdmin over real gRPC, against sidecars that keep the contract and have no engines."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.cli import exitcodes
from sidecar.coordinator import app, running, service
from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.live import in_messages
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.store import Store
from sidecar.coordinator.targets import Discovered, Target
from sidecar.rpc import errors
from sidecar.rpc.channels import ClientSecurity
from tests.contract.coordinator_in_process import ENDED, coordinator, keep_reset, until
from tests.contract.fake_sidecar_server import FakeSidecar, refused, serving

ROLLING = fleet_pb2.ROLLOUT_STRATEGY_ROLLING
SUCCEEDED = fleet_pb2.OPERATION_STATE_SUCCEEDED
Out = fleet_pb2.TargetOutcome


def named(addresses: list[str]) -> list[str]:
    return [f"r{index}={address}" for index, address in enumerate(addresses)]


def outcomes(operation: fleet_pb2.FleetOperation) -> dict[str, str]:
    return {row.replica: Out.Name(row.outcome).removeprefix("TARGET_OUTCOME_") for row in operation.results}


async def failure_of(call: object) -> errors.Failure:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call  # type: ignore[misc]
    return errors.parse(raised.value)


# --- running -----------------------------------------------------------------------------------------------------


async def test_an_operation_runs_to_its_end_and_is_remembered(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(3)]
    async with serving(*fakes) as addresses:
        async with coordinator(tmp_path, named(addresses)) as running:
            started = await running.start(keep_reset())
            assert started.counts.total == 3
            assert started.state not in ENDED
            ended = await running.ended(started.operation_id)
        assert ended.state == SUCCEEDED
        assert [row.reset.engines[0].cached_blocks_dropped for row in ended.results] == [812] * 3
        assert [len(fake.effects) for fake in fakes] == [1, 1, 1]
        async with coordinator(tmp_path, named(addresses)) as again:
            assert await again.get(ended.operation_id) == ended
    assert [len(fake.effects) for fake in fakes] == [1, 1, 1], "an operation that has ended is not run again"


async def test_a_repeated_start_gives_the_operation_on_record_and_another_request_is_refused(tmp_path: Path) -> None:
    fake = FakeSidecar()
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        operation_id = str(uuid.uuid4())
        starts = await asyncio.gather(*(running.start(keep_reset(), operation_id.upper()) for _ in range(5)))
        assert {each.operation_id for each in starts} == {operation_id}
        await running.ended(operation_id)
        assert (await running.start(keep_reset(), operation_id)).state == SUCCEEDED
        assert len(fake.effects) == 1
        refusal = await failure_of(running.start(keep_reset(timeout=31), operation_id))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "REQUEST_ID_REUSED")


async def test_every_field_of_the_request_reaches_the_replica(tmp_path: Path) -> None:
    fake = FakeSidecar()
    spec = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(names=["r0"]))
    spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
    spec.reset.purpose = types_pb2.PURPOSE_WEIGHT_UPDATE
    for field in ("reset_connector", "reset_mm_cache", "reset_encoder_cache", "reorder_free_queue"):
        setattr(spec.reset, field, True)
    spec.reset.quarantine_running = True
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        ended = await running.run(spec)
    got = fake.requests[0]
    got.request_id = ""  # type: ignore[attr-defined]
    assert got == spec.reset
    assert ended.spec == spec


async def test_what_asking_for_its_name_cost_counts_towards_a_black_holes_timeout(tmp_path: Path) -> None:
    spec = keep_reset(timeout=1)
    spec.rollout.strategy = ROLLING
    with socket.create_server(("127.0.0.1", 0), backlog=64) as hole:
        async with serving(FakeSidecar("r0")) as addresses:
            targets = [*named(addresses), f"hole=127.0.0.1:{hole.getsockname()[1]}"]
            async with coordinator(tmp_path, targets) as running:
                began = time.monotonic()
                ended = await running.run(spec)
                took_s = time.monotonic() - began
    assert outcomes(ended) == {"r0": "SUCCEEDED", "hole": "UNREACHABLE"}
    assert "no answer" in {row.replica: row for row in ended.results}["hole"].message
    assert took_s < 4


async def test_a_partial_success_names_each_target(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(3)]
    fakes[1].fail_with = [refused()]
    async with serving(*fakes) as addresses:
        gone = "127.0.0.1:1"
        async with coordinator(tmp_path, [*named(addresses), f"gone={gone}"]) as running:
            ended = await running.run(keep_reset())
    assert ended.state == fleet_pb2.OPERATION_STATE_PARTIAL
    assert outcomes(ended) == {"r0": "SUCCEEDED", "r1": "FAILED", "r2": "SUCCEEDED", "gone": "UNREACHABLE"}
    row = {row.replica: row for row in ended.results}["r1"]
    assert (row.code, row.reason) == ("FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS")
    assert row.reset.engines[0].requests_running == 3
    assert (ended.counts.total, ended.counts.succeeded, ended.counts.failed, ended.counts.unreachable) == (4, 2, 1, 1)


async def test_two_addresses_of_one_replica_are_called_once_and_that_is_success(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses:
        port = addresses[0].rpartition(":")[2]
        async with coordinator(tmp_path, [f"a={addresses[0]}", f"b=localhost:{port}"]) as running:
            ended = await running.run(keep_reset())
    assert sorted(outcomes(ended).values()) == ["SKIPPED", "SUCCEEDED"]
    assert ended.state == SUCCEEDED
    assert len(fake.effects) == 1
    assert any("one replica" in warning for warning in [*ended.warnings, *(row.message for row in ended.results)])


async def test_one_black_hole_of_fifty_delays_nobody(tmp_path: Path) -> None:
    hole = socket.create_server(("127.0.0.1", 0), backlog=64)
    fakes = [FakeSidecar(f"r{i}") for i in range(49)]
    async with serving(*fakes) as addresses:
        targets = [*named(addresses), f"hole=127.0.0.1:{hole.getsockname()[1]}"]
        async with coordinator(tmp_path, targets) as running:
            started = await running.start(keep_reset(timeout=60))
            ended_first: set[str] = set()
            request = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id)
            async for message in running.stub.WatchOperation(request):
                for row in message.operation.results:
                    if row.outcome not in (0, fleet_pb2.TARGET_OUTCOME_RUNNING):
                        ended_first.add(row.replica)
                if len(ended_first) == len(fakes):
                    assert "hole" not in ended_first, "all others ended while it was silent"
                    hole.close()
            ended = await running.get(started.operation_id)
    assert ended.counts.succeeded == 49
    assert outcomes(ended)["hole"] == "UNREACHABLE"
    assert ended.state == fleet_pb2.OPERATION_STATE_PARTIAL
    assert exitcodes.of_operation(ended) == exitcodes.Exit.PARTIAL


async def test_three_hundred_failures_with_long_non_ascii_texts_are_three_hundred_rows(tmp_path: Path) -> None:
    text = "Speicher voll: größe überschritten – 日本語 " * 4
    assert len(text.encode()) > 200
    fakes = [FakeSidecar(f"r{i:03}") for i in range(300)]
    for fake in fakes:
        fake.fail_with = [errors.failure(grpc.StatusCode.INTERNAL, "OPERATION_RAISED", text)]
    async with serving(*fakes) as addresses:
        targets = [f"r{index:03}={address}" for index, address in enumerate(addresses)]
        async with coordinator(tmp_path, targets) as running:
            ended = await running.run(keep_reset(), timeout=60)
    assert len(ended.results) == 300
    assert ended.counts.failed == 300
    assert {row.code for row in ended.results} == {"INTERNAL"}
    assert {row.message for row in ended.results} == {errors.clean_text(text)}
    assert ended.state == fleet_pb2.OPERATION_STATE_FAILED
    assert exitcodes.of_operation(ended) == exitcodes.Exit.FAILED


async def test_an_outcome_that_was_unknown_is_asked_for_after_the_end_until_it_is_known(tmp_path: Path) -> None:
    fake = FakeSidecar()
    fake.lose_answers = True
    real = fake.GetOperation
    muted = True

    async def mute(request: object, context: grpc.aio.ServicerContext) -> object:
        if muted:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return await real(request, context)

    fake.GetOperation = mute  # type: ignore[method-assign]
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        ended = await running.run(keep_reset())
        assert outcomes(ended) == {"r0": "UNKNOWN"}
        assert ended.state == fleet_pb2.OPERATION_STATE_FAILED
        assert "kvctl_coordinator_operations_unknown 1.0" in (await running.page("/metrics"))[1]
        muted = False
        await running.app._running.unknowns.ask_all()
        learned = await running.get(ended.operation_id)
        assert outcomes(learned) == {"r0": "SUCCEEDED"}
        assert learned.state == SUCCEEDED
        assert learned.results[0].request_id == ended.results[0].request_id
        assert learned.version > ended.version
        assert "kvctl_coordinator_operations_unknown 0.0" in (await running.page("/metrics"))[1]
    assert len(fake.effects) == 1


async def test_an_outcome_that_no_engine_will_ever_tell_is_not_asked_for_again(tmp_path: Path) -> None:
    fake = FakeSidecar()
    fake.fail_with = [errors.failure(grpc.StatusCode.UNKNOWN, "UNCONFIRMED", "accepted, and nothing was confirmed")]
    asked: list[object] = []

    async def ask(request: object, _context: object) -> replica_pb2.GetOperationResponse:
        asked.append(request)
        return replica_pb2.GetOperationResponse()

    fake.GetOperation = ask  # type: ignore[method-assign]
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        ended = await running.run(keep_reset())
        assert outcomes(ended) == {"r0": "UNKNOWN"}
        await running.app._running.unknowns.ask_all()
        assert "kvctl_coordinator_operations_unknown 0.0" in (await running.page("/metrics"))[1]
    assert asked == []


async def test_a_replica_whose_records_do_not_reach_back_cannot_say_that_nothing_was_executed(tmp_path: Path) -> None:
    fake = FakeSidecar()
    fake.lose_answers = True
    reach_back_s = ""

    async def forgotten(request: object, context: grpc.aio.ServicerContext) -> object:
        if not reach_back_s:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        metadata = {errors.RECORDS_REACH_BACK: reach_back_s}
        gone = errors.failure(grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND", "not on record", metadata=metadata)
        return await errors.abort(context, gone)

    fake.GetOperation = forgotten  # type: ignore[method-assign]
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        ended = await running.run(keep_reset())
        reach_back_s = "0"
        await running.app._running.unknowns.ask_all()
        left = await running.get(ended.operation_id)
        assert outcomes(left) == {"r0": "UNKNOWN"}
        assert left.results[0].execution == types_pb2.EXECUTION_UNKNOWN
        reach_back_s = "3600"
        await running.app._running.unknowns.ask_all()
        known = await running.get(ended.operation_id)
        assert known.results[0].execution == types_pb2.EXECUTION_NOT_EXECUTED


# --- steering ----------------------------------------------------------------------------------------------------


async def test_a_rollout_can_be_held_let_go_on_and_cancelled(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(3)]
    gates = [asyncio.Event() for _ in fakes]
    for fake, gate in zip(fakes, gates, strict=True):

        async def wait(kind: str, gate: asyncio.Event = gate) -> None:
            if kind == "reset":
                await gate.wait()

        fake.before = wait
    async with serving(*fakes) as addresses, coordinator(tmp_path, named(addresses)) as running:
        started = await running.start(keep_reset(strategy=ROLLING))
        by_id = {"operation_id": started.operation_id}
        held = (await running.stub.PauseOperation(fleet_pb2.PauseOperationRequest(**by_id))).operation
        assert held.state == fleet_pb2.OPERATION_STATE_PAUSED
        gates[0].set()
        async for message in running.stub.WatchOperation(fleet_pb2.WatchOperationRequest(**by_id)):
            if message.operation.counts.succeeded == 1:
                break
        await asyncio.sleep(0.2)
        assert fakes[1].requests == []
        await running.stub.ResumeOperation(fleet_pb2.ResumeOperationRequest(**by_id))
        await until(lambda: bool(fakes[1].requests))
        await running.stub.CancelOperation(fleet_pb2.FleetAdminCancelOperationRequest(**by_id))
        gates[1].set()
        ended = await running.ended(started.operation_id)
        assert outcomes(ended) == {"r0": "SUCCEEDED", "r1": "SUCCEEDED", "r2": "CANCELLED"}
        assert ended.state == fleet_pb2.OPERATION_STATE_CANCELLED
        late = await failure_of(running.stub.PauseOperation(fleet_pb2.PauseOperationRequest(**by_id)))
        assert (late.code, late.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OPERATION_ENDED")
        again = await running.stub.CancelOperation(fleet_pb2.FleetAdminCancelOperationRequest(**by_id))
        assert again.operation == ended


async def test_a_held_operation_is_still_held_after_a_restart(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(2)]
    gate = asyncio.Event()

    async def wait(kind: str) -> None:
        if kind == "reset":
            await gate.wait()

    fakes[0].before = wait
    async with serving(*fakes) as addresses:
        async with coordinator(tmp_path, named(addresses)) as running:
            started = await running.start(keep_reset(strategy=ROLLING))
            by_id = {"operation_id": started.operation_id}
            await running.stub.PauseOperation(fleet_pb2.PauseOperationRequest(**by_id))
            gate.set()
        async with coordinator(tmp_path, named(addresses)) as again:
            await asyncio.sleep(0.3)
            found = await again.get(started.operation_id)
            assert found.state == fleet_pb2.OPERATION_STATE_PAUSED
            assert outcomes(found) == {"r0": "SUCCEEDED", "r1": "UNSPECIFIED"}
            await again.stub.ResumeOperation(fleet_pb2.ResumeOperationRequest(**by_id))
            assert (await again.ended(started.operation_id)).state == SUCCEEDED
    assert [len(fake.effects) for fake in fakes] == [1, 1]


async def test_a_further_address_of_a_replica_done_before_a_restart_is_not_called_after_it(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses:
        port = addresses[0].rpartition(":")[2]
        targets = [f"a={addresses[0]}", f"b=localhost:{port}"]
        spec = keep_reset(concurrency=1)
        async with coordinator(tmp_path, targets) as running:
            gate = asyncio.Event()

            async def wait(kind: str) -> None:
                if kind == "reset":
                    await gate.wait()

            fake.before = wait
            started = await running.start(spec)
            by_id = {"operation_id": started.operation_id}
            await until(lambda: bool(fake.requests))
            await running.stub.PauseOperation(fleet_pb2.PauseOperationRequest(**by_id))
            gate.set()
        async with coordinator(tmp_path, targets) as again:
            await again.stub.ResumeOperation(fleet_pb2.ResumeOperationRequest(**by_id))
            ended = await again.ended(started.operation_id)
    assert outcomes(ended) == {"a": "SUCCEEDED", "b": "SKIPPED"}
    assert len(fake.effects) == 1


# --- looking -----------------------------------------------------------------------------------------------------


async def test_a_watch_goes_on_after_the_version_seen_and_repeats_no_row(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(4)]
    async with serving(*fakes) as addresses, coordinator(tmp_path, named(addresses)) as running:
        started = await running.start(keep_reset(strategy=ROLLING))
        finals: list[str] = []
        seen = 0
        for _ in range(100):
            request = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id, after_version=seen)
            state = 0
            async for message in running.stub.WatchOperation(request):
                assert message.operation.version > seen
                seen, state = message.operation.version, message.operation.state
                finals += [row.replica for row in message.operation.results if row.outcome == 2]
                break  # the connection is lost after every message
            if state in ENDED:
                break
        request = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id, after_version=seen)
        assert [message async for message in running.stub.WatchOperation(request)] == []
        whole = fleet_pb2.WatchOperationRequest(operation_id=started.operation_id)
        everything = [message async for message in running.stub.WatchOperation(whole)]
    assert sorted(finals) == ["r0", "r1", "r2", "r3"]
    assert sum(len(message.operation.results) for message in everything) == 4


def test_large_operations_go_in_messages_that_fit_and_only_the_last_has_the_version() -> None:
    operation = fleet_pb2.FleetOperation(operation_id="x", version=9, state=SUCCEEDED)
    rows = [fleet_pb2.TargetResult(replica=f"r{i}") for i in range(450)]
    parts = list(in_messages(operation, rows))
    assert [len(part.results) for part in parts] == [200, 200, 50]
    assert [part.version for part in parts] == [0, 0, 9]
    assert [part.state in ENDED for part in parts] == [False, False, True]
    assert len(list(in_messages(operation, []))) == 1


def test_an_operation_too_large_for_one_message_keeps_every_row_and_says_what_is_missing() -> None:
    operation = fleet_pb2.FleetOperation()
    for index in range(1000):
        row = operation.results.add(replica=f"r{index}", outcome=fleet_pb2.TARGET_OUTCOME_SUCCEEDED)
        for rank in range(16):
            row.reset.engines.add(event_tiers=["x" * 300]).status.engine.data_parallel_rank = rank
    assert operation.ByteSize() > 4 * 1024 * 1024
    fitted = service.fitting(operation)
    assert fitted.ByteSize() < 4 * 1024 * 1024
    assert len(fitted.results) == 1000
    assert "too large" in fitted.warnings[0]


async def test_operations_come_in_pages_newest_first(tmp_path: Path) -> None:
    async with serving(FakeSidecar()) as addresses, coordinator(tmp_path, named(addresses)) as running:
        made = [(await running.run(keep_reset())).operation_id for _ in range(5)]
        seen: list[str] = []
        token = ""
        while True:
            request = fleet_pb2.ListOperationsRequest(page_size=2, page_token=token)
            page = await running.stub.ListOperations(request)
            assert all(not each.results and each.counts.total == 1 for each in page.operations)
            seen += [each.operation_id for each in page.operations]
            token = page.next_page_token
            if not token:
                break
        assert seen == made[::-1]
        bad = await failure_of(running.stub.ListOperations(fleet_pb2.ListOperationsRequest(page_token="%%%")))
        assert bad.violations[0].field == "page_token"
        bad = await failure_of(running.stub.ListOperations(fleet_pb2.ListOperationsRequest(page_size=-1)))
        assert bad.violations[0].field == "page_size"


async def test_a_list_of_operations_says_why_one_is_partial_also_after_a_restart(tmp_path: Path) -> None:
    good, bad = FakeSidecar("r0"), FakeSidecar("r1")
    bad.fail_with = [refused()]
    async with serving(good, bad) as addresses:
        for again in range(2):
            async with coordinator(tmp_path, named(addresses)) as running:
                if not again:
                    ended = await running.run(keep_reset())
                    assert ended.why == "1 of 2 failed: BLOCKS_HELD_BY_REQUESTS"
                [listed] = (await running.stub.ListOperations(fleet_pb2.ListOperationsRequest())).operations
                assert listed.why == "1 of 2 failed: BLOCKS_HELD_BY_REQUESTS"


async def test_replicas_and_admission_of_the_fleet_are_shown_with_those_out_of_reach(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    fakes[1].stalled = True
    async with serving(*fakes) as addresses:
        targets = [*named(addresses), "gone=127.0.0.1:1"]
        async with coordinator(tmp_path, targets) as running:
            listed = await running.stub.ListReplicas(fleet_pb2.ListReplicasRequest())
            assert [(row.name, row.reachable) for row in listed.replicas] == [
                ("gone", False),
                ("r0", True),
                ("r1", True),
            ]
            admission = await running.stub.FleetAdmission(fleet_pb2.FleetAdmissionRequest())
            assert admission.stalled
            assert {row.replica: row.code for row in admission.replicas} == {
                "gone": "UNAVAILABLE",
                "r0": "OK",
                "r1": "OK",
            }


async def test_an_admission_watch_follows_every_replica_and_ends_with_the_server(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{i}") for i in range(3)]
    async with serving(*fakes) as addresses, coordinator(tmp_path, named(addresses)) as running:
        request = fleet_pb2.WatchFleetAdmissionRequest(targets=fleet_pb2.Targets(all=True))
        request.interval.nanos = 200_000_000
        seen: set[str] = set()
        stream = running.stub.WatchFleetAdmission(request)

        async def follow() -> None:
            async for sample in stream:
                seen.add(sample.replica.replica)
                if len(seen) == 3 and not running.app._stop.is_set():
                    running.stop()

        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await follow()
        assert errors.parse(ended.value).reason == "SERVER_STOPPING"
    assert seen == {"r0", "r1", "r2"}


# --- refusing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        (lambda spec: spec.ClearField("reset"), "INVALID_FIELD", "spec"),
        (lambda spec: spec.ClearField("targets"), "INVALID_FIELD", "spec.targets"),
        (lambda spec: spec.targets.names.append("nobody"), "INVALID_SELECTOR", "spec.targets"),
        (lambda spec: spec.targets.CopyFrom(fleet_pb2.Targets(names=["nobody"])), "INVALID_SELECTOR", "spec.targets"),
        (lambda spec: spec.targets.CopyFrom(fleet_pb2.Targets(selector="a in")), "INVALID_SELECTOR", "spec.targets"),
        (lambda spec: setattr(spec.rollout, "canary", 2), "INVALID_COMBINATION", "spec.rollout.canary"),
        (lambda spec: setattr(spec.rollout, "concurrency", -1), "INVALID_FIELD", "spec.rollout.concurrency"),
        (lambda spec: setattr(spec.timeout, "seconds", -1), "INVALID_FIELD", "spec.timeout"),
        (lambda spec: setattr(spec.reset, "purpose", 2), "INVALID_COMBINATION", "spec.reset.quarantine_running"),
        (lambda spec: setattr(spec.reset, "wait_for_idle", True), "INVALID_COMBINATION", "spec.reset.wait_for_idle"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_by_field_and_not_remembered(
    tmp_path: Path, change: object, reason: str, field: str
) -> None:
    fake = FakeSidecar()
    spec = keep_reset()
    change(spec)  # type: ignore[operator]
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        refusal = await failure_of(running.start(spec))
        listed = await running.stub.ListOperations(fleet_pb2.ListOperationsRequest())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
    assert refusal.violations[0].field == field
    assert not listed.operations
    assert not fake.requests


async def test_an_unknown_operation_is_not_found_and_a_bad_id_is_invalid(tmp_path: Path) -> None:
    async with coordinator(tmp_path, ["r0=127.0.0.1:1"]) as running:
        unknown = await failure_of(running.get(str(uuid.uuid4())))
        assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "OPERATION_NOT_FOUND")
        for bad in ("", "nonsense"):
            assert (await failure_of(running.get(bad))).code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_corrupt_store_refuses_operations_and_still_shows_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "ops.db").write_bytes(b"no store" * 1000)
    fake = FakeSidecar()
    async with serving(fake) as addresses, coordinator(tmp_path, named(addresses)) as running:
        refusal = await failure_of(running.start(keep_reset()))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "STORE_FAILED")
        assert "corrupt" in refusal.message
        assert fake.effects == []
        assert (await running.stub.ListReplicas(fleet_pb2.ListReplicasRequest())).replicas[0].reachable
        assert (await running.stub.FleetAdmission(fleet_pb2.FleetAdmissionRequest())).replicas[0].code == "OK"
        status, body = await running.page("/metrics")
        assert "kvctl_coordinator_store_failed 1.0" in body
        assert status == 200


async def test_results_that_the_store_refuses_are_told_and_recorded_as_soon_as_it_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = asyncio.Event()
    full.set()

    def while_full(method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def refusing(*given: object, **named: object) -> None:
            if full.is_set():
                raise StoreError("the store cannot be written (disk is full); free space on that disk, then try again")
            await method(*given, **named)

        return refusing

    monkeypatch.setattr(running, "_FLUSH_EVERY_S", 0.05)
    monkeypatch.setattr(Store, "result", while_full(Store.result))
    monkeypatch.setattr(Store, "update", while_full(Store.update))
    fake = FakeSidecar()
    async with serving(fake) as addresses:
        async with coordinator(tmp_path, named(addresses)) as it:
            ended = await it.run(keep_reset())
            assert outcomes(ended) == {"r0": "SUCCEEDED"}
            assert any("in memory only" in warning for warning in ended.warnings)
            full.clear()
            await until(lambda: not len(it.app._running))
        async with coordinator(tmp_path, named(addresses)) as again:
            assert outcomes(await again.get(ended.operation_id)) == {"r0": "SUCCEEDED"}
    assert len(fake.effects) == 1


# --- health, metrics, access -------------------------------------------------------------------------------------


class LateDiscovery:
    """Answers nothing until it is told whom to name."""

    def __init__(self) -> None:
        self.found: tuple[Target, ...] = ()

    async def targets(self) -> Discovered:
        if not self.found:
            raise DiscoveryError("nobody answers for vllm.example")
        return Discovered(self.found)

    def describe(self) -> str:
        return "a test"


async def test_health_is_not_serving_until_discovery_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = LateDiscovery()
    monkeypatch.setattr(app, "discovery_of", lambda *_: discovery)
    async with serving(FakeSidecar()) as addresses, coordinator(tmp_path, ["dns:///vllm.example:1"]) as running:
        health = health_pb2_grpc.HealthStub(running.channel)
        check = health_pb2.HealthCheckRequest(service=service.SERVICE)
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status, body = await running.page("/readyz")
        assert status == 503
        assert "vllm.example" in body
        refusal = await failure_of(running.start(keep_reset()))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DISCOVERY_FAILED")
        discovery.found = (Target(addresses[0], "r0"),)
        async with asyncio.timeout(60):
            async for answer in health.Watch(check):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        assert (await running.page("/readyz"))[0] == 200
        assert (await running.run(keep_reset())).state == SUCCEEDED


async def test_an_inventory_that_goes_away_is_a_warning_and_the_list_read_last_is_kept(tmp_path: Path) -> None:
    inventory = tmp_path / "fleet.yaml"
    async with serving(FakeSidecar()) as addresses:
        inventory.write_text(f"replicas: [{{name: r0, address: '{addresses[0]}'}}]")
        async with coordinator(tmp_path, [], "--inventory", str(inventory)) as running:
            assert (await running.run(keep_reset())).state == SUCCEEDED
            inventory.unlink()
            ended = await running.run(keep_reset())
    assert outcomes(ended) == {"r0": "SUCCEEDED"}
    assert ended.state == fleet_pb2.OPERATION_STATE_PARTIAL, "there may be replicas that the lost file would name"
    assert any(str(inventory) in warning and "list read before" in warning for warning in ended.warnings)


async def test_metrics_count_results_and_replicas_without_request_ids(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    fakes[1].fail_with = [refused()]
    async with serving(*fakes) as addresses, coordinator(tmp_path, [*named(addresses), "g=127.0.0.1:1"]) as running:
        ended = await running.run(keep_reset())
        ready = running.app._metrics.replicas.labels("ready")
        await until(lambda: ready._value.get() == 2)
        _, body = await running.page("/metrics")
    for result, number in (("succeeded", 1), ("failed", 1), ("unreachable", 1), ("unknown", 0)):
        series = f'kvctl_coordinator_replica_results_total{{operation="reset",result="{result}"}} {number}.0'
        assert series in body
    assert 'kvctl_coordinator_replicas{state="unreachable"} 1.0' in body
    assert 'kvctl_coordinator_operations_total{operation="reset",state="partial"} 1.0' in body
    assert re.search(r"kvctl_coordinator_retries_total [1-9]", body)
    assert ended.operation_id not in body


def test_every_method_has_an_access_rule() -> None:
    methods = fleet_pb2.DESCRIPTOR.services_by_name["FleetAdmin"].methods
    assert {f"/{service.SERVICE}/{method.name}" for method in methods} == set(service.RULES)


@pytest.mark.parametrize(("role", "may_reset", "may_pause"), [("viewer", 0, 0), ("operator", 1, 0), ("admin", 1, 1)])
async def test_roles_decide_who_may_start_what(tmp_path: Path, role: str, may_reset: int, may_pause: int) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-token\n")
    pause = fleet_pb2.OperationSpec(targets=fleet_pb2.Targets(all=True))
    pause.pause.lease.seconds = 5
    async with (
        serving(FakeSidecar()) as addresses,
        coordinator(
            tmp_path,
            named(addresses),
            "--token-file",
            f"{role}={token}",
            security=ClientSecurity(token_file=token),
        ) as running,
    ):
        bearer = (("authorization", "Bearer s3cret-token"),)
        for spec, may in ((keep_reset(), may_reset), (pause, may_pause)):
            request = fleet_pb2.StartOperationRequest(spec=spec)
            if may:
                await running.stub.StartOperation(request, metadata=bearer)
                continue
            denied = await failure_of(running.stub.StartOperation(request, metadata=bearer))
            assert (denied.code, denied.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_TOO_SMALL")
        listed = await running.stub.ListOperations(fleet_pb2.ListOperationsRequest(), metadata=bearer)
        assert len(listed.operations) == may_reset + may_pause
        unknown = await failure_of(running.stub.ListOperations(fleet_pb2.ListOperationsRequest()))
        assert unknown.code == grpc.StatusCode.UNAUTHENTICATED
