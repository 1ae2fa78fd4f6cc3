"""Every row of the error contract, through a real sidecar process, real gRPC and a real engine socket."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.rpc import errors
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess

FAIL, PREEMPT, KEEP = types.RUNNING_REQUESTS_FAIL, types.RUNNING_REQUESTS_PREEMPT, types.RUNNING_REQUESTS_KEEP
Code = grpc.StatusCode


class Replica:
    """One engine and its sidecar."""

    def __init__(self, engine: EngineProcess, sidecar: SidecarProcess, stub) -> None:
        self.engine = engine
        self.sidecar = sidecar
        self.stub = stub

    def reset(self, timeout: float = 30, **fields) -> api.ResetPrefixCacheResponse:
        return self.stub.ResetPrefixCache(api.ResetPrefixCacheRequest(**fields), timeout=timeout)

    def reorder(self, scope, timeout: float = 30) -> api.ReorderFreeQueueResponse:
        return self.stub.ReorderFreeQueue(api.ReorderFreeQueueRequest(scope=scope), timeout=timeout)


@contextmanager
def failing() -> Iterator[list[errors.Failure]]:
    """The failure of the call inside; fails when there is none."""
    caught: list[errors.Failure] = []
    with pytest.raises(grpc.RpcError) as raised:
        yield caught
    caught.append(errors.parse(raised.value))
    assert caught[0].reason in errors.REASONS
    assert caught[0].message


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Replica]:
    directory = tmp_path_factory.mktemp("engines")
    engine = EngineProcess(directory, "--connector", "true")
    sidecar = SidecarProcess(directory, tmp_path_factory.mktemp("sidecar"))
    try:
        sidecar.wait_ready()
        with sidecar.stub() as stub:
            yield Replica(engine, sidecar, stub)
    finally:
        sidecar.end()
        engine.end()


@pytest.fixture
def replica(shared: Replica) -> Iterator[Replica]:
    yield shared
    shared.engine.do("release")
    shared.engine.do("connector", answer="true")
    for method in ("drop_prefix_cache", "reset_connector"):
        shared.engine.do("raise_in", method=method, message="")


# --- INVALID_ARGUMENT --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"running_requests": 77}, "running_requests", "INVALID_FIELD"),
        ({"purpose": 9}, "purpose", "INVALID_FIELD"),
        ({"request_id": "not-a-uuid"}, "request_id", "INVALID_FIELD"),
        ({"running_requests": KEEP, "wait_for_idle": True}, "wait_for_idle", "INVALID_COMBINATION"),
        ({"running_requests": PREEMPT, "wait_for_idle": True}, "wait_for_idle", "INVALID_COMBINATION"),
        ({"running_requests": FAIL, "quarantine_running": True}, "quarantine_running", "INVALID_COMBINATION"),
        ({"quarantine_running": True}, "quarantine_running", "INVALID_COMBINATION"),
        (
            {"running_requests": KEEP, "purpose": types.PURPOSE_WEIGHT_UPDATE},
            "quarantine_running",
            "INVALID_COMBINATION",
        ),
    ],
)
def test_a_wrong_request_names_its_fields(replica, fields, field, reason):
    with failing() as caught:
        replica.reset(**fields)
    (error,) = caught
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, reason)
    assert [violation.field for violation in error.violations] == [field]


def test_all_wrong_fields_are_named_together(replica):
    with failing() as caught:
        replica.reset(running_requests=50, purpose=50, request_id="x", wait_for_idle=True)
    assert {v.field for v in caught[0].violations} == {"running_requests", "purpose", "request_id", "wait_for_idle"}


@pytest.mark.parametrize("seconds", [0, 0.5, 601])
def test_a_lease_outside_its_range_is_refused(replica, seconds):
    request = api.PauseSchedulingRequest()
    request.lease.FromNanoseconds(int(seconds * 1e9))
    with failing() as caught:
        replica.stub.PauseScheduling(request, timeout=30)
    assert [v.field for v in caught[0].violations] == ["lease"]


# --- FAILED_PRECONDITION -----------------------------------------------------------------------------------------


def test_a_refused_reset_is_an_error_that_names_blocks_and_requests(replica):
    replica.engine.do("hold", requests=3, blocks=2)
    replica.engine.do("hold_waiting", blocks=1)
    with failing() as caught:
        replica.reset(running_requests=FAIL)
    (error,) = caught
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "BLOCKS_HELD_BY_REQUESTS")
    assert error.retry_after is not None
    assert "7 blocks" in error.message
    assert "3 running and 1 waiting" in error.message
    assert [p.subject for p in error.preconditions] == ["engine 0"]
    assert isinstance(error.result, api.ResetPrefixCacheResponse)
    (engine,) = error.result.engines
    assert engine.prefix_cache.state == types.TIER_STATE_REFUSED
    assert (engine.holders.held_blocks, engine.holders.running_requests) == (7, 3)


def test_blocks_held_by_transfers_are_not_blamed_on_requests(replica):
    replica.engine.do("hold_transfer", blocks=2)
    with failing() as caught:
        replica.reset(running_requests=FAIL)
    assert caught[0].reason == "BLOCKS_HELD_BY_TRANSFERS"
    assert "wait for them" not in caught[0].message


def test_an_idle_reorder_is_refused_while_blocks_are_held(replica):
    replica.engine.do("hold")
    with failing() as caught:
        replica.reorder(types.REORDER_SCOPE_IDLE)
    assert caught[0].code is Code.FAILED_PRECONDITION
    assert caught[0].retry_after is not None


def test_a_preempt_with_remote_loads_in_flight_is_refused_before_anything_is_preempted(replica):
    replica.engine.do("hold", requests=2)
    replica.engine.do("hold_waiting", state="loading", blocks=3)
    before = replica.engine.do("state")["preemptions"]
    with failing() as caught:
        replica.reset(running_requests=PREEMPT)
    assert (caught[0].code, caught[0].reason) == (Code.FAILED_PRECONDITION, "REMOTE_LOADS_IN_FLIGHT")
    assert replica.engine.do("state")["preemptions"] == before


def test_a_reset_refused_under_a_pause_explains_the_pause_and_a_preempt_works(replica):
    replica.engine.do("hold")
    replica.engine.do("pause")
    try:
        with failing() as caught:
            replica.reset(running_requests=FAIL)
        assert caught[0].reason == "HELD_WHILE_PAUSED"
        assert "paused" in caught[0].message
        assert replica.reset(running_requests=PREEMPT).engines[0].requests_preempted == 1
    finally:
        replica.engine.do("unpause")


def test_a_connector_that_still_moves_data_is_pending_and_the_local_result_is_apart(replica):
    replica.engine.do("connector", answer="false")
    with failing() as caught:
        replica.reset(running_requests=KEEP, reset_connector=True)
    (error,) = caught
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "CONNECTOR_BUSY")
    assert error.retry_after is not None
    (engine,) = error.result.engines
    assert engine.prefix_cache.state == types.TIER_STATE_DONE
    assert engine.connector.state == types.TIER_STATE_PENDING


# --- ABORTED -----------------------------------------------------------------------------------------------------


@contextmanager
def armed_reset(replica: Replica, timeout: float = 4) -> Iterator[str]:
    """A reset that waits for an idle moment while the body runs; released at the end."""
    replica.engine.do("hold")
    request_id = str(uuid.uuid4())
    results: list[object] = []

    def call() -> None:
        try:
            results.append(replica.reset(timeout, request_id=request_id, wait_for_idle=True))
        except grpc.RpcError as error:
            results.append(errors.parse(error))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        wait_until(lambda: any(line["request_id"] == request_id for line in replica.sidecar.audit()), 30)
        yield request_id
    finally:
        replica.engine.do("release")
        thread.join(timeout + 2)
    assert results
    assert not thread.is_alive()


def test_a_second_operation_is_aborted_with_the_id_of_the_first(replica):
    with armed_reset(replica) as request_id, failing() as caught:
        replica.reset(running_requests=KEEP)
    (error,) = caught
    assert (error.code, error.reason) == (Code.ABORTED, "OPERATION_IN_PROGRESS")
    assert error.metadata["other_request_id"] == request_id
    assert request_id in error.message


def test_a_request_id_with_other_arguments_is_aborted(replica):
    request_id = str(uuid.uuid4())
    replica.reset(running_requests=KEEP, request_id=request_id)
    with failing() as caught:
        replica.reset(running_requests=PREEMPT, request_id=request_id)
    assert (caught[0].code, caught[0].reason) == (Code.ABORTED, "REQUEST_ID_REUSED")


# --- UNIMPLEMENTED -----------------------------------------------------------------------------------------------


def test_a_capability_the_engine_lacks_is_named_with_its_reason(replica):
    replica.engine.do("capability", name="reset.keep", reason="this vLLM has no BlockHashToBlockMap")
    try:
        with failing() as caught:
            replica.reset(running_requests=KEEP)
    finally:
        replica.engine.do("capability", name="reset.keep")
    assert (caught[0].code, caught[0].reason) == (Code.UNIMPLEMENTED, "ENGINE_LACKS_CAPABILITY")
    assert "BlockHashToBlockMap" in caught[0].message


def test_a_connector_that_answers_none_is_unsupported_never_done(replica):
    replica.engine.do("connector", answer="none")
    with failing() as caught:
        replica.reset(running_requests=KEEP, reset_connector=True)
    assert caught[0].code is Code.UNIMPLEMENTED
    (engine,) = caught[0].result.engines
    assert engine.connector.state == types.TIER_STATE_UNSUPPORTED
    assert engine.prefix_cache.state == types.TIER_STATE_DONE


def test_a_method_that_does_not_exist_has_details_too(replica):
    with replica.sidecar.channel() as channel, failing() as caught:
        channel.unary_unary("/kvctl.v1.CacheAdmin/NotYet")(b"", timeout=30)
    assert (caught[0].code, caught[0].reason) == (Code.UNIMPLEMENTED, "METHOD_NOT_SERVED")
    assert "one version" in caught[0].message


def test_the_fleet_service_is_not_mistaken_for_ours(replica):
    with replica.sidecar.channel() as channel, failing() as caught:
        channel.unary_unary("/kvctl.v1.FleetAdmin/ListReplicas")(b"", timeout=30)
    assert caught[0].reason == "METHOD_NOT_SERVED"


# --- DEADLINE_EXCEEDED -------------------------------------------------------------------------------------------


def test_an_armed_reset_that_meets_no_idle_moment_is_withdrawn_at_the_deadline(replica):
    replica.engine.do("hold")
    for _ in range(8):  # on a busy machine its caller may give up first, and then says nothing of the execution
        with failing() as caught:
            replica.reset(0.8, wait_for_idle=True)
        if "execution" in caught[0].metadata:
            break
    assert (caught[0].code, caught[0].reason) == (Code.DEADLINE_EXCEEDED, "NEVER_IDLE")
    assert caught[0].metadata["execution"] == "NOT_EXECUTED"


def test_an_armed_reset_fires_at_the_first_idle_moment(replica):
    with armed_reset(replica) as request_id:
        pass
    found = replica.stub.GetOperation(api.GetOperationRequest(request_id=request_id), timeout=30)
    assert found.finished
    assert found.code == 0
    assert found.reset.engines[0].prefix_cache.state == types.TIER_STATE_DONE


# --- INTERNAL ----------------------------------------------------------------------------------------------------


def test_an_operation_that_raises_is_internal_and_the_engine_goes_on(replica):
    replica.engine.do("raise_in", method="drop_prefix_cache", message="assert primary_hash is not None")
    with failing() as caught:
        replica.reset(running_requests=KEEP)
    assert (caught[0].code, caught[0].reason) == (Code.INTERNAL, "OPERATION_RAISED")
    assert "primary_hash" in caught[0].message
    replica.engine.do("raise_in", method="drop_prefix_cache", message="")
    assert replica.reset(running_requests=KEEP).engines[0].prefix_cache.state == types.TIER_STATE_DONE


def test_an_error_text_of_the_engine_with_control_and_wide_characters_arrives(replica):
    replica.engine.do("raise_in", method="drop_prefix_cache", message="line\nbreak \x00 ünïcødé 漢" * 200)
    with failing() as caught:
        replica.reset(running_requests=KEEP)
    assert caught[0].code is Code.INTERNAL
    assert "ünïcødé 漢" in caught[0].message
    assert len(caught[0].message.encode()) <= errors.MAX_TEXT_BYTES


# --- NOT_FOUND and CANCELLED -------------------------------------------------------------------------------------


def test_an_operation_nobody_knows_is_not_found(replica):
    for method, request in (
        (replica.stub.GetOperation, api.GetOperationRequest(request_id=str(uuid.uuid4()))),
        (replica.stub.CancelOperation, api.CancelOperationRequest(request_id=str(uuid.uuid4()))),
    ):
        with failing() as caught:
            method(request, timeout=30)
        assert (caught[0].code, caught[0].reason) == (Code.NOT_FOUND, "OPERATION_NOT_FOUND")


def test_an_armed_reset_can_be_withdrawn(replica):
    replica.engine.do("hold")
    with armed_reset(replica) as request_id:
        answer = replica.stub.CancelOperation(api.CancelOperationRequest(request_id=request_id), timeout=30)
        assert answer.cancelled
    found = replica.stub.GetOperation(api.GetOperationRequest(request_id=request_id), timeout=30)
    assert found.reason == "CANCELLED"


def test_a_finished_operation_cannot_be_withdrawn_and_says_so(replica):
    request_id = str(uuid.uuid4())
    replica.reset(running_requests=KEEP, request_id=request_id)
    answer = replica.stub.CancelOperation(api.CancelOperationRequest(request_id=request_id), timeout=30)
    assert not answer.cancelled
    assert "ended already" in answer.engines[0].message


# --- RESOURCE_EXHAUSTED ------------------------------------------------------------------------------------------


def test_calls_over_the_limit_are_refused_at_once_and_health_still_answers(tmp_path):
    engines = tmp_path / "e"
    engines.mkdir(mode=0o700)
    sidecar = SidecarProcess(engines, tmp_path, "--max-calls", "1")
    try:
        with sidecar.stub() as stub:
            watch = stub.WatchAdmission(api.WatchAdmissionRequest(), timeout=20)
            next(watch)
            with failing() as caught:
                stub.GetReplica(api.GetReplicaRequest(), timeout=30)
            assert (caught[0].code, caught[0].reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_OPERATIONS")
            assert caught[0].retry_after is not None
            watch.cancel()
            wait_until(lambda: _answers(stub), 30)
    finally:
        sidecar.end()


def _answers(stub) -> bool:
    try:
        stub.GetReplica(api.GetReplicaRequest(), timeout=30)
    except grpc.RpcError:
        return False
    return True
