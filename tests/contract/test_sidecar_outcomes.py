"""Lost answers, repeats and restarts: what a caller is told, and that nothing happens twice or late."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.rpc import errors
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess

KEEP = types.RUNNING_REQUESTS_KEEP
Code = grpc.StatusCode
DEADLINE_S = 3.0
TRIES = 8
SLACK_S = 1.0


class Bench:
    """Engines and sidecars in one directory, ended together."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine_dir = root / "engines"
        self.engine_dir.mkdir(mode=0o700)
        self._started: list[EngineProcess | SidecarProcess] = []

    def engine(self, *arguments: str) -> EngineProcess:
        engine = EngineProcess(self.engine_dir, *arguments)
        self._started.append(engine)
        return engine

    def sidecar(self, *arguments: str) -> SidecarProcess:
        work = self.root / f"sidecar{len(self._started)}"
        work.mkdir()
        sidecar = SidecarProcess(self.engine_dir, work, *arguments)
        self._started.append(sidecar)
        return sidecar

    def end(self) -> None:
        for one in reversed(self._started):
            one.end()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    try:
        yield bench
    finally:
        bench.end()


def reset(sidecar: SidecarProcess, timeout: float = 30, **fields) -> api.ResetPrefixCacheResponse | errors.Failure:
    fields.setdefault("running_requests", KEEP)
    with sidecar.stub() as stub:
        try:
            return stub.ResetPrefixCache(api.ResetPrefixCacheRequest(**fields), timeout=timeout)
        except grpc.RpcError as error:
            return errors.parse(error)


def failed(answer: object) -> errors.Failure:
    assert isinstance(answer, errors.Failure), answer
    return answer


def done(answer: object) -> api.ResetPrefixCacheResponse:
    assert isinstance(answer, api.ResetPrefixCacheResponse), answer
    return answer


def operation(sidecar: SidecarProcess, request_id: str) -> api.GetOperationResponse:
    with sidecar.stub() as stub:
        return stub.GetOperation(api.GetOperationRequest(request_id=request_id), timeout=30)


def timed(call: Callable[[], object]) -> tuple[object, float]:
    began = time.monotonic()
    answer = call()
    return answer, time.monotonic() - began


def told(call: Callable[[], object]) -> errors.Failure:
    """What the sidecar says before its caller's deadline. Asked again a few times: its margin is 5% of the deadline,
    and on a busy machine the caller may now and then give up first, or find the call before still under way.
    """
    for _ in range(TRIES):
        answer, took = timed(call)
        assert took < DEADLINE_S + SLACK_S
        error = failed(answer)
        if "execution" in error.metadata:
            return error
        assert error.code in (Code.DEADLINE_EXCEEDED, Code.ABORTED)
    raise AssertionError(f"not once in {TRIES} times within the deadline: {error}")


def effects(engine: EngineProcess) -> int:
    return len([effect for effect in engine.do("state")["effects"] if effect["effect"] == "reset"])


def test_a_stopped_engine_is_told_within_the_deadline_and_never_runs_it_later(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    ids: list[str] = []

    def try_once() -> object:
        ids.append(str(uuid.uuid4()))
        return reset(sidecar, DEADLINE_S, request_id=ids[-1])

    engine.freeze()
    error = told(try_once)
    assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "NOT_EXECUTED")
    assert error.metadata["execution"] == "NOT_EXECUTED"
    assert "stopped" in error.message
    engine.thaw()
    assert operation(sidecar, ids[-1]).reason == "NOT_EXECUTED"
    assert effects(engine) == 0
    done(reset(sidecar))
    assert effects(engine) == 1


def test_an_engine_in_a_long_step_is_told_within_the_deadline_and_never_runs_it_later(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hang", seconds=30)
    error = told(lambda: reset(sidecar, DEADLINE_S))
    assert error.reason == "NOT_EXECUTED"
    assert "'step'" in error.message
    engine.do("unhang")
    done(reset(sidecar))
    assert effects(engine) == 1


def test_a_wait_for_idle_that_ends_in_a_long_step_says_that_no_idle_moment_came(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hang", seconds=30)
    error = told(lambda: reset(sidecar, DEADLINE_S, running_requests=types.RUNNING_REQUESTS_FAIL, wait_for_idle=True))
    assert error.reason == "NEVER_IDLE"
    assert error.metadata["execution"] == "NOT_EXECUTED"
    engine.do("unhang")


def test_an_operation_that_had_started_is_unknown_until_asked_again_by_its_id(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hold_at", point="before_effect")
    request_id = str(uuid.uuid4())
    error = told(lambda: reset(sidecar, DEADLINE_S, request_id=request_id))
    assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")
    assert error.metadata["execution"] == "UNKNOWN"
    engine.do("let_go")
    wait_until(lambda: operation(sidecar, request_id).finished, 30)
    found = operation(sidecar, request_id)
    assert found.code == 0
    assert found.reset.engines[0].prefix_cache.state == types.TIER_STATE_DONE
    assert done(reset(sidecar, request_id=request_id)).engines[0].status.replayed
    assert effects(engine) == 1


def test_a_repeat_after_a_lost_answer_joins_what_runs_and_has_no_second_effect(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("slow", method="drop_prefix_cache", seconds=1.5)
    request_id = str(uuid.uuid4())
    failed(reset(sidecar, 0.6, request_id=request_id))
    done(reset(sidecar, 60.0, request_id=request_id))
    assert effects(engine) == 1


def test_an_engine_killed_during_an_operation_is_unavailable_at_once(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hold_at", point="before_effect")
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(timed(lambda: reset(sidecar, 60.0))))
    thread.start()
    engine.do("wait_held")
    engine.kill()
    thread.join(60)
    (answer, took), error = answers[0], failed(answers[0][0])
    assert answer is error
    assert took < 30, "long before the deadline"
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_DIED_DURING_OPERATION")


def test_an_engine_stopped_during_an_operation_is_unknown_within_the_deadline(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hold_at", point="before_effect")
    request_id = str(uuid.uuid4())
    answers: list[errors.Failure] = []
    call = lambda: answers.append(told(lambda: reset(sidecar, DEADLINE_S, request_id=request_id)))  # noqa: E731
    thread = threading.Thread(target=call)
    thread.start()
    engine.do("wait_held")
    engine.freeze()
    thread.join(60)
    assert answers[0].reason == "OUTCOME_UNKNOWN"
    assert "stopped" in answers[0].message
    engine.thaw()
    engine.do("let_go")
    wait_until(lambda: operation(sidecar, request_id).finished, 30)
    assert operation(sidecar, request_id).code == 0


def test_an_engine_that_died_before_is_unavailable_long_before_the_deadline(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.kill()
    answer, took = timed(lambda: reset(sidecar, 10.0))
    assert took < 8, "before the deadline"
    assert (failed(answer).code, failed(answer).reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
    wait_until(lambda: sidecar.get("/readyz")[0] == 503, 30)
    assert "ENGINE_DEAD" in sidecar.get("/readyz")[1]


def test_a_lost_rank_fails_the_whole_and_keeps_the_other_ranks_result(bench):
    first, second = bench.engine("--rank", "0", "--dp-size", "2"), bench.engine("--rank", "1", "--dp-size", "2")
    sidecar = bench.sidecar()
    sidecar.wait_ready()
    second.kill()
    error = failed(reset(sidecar, 5.0))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
    assert error.metadata["engines_failed"] == "1"
    assert isinstance(error.result, api.ResetPrefixCacheResponse)
    assert [engine.status.code for engine in error.result.engines] == [0, 14]
    assert error.result.engines[0].prefix_cache.state == types.TIER_STATE_DONE
    assert effects(first) == 1


def test_an_engine_restarted_after_a_lost_answer_says_so_and_its_successor_is_not_asked(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("slow", method="drop_prefix_cache", seconds=20)
    request_id = str(uuid.uuid4())
    assert failed(reset(sidecar, 0.6, request_id=request_id)).reason == "OUTCOME_UNKNOWN"
    engine.kill()
    successor = bench.engine()
    wait_until(lambda: incarnations(sidecar) == [successor.incarnation], 30)
    found = operation(sidecar, request_id)
    assert (found.finished, found.reason) == (True, "ENGINE_RESTARTED")
    assert "cold cache" in found.message
    assert failed(reset(sidecar, request_id=request_id)).reason == "ENGINE_RESTARTED"
    assert effects(successor) == 0
    done(reset(sidecar))
    assert effects(successor) == 1


def incarnations(sidecar: SidecarProcess) -> list[str]:
    with sidecar.stub() as stub:
        replica = stub.GetReplica(api.GetReplicaRequest(), timeout=30).replica
    return [engine.engine.incarnation for engine in replica.engines if engine.connected]


def test_a_restarted_engine_is_found_without_restarting_the_sidecar(bench):
    sidecar = bench.sidecar()
    assert sidecar.get("/readyz")[0] == 503
    assert failed(reset(sidecar)).reason == "NO_ENGINE"
    engine = bench.engine()
    sidecar.wait_ready()
    done(reset(sidecar))
    engine.end()
    wait_until(lambda: sidecar.get("/readyz")[0] == 503, 30)
    bench.engine()
    sidecar.wait_ready()
    done(reset(sidecar))


def test_the_same_id_at_the_same_time_joins(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("slow", method="drop_prefix_cache", seconds=0.5)
    request_id = str(uuid.uuid4())
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(reset(sidecar, 60, request_id=request_id))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len([done(answer) for answer in answers]) == 5
    assert effects(engine) == 1


def test_a_joiner_with_less_patience_is_told_that_it_is_under_way(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hold_at", point="before_effect")
    request_id = str(uuid.uuid4())
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(reset(sidecar, 60, request_id=request_id)))
    thread.start()
    engine.do("wait_held")
    assert failed(reset(sidecar, 0.5, request_id=request_id)).reason == "OUTCOME_UNKNOWN"
    engine.do("let_go")
    thread.join(60)
    done(answers[0])


def test_a_restarted_sidecar_answers_from_the_engines_record(bench):
    engine, first = bench.engine(), bench.sidecar()
    first.wait_ready()
    request_id = str(uuid.uuid4())
    done(reset(first, request_id=request_id))
    assert first.terminate() == 0
    second = bench.sidecar()
    second.wait_ready()
    found = operation(second, request_id)
    assert (found.finished, found.code, found.kind) == (True, 0, types.OPERATION_KIND_RESET)
    assert found.reset.engines[0].cached_blocks_dropped == 8
    assert done(reset(second, request_id=request_id)).engines[0].status.replayed
    assert effects(engine) == 1


def test_an_operation_of_another_sidecar_is_named(bench):
    engine, one, other = bench.engine(), bench.sidecar(), bench.sidecar()
    one.wait_ready()
    other.wait_ready()
    engine.do("hold")
    request_id = str(uuid.uuid4())
    answers: list[object] = []
    call = lambda: answers.append(  # noqa: E731
        reset(one, 5, request_id=request_id, running_requests=types.RUNNING_REQUESTS_FAIL, wait_for_idle=True)
    )
    thread = threading.Thread(target=call)
    thread.start()
    # Until the first is armed, the other may simply succeed.
    wait_until(lambda: getattr(reset(other), "code", None) is Code.ABORTED, 30)
    error = failed(reset(other))
    assert (error.reason, error.metadata["other_request_id"]) == ("OPERATION_IN_PROGRESS", request_id)
    engine.do("release")
    thread.join(10)
    done(answers[0])


def test_a_retry_of_what_never_reached_an_engine_is_a_first_try(bench):
    sidecar = bench.sidecar()
    request_id = str(uuid.uuid4())
    assert failed(reset(sidecar, request_id=request_id)).code is Code.UNAVAILABLE
    engine = bench.engine()
    sidecar.wait_ready()
    assert not done(reset(sidecar, request_id=request_id)).engines[0].status.replayed
    assert effects(engine) == 1


def test_a_caller_that_goes_away_changes_nothing(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    engine.do("hold_at", point="before_effect")
    request_id = str(uuid.uuid4())
    with sidecar.channel() as channel:
        method = channel.unary_unary(
            "/kvctl.v1.CacheAdmin/ResetPrefixCache",
            request_serializer=api.ResetPrefixCacheRequest.SerializeToString,
            response_deserializer=api.ResetPrefixCacheResponse.FromString,
        )
        call = method.future(api.ResetPrefixCacheRequest(request_id=request_id, running_requests=KEEP), timeout=30)
        engine.do("wait_held")
        call.cancel()
    engine.do("let_go")
    wait_until(lambda: operation(sidecar, request_id).finished, 30)
    assert operation(sidecar, request_id).code == 0
    assert [line["audit"] for line in sidecar.audit()] == ["begin", "end"]


def test_a_renewal_whose_caller_went_away_has_its_second_audit_line(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    renewal = api.RenewPauseRequest(pause_request_id=str(uuid.uuid4()))
    renewal.lease.seconds = 5
    engine.freeze()
    with sidecar.stub() as stub:
        call = stub.RenewPause.future(renewal, timeout=30)
        wait_until(lambda: sidecar.audit(), 30)
        call.cancel()
        wait_until(lambda: [line["audit"] for line in sidecar.audit()] == ["begin", "end"], 30)
    engine.thaw()
    assert sidecar.audit()[1]["reason"] == "OUTCOME_UNKNOWN"


def test_a_missing_rank_that_is_expected_is_not_a_smaller_replica(bench):
    bench.engine("--rank", "0", "--dp-size", "2")
    sidecar = bench.sidecar("--expect-engines", "2")
    wait_until(lambda: "2 engines are expected" in sidecar.get("/readyz")[1], 30)
    error = failed(reset(sidecar))
    assert error.reason == "NO_ENGINE"
    assert [engine.status.code for engine in error.result.engines] == [0, 14]
    with sidecar.stub() as stub:
        status = stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=30)
        assert [engine.verdict for engine in status.engines] == [types.VERDICT_IDLE, types.VERDICT_UNKNOWN]
        assert "engine 1 has not appeared" in status.engines[1].explanation
        renewal = api.RenewPauseRequest(pause_request_id=str(uuid.uuid4()))
        renewal.lease.seconds = 5
        check = api.ResetPrefixCacheRequest(running_requests=KEEP, validate_only=True)
        for call in (lambda: stub.ResetPrefixCache(check, timeout=30), lambda: stub.RenewPause(renewal, timeout=30)):
            with pytest.raises(grpc.RpcError) as raised:
                call()
            assert "NO_ENGINE" in str(errors.parse(raised.value).result)
    assert 'kvctl_engine_up{engine="1"} 0.0' in sidecar.get("/metrics")[1]


def test_a_rank_that_never_attached_is_known_from_the_one_beside_it(bench):
    first = bench.engine("--rank", "0", "--dp-size", "2")
    sidecar = bench.sidecar()
    wait_until(lambda: "engine 1 has not attached yet" in sidecar.get("/readyz")[1], 30)
    error = failed(reset(sidecar, 10.0))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_STARTING")
    assert "engine 1" in error.message
    assert [engine.status.code for engine in error.result.engines] == [0, 14]
    with sidecar.stub() as stub:
        status = stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=30)
        assert [engine.engine.data_parallel_rank for engine in status.engines] == [0, 1]
        assert status.engines[1].verdict == types.VERDICT_STARTING
        bench.engine("--rank", "1", "--dp-size", "2")
        sidecar.wait_ready(30)
        assert len(stub.GetReplica(api.GetReplicaRequest(), timeout=30).replica.engines) == 2
    done(reset(sidecar, 10.0))
    assert effects(first) == 2


def test_a_rank_that_stopped_properly_is_no_rank_that_is_missing(bench):
    first, second = bench.engine("--rank", "0", "--dp-size", "2"), bench.engine("--rank", "1", "--dp-size", "2")
    sidecar = bench.sidecar()
    sidecar.wait_ready()
    second.end()
    wait_until(lambda: incarnations(sidecar) == [first.incarnation], 30)
    sidecar.wait_ready()
    assert len(done(reset(sidecar)).engines) == 1


def test_the_ranks_expected_on_a_second_machine_have_other_numbers(bench):
    bench.engine("--rank", "5", "--dp-size", "8")
    sidecar = bench.sidecar("--expect-engines", "2")
    wait_until(lambda: "engine 4 has not appeared" in sidecar.get("/readyz")[1], 30)
    assert [engine.status.engine.data_parallel_rank for engine in failed(reset(sidecar)).result.engines] == [4, 5]
    bench.engine("--rank", "4", "--dp-size", "8")
    sidecar.wait_ready(30)
    assert len(done(reset(sidecar, 10.0)).engines) == 2


def test_a_replica_said_to_have_one_engine_has_one_whatever_that_engine_knows(bench):
    bench.engine("--rank", "0", "--dp-size", "2")
    sidecar = bench.sidecar("--expect-engines", "1")
    sidecar.wait_ready(30)
    done(reset(sidecar, 10.0))


def test_a_pause_that_does_not_reach_every_rank_is_undone(bench):
    first, second = bench.engine("--rank", "0", "--dp-size", "2"), bench.engine("--rank", "1", "--dp-size", "2")
    sidecar = bench.sidecar()
    sidecar.wait_ready()
    second.do("capability", name="pause", reason="not on this one")
    request = api.PauseSchedulingRequest(request_id=str(uuid.uuid4()))
    request.lease.seconds = 60
    with sidecar.stub() as stub, pytest.raises(grpc.RpcError) as raised:
        stub.PauseScheduling(request, timeout=30)
    error = errors.parse(raised.value)
    assert error.code is Code.UNIMPLEMENTED
    assert isinstance(error.result, api.PauseSchedulingResponse)
    assert error.result.engines[0].state == types.SCHEDULING_STATE_RUNNING
    assert "resumed again" in error.result.engines[0].status.message
    assert first.do("state")["paused"] == ""


def test_a_pause_is_renewed_and_resumed_with_a_weight_version(bench):
    engine, sidecar = bench.engine(), bench.sidecar()
    sidecar.wait_ready()
    pause = api.PauseSchedulingRequest()
    pause.lease.seconds = 30
    with sidecar.stub() as stub:
        paused = stub.PauseScheduling(pause, timeout=30)
        assert paused.engines[0].state == types.SCHEDULING_STATE_PAUSED
        renew = api.RenewPauseRequest(pause_request_id=paused.request_id, weights_complete=True)
        renew.lease.seconds = 60
        assert stub.RenewPause(renew, timeout=30).engines[0].lease_remaining.seconds >= 59
        resume = api.ResumeSchedulingRequest(pause_request_id=paused.request_id, weight_version="step-17")
        assert stub.ResumeScheduling(resume, timeout=30).engines[0].weight_version == "step-17"
        with pytest.raises(grpc.RpcError) as raised:
            stub.RenewPause(renew, timeout=30)
    assert errors.parse(raised.value).reason == "WRONG_SCHEDULING_STATE"
    assert engine.do("state")["weight_version"] == "step-17"
