"""The sidecar beside a real vLLM engine process: stopped, in a long step, holding the GIL, killed, restarted."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.rpc import errors
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.engine.conftest import VllmEngineHarness, engine_process

pytestmark = pytest.mark.engine

KEEP = types.RUNNING_REQUESTS_KEEP
Code = grpc.StatusCode
PROMPT = list(range(8, 72))
SLACK_S = 0.5


@pytest.fixture
def sidecar(engine_dir: Path, tmp_path: Path) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(engine_dir, tmp_path)
    try:
        yield sidecar
    finally:
        sidecar.end()


def reset(sidecar: SidecarProcess, timeout: float = 10, **fields) -> api.ResetPrefixCacheResponse | errors.Failure:
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


def within(seconds: float, call: Callable[[], object]) -> object:
    began = time.monotonic()
    answer = call()
    assert time.monotonic() - began < seconds + SLACK_S
    return answer


def engine_of(sidecar: SidecarProcess) -> types.EngineInfo:
    with sidecar.stub() as stub:
        (engine,) = stub.GetReplica(api.GetReplicaRequest(), timeout=3).replica.engines
    return engine


def operation(sidecar: SidecarProcess, request_id: str) -> api.GetOperationResponse:
    with sidecar.stub() as stub:
        return stub.GetOperation(api.GetOperationRequest(request_id=request_id), timeout=3)


def test_the_three_modes_on_a_serving_engine_are_told_for_what_they_are(engine_dir, sidecar):
    with engine_process(engine_dir, step_ms=5, max_model_len=4096, blocks=512) as engine:
        sidecar.wait_ready(60)
        name = engine.add(PROMPT, 2000)
        engine.wait_tokens(name, 3)
        error = failed(reset(sidecar))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "BLOCKS_HELD_BY_REQUESTS")
        assert "1 running" in error.message
        (kept,) = done(reset(sidecar, running_requests=KEEP)).engines
        assert (kept.requests_kept, kept.prefix_cache.state) == (1, types.TIER_STATE_DONE)
        assert kept.cached_blocks_dropped > 0
        (preempted,) = done(reset(sidecar, running_requests=types.RUNNING_REQUESTS_PREEMPT)).engines
        assert preempted.requests_preempted == 1
        with sidecar.stub() as stub:
            admission = stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=3).engines[0]
        assert admission.requests.running + admission.requests.waiting == 1
        engine.client.abort_requests([name])
        wait_until(lambda: isinstance(reset(sidecar), api.ResetPrefixCacheResponse), 10)


@pytest.mark.parametrize("hold_gil", ["0", "1"], ids=["long-step", "gil-held"])
def test_an_engine_that_cannot_answer_is_told_within_the_deadline_and_runs_nothing_later(
    engine_dir, sidecar, monkeypatch, hold_gil
):
    monkeypatch.setenv("KVCTL_FAKE_HOLD_GIL", hold_gil)
    with engine_process(engine_dir, step_ms=4000) as engine:
        sidecar.wait_ready(60)
        name = engine.add(PROMPT, 3)
        wait_until(lambda: _phase(sidecar) == "step", 10)
        request_id = str(uuid.uuid4())
        error = failed(within(1.0, lambda: reset(sidecar, 1.0, running_requests=KEEP, request_id=request_id)))
        assert (error.code, error.reason) == (Code.DEADLINE_EXCEEDED, "NOT_EXECUTED")
        assert sidecar.get("/readyz")[0] == 200
        engine.wait_finished(name)
        found = operation(sidecar, request_id)
        assert (found.finished, found.reason) == (True, "NOT_EXECUTED")
        (result,) = done(reset(sidecar)).engines
        assert result.cached_blocks_dropped > 0, "the reset that was not executed has dropped nothing"


def _phase(sidecar: SidecarProcess) -> str:
    with sidecar.stub() as stub:
        return stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=3).engines[0].phase


def test_a_stopped_a_killed_and_a_restarted_engine_are_told_apart(engine_dir, sidecar):
    with engine_process(engine_dir, step_ms=5, max_model_len=4096, blocks=512) as engine:
        sidecar.wait_ready(60)
        pid = engine_of(sidecar).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            error = failed(within(1.0, lambda: reset(sidecar, 1.0, running_requests=KEEP)))
            assert error.reason == "NOT_EXECUTED"
            assert "stopped" in error.message
        finally:
            os.kill(pid, signal.SIGCONT)
        done(reset(sidecar, running_requests=KEEP))
        request_id = str(uuid.uuid4())
        with killed_while_a_reset_waits(engine, sidecar, pid, request_id) as answers:
            pass
        error = failed(answers[0])
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_DIED_DURING_OPERATION")
        answer = failed(within(2.0, lambda: reset(sidecar, 10.0, running_requests=KEEP)))
        assert (answer.code, answer.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
        before = engine_of(sidecar).engine.incarnation
    with engine_process(engine_dir):
        sidecar.wait_ready(60)
        assert engine_of(sidecar).engine.incarnation != before
        assert failed(reset(sidecar, wait_for_idle=True, request_id=request_id)).reason == "ENGINE_RESTARTED"
        done(reset(sidecar))


@contextmanager
def killed_while_a_reset_waits(
    engine: VllmEngineHarness, sidecar: SidecarProcess, pid: int, request_id: str
) -> Iterator[list[object]]:
    """SIGKILL while an operation is under way on the engine."""
    name = engine.add(PROMPT, 3000)
    engine.wait_tokens(name, 2)
    answers: list[object] = []
    call = lambda: answers.append(reset(sidecar, 20, wait_for_idle=True, request_id=request_id))  # noqa: E731
    thread = threading.Thread(target=call)
    thread.start()
    wait_until(lambda: any(line["request_id"] == request_id for line in sidecar.audit()), 5)
    wait_until(lambda: not operation(sidecar, request_id).finished, 5)
    engine._closing = True  # the client will find its engine gone, as it should
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    yield answers
    thread.join(10)
    assert time.monotonic() - began < 3
