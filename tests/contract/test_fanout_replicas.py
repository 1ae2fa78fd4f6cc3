"""The fan-out against sidecars behind real gRPC: one result a target, whatever is at its address."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio
import pytest
from fake_sidecar_server import FakeSidecar, refused, serving
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.cli import exitcodes
from sidecar.client.errors import OutcomeUnknown
from sidecar.client.results import fleet_result
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery.static import StaticDiscovery
from sidecar.coordinator.fanout import Run
from sidecar.coordinator.selectors import SelectorError
from sidecar.coordinator.targets import Discovered, Target, derive_request_id
from sidecar.rpc.errors import failure


def reset_spec(timeout_s: float = 30.0, **targets: object) -> fleet_pb2.OperationSpec:
    request = replica_pb2.ResetPrefixCacheRequest(running_requests=types_pb2.RUNNING_REQUESTS_KEEP)
    spec = fleet_pb2.OperationSpec(reset=request, targets=fleet_pb2.Targets(**(targets or {"all": True})))
    spec.timeout.FromMilliseconds(int(timeout_s * 1000))
    return spec


async def run(
    targets: list[Target], spec: fleet_pb2.OperationSpec | None = None, operation_id: str = "", limit: int = 512
) -> fleet_pb2.FleetOperation:
    channels = Channels(limit=limit)
    try:
        return await Run(spec or reset_spec(), StaticDiscovery(targets), channels, operation_id=operation_id).run()
    finally:
        await channels.close()


def by_name(operation: fleet_pb2.FleetOperation) -> dict[str, fleet_pb2.TargetResult]:
    return {row.replica: row for row in operation.results}


@asynccontextmanager
async def black_hole() -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """An address where connections are taken and nothing ever answers, and what breaks them all."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}", listener.close


@contextmanager
def web_server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_every_replica_has_one_effect_and_one_row_with_a_derived_request_id() -> None:
    fakes = [FakeSidecar(f"r{number}") for number in range(3)]
    operation_id = str(uuid.uuid4())
    async with serving(*fakes) as addresses:
        operation = await run([Target(address) for address in addresses], operation_id=operation_id)
    assert operation.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert [row.replica for row in operation.results] == ["r0", "r1", "r2"]
    for fake, row in zip(fakes, operation.results, strict=True):
        assert fake.effects == [derive_request_id(operation_id, fake.name)] == [row.request_id]
        assert row.reset.engines[0].cached_blocks_dropped == 812
    assert (operation.counts.total, operation.counts.succeeded) == (3, 3)


async def test_repeating_an_operation_id_has_no_second_effect() -> None:
    fake = FakeSidecar("r0")
    operation_id = str(uuid.uuid4())
    async with serving(fake) as [address]:
        for _ in range(3):
            await run([Target(address)], operation_id=operation_id)
    assert len(fake.effects) == 1


async def test_a_refusal_is_a_failed_row_that_keeps_the_typed_result() -> None:
    good, bad = FakeSidecar("good"), FakeSidecar("bad")
    bad.fail_with = [refused()]
    async with serving(good, bad) as addresses:
        operation = await run([Target(address) for address in addresses])
    row = by_name(operation)["bad"]
    assert (row.outcome, row.code) == (fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION")
    assert row.reason == "BLOCKS_HELD_BY_REQUESTS"
    assert row.reset.engines[0].prefix_cache.state == types_pb2.TIER_STATE_REFUSED
    assert operation.state == fleet_pb2.OPERATION_STATE_PARTIAL


async def test_a_black_holed_replica_delays_nobody() -> None:
    ended: list[str] = []
    fakes = [FakeSidecar(f"r{number}") for number in range(20)]
    async with serving(*fakes) as addresses, black_hole() as (hole, give_up):
        targets = [Target(address, name=f"r{n}") for n, address in enumerate(addresses)]
        targets.insert(0, Target(hole, name="hole"))
        channels = Channels(limit=512)

        def note(row: fleet_pb2.TargetResult) -> None:
            if row.outcome != fleet_pb2.TARGET_OUTCOME_RUNNING:
                ended.append(row.replica)
            if len(ended) == len(fakes):
                give_up()

        operation = await Run(reset_spec(60.0), StaticDiscovery(targets), channels, on_change=note).run()
        await channels.close()
    row = by_name(operation)["hole"]
    assert row.outcome == fleet_pb2.TARGET_OUTCOME_UNREACHABLE
    assert row.execution == types_pb2.EXECUTION_NOT_EXECUTED
    assert operation.counts.succeeded == 20
    assert ended[-1] == "hole", "all others ended while it was silent"


async def test_a_black_holed_replica_costs_the_time_limit_of_its_operation_and_no_more() -> None:
    async with black_hole() as (hole, _):
        operation = await run([Target(hole, name="hole")], reset_spec(1.0))
    row = operation.results[0]
    assert (row.outcome, row.execution) == (
        fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
        types_pb2.EXECUTION_NOT_EXECUTED,
    )
    assert "no answer" in row.message


async def test_two_addresses_of_one_replica_are_called_once_and_still_count_as_all() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        port = address.rpartition(":")[2]
        operation = await run([Target(address), Target(f"localhost:{port}")])
    assert len(fake.effects) == 1
    skipped = [row for row in operation.results if row.outcome == fleet_pb2.TARGET_OUTCOME_SKIPPED]
    assert [row.reason for row in skipped] == ["DUPLICATE_TARGET"]
    assert operation.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert operation.warnings


async def test_two_named_addresses_of_one_replica_are_found_out_at_the_call() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        port = address.rpartition(":")[2]
        operation = await run([Target(address, name="a"), Target(f"localhost:{port}", name="b")])
    assert len(fake.effects) == 1
    assert sorted(row.outcome for row in operation.results) == [
        fleet_pb2.TARGET_OUTCOME_SUCCEEDED,
        fleet_pb2.TARGET_OUTCOME_SKIPPED,
    ]


async def test_one_address_under_two_names_is_called_once_and_the_other_name_says_why() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        operation = await run([Target(address, name="a"), Target(address, name="b")])
    assert len(fake.effects) == 1
    rows = by_name(operation)
    assert rows["a"].outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
    assert (rows["b"].outcome, rows["b"].reason) == (fleet_pb2.TARGET_OUTCOME_SKIPPED, "DUPLICATE_TARGET")
    assert "b and a are one replica" in rows["b"].message
    assert operation.state == fleet_pb2.OPERATION_STATE_SUCCEEDED


async def test_an_operation_repeated_under_another_name_of_the_replica_has_no_second_effect() -> None:
    fake = FakeSidecar("r0")
    operation_id = str(uuid.uuid4())
    async with serving(fake) as [address]:
        for name in ("a", "b", ""):
            repeated = await run([Target(address, name=name)], operation_id=operation_id)
            assert repeated.results[0].request_id == derive_request_id(operation_id, "r0")
    assert len(fake.effects) == 1


async def test_a_replica_that_calls_itself_otherwise_is_told_with_both_names() -> None:
    fakes = [FakeSidecar(f"own-{number}") for number in range(5)]
    async with serving(*fakes) as addresses:
        listed = [Target(address, name=f"r{number}") for number, address in enumerate(addresses)]
        (warning,) = (await run(listed)).warnings
        alike = [Target(addresses[0], name="own-0"), Target(addresses[1]), Target(addresses[2], "pod", identity="uid")]
        assert (await run(alike)).warnings == []
    told = "r0 calls itself own-0, r1 calls itself own-1, r2 calls itself own-2 and 2 more do so: "
    assert warning.startswith(told)
    assert "--name" in warning


async def test_replicas_that_share_a_name_are_not_told_to_have_another() -> None:
    fakes = [FakeSidecar("host"), FakeSidecar("host")]
    async with serving(*fakes) as addresses:
        (warning,) = (await run([Target(address) for address in addresses])).warnings
    assert "several replicas call themselves host" in warning


@pytest.mark.parametrize("rolling", [False, True])
async def test_targets_given_up_after_too_many_failures_have_their_one_result(rolling: bool) -> None:
    fakes = [FakeSidecar(f"r{number}") for number in range(5)]
    for bad in fakes[1:3]:
        bad.fail_with = [refused()]
    spec = reset_spec()
    spec.rollout.max_failures, spec.rollout.concurrency = 2, 1
    if rolling:
        spec.rollout.strategy = fleet_pb2.ROLLOUT_STRATEGY_ROLLING
    async with serving(*fakes) as addresses:
        operation = await run([Target(address) for address in addresses], spec)
    outcomes = [fleet_pb2.TargetOutcome.Name(row.outcome).removeprefix("TARGET_OUTCOME_") for row in operation.results]
    assert [row.replica for row in operation.results] == ["r0", "r1", "r2", "r3", "r4"]
    assert outcomes == ["SUCCEEDED", "FAILED", "FAILED", "SKIPPED", "SKIPPED"]
    assert {row.reason for row in operation.results[3:]} == {"ROLLOUT_STOPPED"}
    assert all("after 2 failed target(s), the last one r2" in row.message for row in operation.results[3:])
    counts = operation.counts
    assert (counts.total, counts.succeeded, counts.failed, counts.skipped) == (5, 1, 2, 2)
    assert operation.state == fleet_pb2.OPERATION_STATE_PARTIAL
    assert [len(fake.effects) for fake in fakes] == [1, 0, 0, 0, 0]


async def test_a_web_server_is_told_apart_from_a_sidecar() -> None:
    with web_server() as address:
        operation = await run([Target(address, name="vllm")])
    row = operation.results[0]
    assert (row.outcome, row.reason) == (fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "NOT_A_SIDECAR")
    assert "HTTP/1" in row.message


async def test_another_grpc_server_is_told_apart_from_a_sidecar() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    operation = await run([Target(f"127.0.0.1:{port}", name="other")])
    await server.stop(None)
    assert operation.results[0].reason == "NOT_A_SIDECAR"


async def test_a_load_balancer_is_found_out_and_nothing_is_called_through_it() -> None:
    fake = FakeSidecar("r0")
    fake.rotate_identity = True
    async with serving(fake) as [address]:
        operation = await run([Target(address, name="balanced")])
    assert operation.results[0].reason == "NOT_A_SIDECAR"
    assert "load balancer" in operation.results[0].message
    assert fake.effects == []


async def test_a_load_balancer_of_sidecars_that_refuse_each_others_calls_is_found_out_too() -> None:
    fake = FakeSidecar("r0")
    fake.rotate_identity = fake.tells_instance = True
    async with serving(fake) as [address]:
        operation = await run([Target(address, name="balanced")])
    assert operation.results[0].reason == "NOT_A_SIDECAR"
    assert "load balancer" in operation.results[0].message
    assert fake.effects == []


async def test_a_sidecar_that_refuses_what_is_meant_for_another_is_asked_once_who_it_is() -> None:
    fake = FakeSidecar("r0")
    fake.tells_instance = True
    async with serving(fake) as [address]:
        operation = await run([Target(address, name="r0")])
    assert operation.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert (len(fake.effects), fake.identity_calls) == (1, 1)


async def test_nobody_listening_is_unreachable_and_was_not_executed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    operation = await run([Target(f"127.0.0.1:{port}")])
    row = operation.results[0]
    assert (row.outcome, row.code) == (fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "UNAVAILABLE")
    assert "connection refused" in row.message
    assert row.execution == types_pb2.EXECUTION_NOT_EXECUTED


async def test_a_lost_answer_is_asked_for_and_not_called_again() -> None:
    fake = FakeSidecar("r0")
    fake.lose_answers = True
    async with serving(fake) as [address]:
        operation = await run([Target(address)])
    assert len(fake.effects) == 1
    assert operation.results[0].outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED


@pytest.mark.parametrize("other", [0, 4])
async def test_a_replica_of_which_one_rank_did_it_is_not_one_where_nothing_was_executed(other: int) -> None:
    fake = FakeSidecar("r0", engines=2)
    result = replica_pb2.ResetPrefixCacheResponse()
    result.engines.add().status.code = 4
    result.engines.add().status.code = other
    text = "engine 0: the deadline passed before it began"
    fake.fail_with = [failure(grpc.StatusCode.DEADLINE_EXCEEDED, "NOT_EXECUTED", text, result=result)]
    async with serving(fake) as [address]:
        operation = await run([Target(address)])
    [row] = operation.results
    nothing = row.execution == types_pb2.EXECUTION_NOT_EXECUTED
    assert (row.outcome, nothing) == (fleet_pb2.TARGET_OUTCOME_FAILED, other != 0)


async def test_what_an_engine_accepted_and_never_confirmed_is_unknown_and_asked_for_no_more() -> None:
    fake = FakeSidecar("r0")
    text = "engine 0: vLLM's route answers 200 without looking whether the cache was cleared"
    fake.fail_with = [failure(grpc.StatusCode.UNKNOWN, "UNCONFIRMED", text)]
    async with serving(fake) as [address]:
        operation = await run([Target(address)])
    [row] = operation.results
    assert (row.outcome, row.reason, row.attempts) == (fleet_pb2.TARGET_OUTCOME_UNKNOWN, "UNCONFIRMED", 1)
    assert row.execution == types_pb2.EXECUTION_UNKNOWN
    assert exitcodes.of_operation(operation) == exitcodes.Exit.UNKNOWN
    [failed] = fleet_result(operation).failures
    assert isinstance(failed, OutcomeUnknown)


async def test_an_unanswered_call_is_unknown_and_never_failed() -> None:
    fake = FakeSidecar("r0")
    fake.lose_calls = True
    fake.record = _Unaskable()
    async with serving(fake) as [address]:
        operation = await run([Target(address)])
    row = operation.results[0]
    assert row.outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN
    assert row.execution == types_pb2.EXECUTION_UNKNOWN
    assert operation.state == fleet_pb2.OPERATION_STATE_FAILED


class _Unaskable(dict):  # type: ignore[type-arg]
    def get(self, *_: object) -> None:
        raise RuntimeError("the record cannot be read")


async def test_three_hundred_failures_with_long_foreign_texts_are_three_hundred_rows() -> None:
    text = "ブロックが解放されていません。" * 20
    fakes = [FakeSidecar(f"r{number:03}") for number in range(300)]
    for fake in fakes:
        fake.fail_with = [failure(grpc.StatusCode.FAILED_PRECONDITION, "BLOCKS_HELD_BY_REQUESTS", text)]
    async with serving(*fakes) as addresses:
        operation = await run([Target(a, name=f"r{n:03}") for n, a in enumerate(addresses)], reset_spec(30.0))
    assert operation.counts.total == operation.counts.failed == 300
    assert {row.code for row in operation.results} == {"FAILED_PRECONDITION"}
    assert all(row.message.startswith("ブロック") for row in operation.results)


async def test_an_incomplete_set_of_targets_is_never_all_succeeded() -> None:
    class Partial:
        async def targets(self) -> Discovered:
            return Discovered((Target(address),), incomplete=True, warnings=("AAAA records could not be asked for",))

        def describe(self) -> str:
            return "a test"

    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        channels = Channels(limit=16)
        operation = await Run(reset_spec(), Partial(), channels).run()
        await channels.close()
    assert operation.results[0].outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED
    assert operation.state == fleet_pb2.OPERATION_STATE_PARTIAL
    assert "AAAA records could not be asked for" in operation.warnings


async def test_a_target_that_is_not_ready_is_shown_and_not_called() -> None:
    fake, leaving = FakeSidecar("r0"), FakeSidecar("r1")
    async with serving(fake, leaving) as addresses:
        targets = [Target(addresses[0]), Target(addresses[1], name="r1", not_ready="terminating")]
        operation = await run(targets)
    row = by_name(operation)["r1"]
    assert (row.outcome, row.reason) == (fleet_pb2.TARGET_OUTCOME_SKIPPED, "TARGET_NOT_READY")
    assert leaving.effects == []
    assert operation.state == fleet_pb2.OPERATION_STATE_PARTIAL


async def test_a_dry_run_reaches_every_replica_and_changes_none() -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    spec = reset_spec()
    spec.validate_only = True
    async with serving(*fakes) as addresses:
        operation = await run([Target(address) for address in addresses], spec)
    assert operation.state == fleet_pb2.OPERATION_STATE_SUCCEEDED
    assert [fake.effects for fake in fakes] == [[], []]
    assert all(fake.requests[0].validate_only for fake in fakes)  # type: ignore[attr-defined]


async def test_replicas_are_selected_by_their_own_labels_when_discovery_has_none() -> None:
    fakes = [FakeSidecar("r0", {"pool": "a"}), FakeSidecar("r1", {"pool": "b"})]
    async with serving(*fakes) as addresses:
        operation = await run([Target(address) for address in addresses], reset_spec(selector="pool=a"))
    assert [row.replica for row in operation.results] == ["r0"]
    assert fakes[1].effects == []


async def test_an_unknown_name_stops_everything_before_anything_is_called() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        with pytest.raises(SelectorError, match=r"r9.*known: r0"):
            await run([Target(address)], reset_spec(names=["r0", "r9"]))
    assert fake.effects == []


async def test_a_replica_whose_labels_cannot_be_asked_makes_the_set_incomplete() -> None:
    fake = FakeSidecar("r0", {"pool": "a"})
    async with serving(fake) as [address]:
        operation = await run([Target(address), Target("127.0.0.1:1")], reset_spec(selector="pool=a"))
    assert operation.targets_incomplete
    assert operation.state == fleet_pb2.OPERATION_STATE_PARTIAL
    assert "127.0.0.1:1" in operation.warnings[0]


async def test_more_replicas_than_channels_all_get_called() -> None:
    fakes = [FakeSidecar(f"r{number}") for number in range(60)]
    async with serving(*fakes) as addresses:
        channels = Channels(limit=16)
        targets = [Target(address, name=f"r{n}") for n, address in enumerate(addresses)]
        operation = await Run(reset_spec(30.0), StaticDiscovery(targets), channels).run()
        assert len(channels) <= 16
        await channels.close()
    assert operation.counts.succeeded == 60


async def test_a_proxy_in_the_environment_captures_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeSidecar("r0")
    async with serving(fake) as [address]:
        operation = await run([Target(address.replace("127.0.0.1", "localhost"))])
    assert operation.state == fleet_pb2.OPERATION_STATE_SUCCEEDED, operation


async def test_cancelling_starts_nothing_more_and_withdraws_what_is_under_way() -> None:
    slow, waiting = FakeSidecar("r0"), FakeSidecar("r1")
    started, released = asyncio.Event(), asyncio.Event()

    async def hold(kind: str) -> None:
        started.set()
        await released.wait()

    slow.before = hold
    spec = reset_spec(10.0)
    spec.rollout.concurrency = 1
    async with serving(slow, waiting) as addresses:
        channels = Channels(limit=16)
        targets = [Target(address, name=f"r{n}") for n, address in enumerate(addresses)]
        run_ = Run(spec, StaticDiscovery(targets), channels)
        task = asyncio.create_task(run_.run())
        await started.wait()
        await run_.cancel()
        released.set()
        operation = await task
        await channels.close()
    assert by_name(operation)["r1"].outcome == fleet_pb2.TARGET_OUTCOME_CANCELLED
    assert waiting.effects == []
    assert slow.cancelled == [derive_request_id(run_.operation_id, "r0")]
    assert operation.state == fleet_pb2.OPERATION_STATE_CANCELLED


async def test_cancelling_a_pause_withdraws_no_pause_that_may_hold_which_would_leave_it_abandoned() -> None:
    fake = FakeSidecar("r0")
    holds = asyncio.Event()
    fake.forget_answers = True
    did = fake._did

    def note(kind: str, request_id: str, answer: object) -> None:
        did(kind, request_id, answer)
        holds.set()

    fake._did = note  # type: ignore[method-assign]
    spec = fleet_pb2.OperationSpec(pause=replica_pb2.PauseSchedulingRequest(), targets=fleet_pb2.Targets(all=True))
    spec.timeout.seconds = 2
    async with serving(fake) as [address]:
        channels = Channels(limit=16)
        run_ = Run(spec, StaticDiscovery([Target(address, name="r0")]), channels)
        task = asyncio.create_task(run_.run())
        await asyncio.wait_for(holds.wait(), 60)
        await run_.cancel()
        operation = await task
        await channels.close()
    assert fake.cancelled == []
    assert len(fake.leases) == 1
    assert by_name(operation)["r0"].outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED  # asked for after its answer was lost


async def test_every_option_of_a_reset_reaches_the_replica() -> None:
    fake = FakeSidecar("r0")
    wanted = replica_pb2.ResetPrefixCacheRequest(
        running_requests=types_pb2.RUNNING_REQUESTS_FAIL, purpose=types_pb2.PURPOSE_BENCHMARK
    )
    switches = [f.name for f in wanted.DESCRIPTOR.fields if f.type == f.TYPE_BOOL and f.name != "validate_only"]
    for name in switches:
        setattr(wanted, name, True)
    spec = fleet_pb2.OperationSpec(reset=wanted, targets=fleet_pb2.Targets(all=True))
    async with serving(fake) as [address]:
        await run([Target(address)], spec)
    got = replica_pb2.ResetPrefixCacheRequest()
    got.CopyFrom(fake.requests[0])  # type: ignore[arg-type]
    got.request_id = ""
    assert got == wanted
