"""What operators of such systems reported in public, as behaviour of this sidecar. See also test_error_contract."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from sidecar.rpc import errors
from tests.contract.fake_vllm_http import Answer, FakeVllm, metrics
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import EngineProcess

KEEP = types.RUNNING_REQUESTS_KEEP
Code = grpc.StatusCode


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "engines"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def sidecar(engine_dir: Path, tmp_path: Path) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(engine_dir, tmp_path)
    try:
        yield sidecar
    finally:
        sidecar.end()


@pytest.fixture
def start_engine(engine_dir: Path, sidecar: SidecarProcess) -> Iterator[object]:
    engines: list[EngineProcess] = []

    def start(*arguments: str) -> EngineProcess:
        engines.append(EngineProcess(engine_dir, *arguments))
        sidecar.wait_ready()
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()


def reset(sidecar: SidecarProcess, timeout: float = 30, **fields) -> api.ResetPrefixCacheResponse:
    with sidecar.stub() as stub:
        return stub.ResetPrefixCache(api.ResetPrefixCacheRequest(**fields), timeout=timeout)


def refused(sidecar: SidecarProcess, **fields) -> errors.Failure:
    with pytest.raises(grpc.RpcError) as raised:
        reset(sidecar, **fields)
    return errors.parse(raised.value)


def test_no_connector_is_not_configured_and_the_reset_is_a_success(sidecar, start_engine):
    start_engine("--connector", "absent")
    (engine,) = reset(sidecar, running_requests=KEEP, reset_connector=True).engines
    assert engine.connector.state == types.TIER_STATE_NOT_CONFIGURED
    assert engine.prefix_cache.state == types.TIER_STATE_DONE


def test_every_tier_is_listed_with_its_state(sidecar, start_engine):
    start_engine("--connector", "true")
    (engine,) = reset(sidecar, reset_connector=True, reset_mm_cache=True, reset_encoder_cache=True).engines
    states = [engine.prefix_cache.state, engine.connector.state, engine.multimodal.state, engine.encoder.state]
    assert types.TIER_STATE_UNSPECIFIED not in states
    assert types.TIER_STATE_NOT_REQUESTED not in states


def test_a_reset_that_dropped_nothing_says_zero_blocks_were_cached(sidecar, start_engine):
    start_engine("--cached", "0")
    (engine,) = reset(sidecar).engines
    assert engine.cached_blocks_dropped == 0
    assert "0 blocks were cached" in engine.prefix_cache.message


def test_an_engine_without_prefix_caching_says_so_and_reorder_works(sidecar, start_engine):
    engine = start_engine("--no-caching", "--cached", "0")
    (result,) = reset(sidecar).engines
    assert not result.prefix_caching_enabled
    assert result.prefix_cache.reason == "PREFIX_CACHING_DISABLED"
    engine.do("scramble")
    with sidecar.stub() as stub:
        answer = stub.ReorderFreeQueue(api.ReorderFreeQueueRequest(), timeout=30)
    assert answer.engines[0].before.ratio < 0.1
    assert answer.engines[0].after.ratio == 1.0


def test_an_event_on_an_idle_engine_is_published_at_once_and_the_answer_says_for_which_tiers(sidecar, start_engine):
    engine = start_engine()
    (result,) = reset(sidecar).engines
    assert result.event_published == bool(result.event_tiers)
    assert engine.do("state")["tokens"] == 0, "no step was needed"


def test_the_last_successful_reset_and_the_weight_version_are_shown(sidecar, start_engine):
    engine = start_engine()
    engine.do("hold")
    refused(sidecar)
    with sidecar.stub() as stub:
        status = stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=30).engines[0]
        assert not status.HasField("since_last_reset")
        reset(sidecar, running_requests=KEEP)
        stub.ResumeScheduling(api.ResumeSchedulingRequest(weight_version="step-17"), timeout=30)
        status = stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=30).engines[0]
    assert status.HasField("since_last_reset")
    assert status.last_reset_mode == KEEP
    assert status.weight_version == "step-17"


def test_a_sleeping_engine_is_shown_and_may_be_reset(sidecar, start_engine):
    engine = start_engine()
    engine.do("sleep")
    with sidecar.stub() as stub:
        wait_until(lambda: _verdict(stub) == types.VERDICT_SLEEPING, 30)
    assert reset(sidecar).engines[0].prefix_cache.state == types.TIER_STATE_DONE


def _verdict(stub) -> int:
    return stub.AdmissionStatus(api.AdmissionStatusRequest(), timeout=30).engines[0].verdict


def test_two_flushes_with_one_id_are_one_and_with_two_ids_the_second_knows_the_first(sidecar, start_engine):
    engine = start_engine()
    engine.do("hold_at", point="before_effect")
    first = str(uuid.uuid4())
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(reset(sidecar, request_id=first, running_requests=KEEP)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    engine.do("wait_held")
    error = refused(sidecar, running_requests=KEEP)
    engine.do("let_go")
    assert (error.code, error.metadata["other_request_id"]) == (Code.ABORTED, first)
    for thread in threads:
        thread.join(30)
    assert len(answers) == 2
    assert len([line for line in sidecar.audit() if line["audit"] == "begin"]) == 1


def test_a_dead_engine_behind_a_live_sidecar_is_not_serving(sidecar, start_engine):
    engine = start_engine()
    engine.kill()
    with sidecar.stub() as stub:
        wait_until(lambda: _verdict(stub) == types.VERDICT_ENGINE_DEAD, 30)
    assert sidecar.get("/readyz")[0] == 503
    assert sidecar.get("/livez")[0] == 200


def test_a_scrape_never_waits_for_the_engine(sidecar, start_engine):
    engine = start_engine()
    engine.freeze()
    status, text = sidecar.get("/metrics")
    engine.thaw()
    assert status == 200
    assert 'kvctl_admission_verdict{engine="0"' in text


def test_a_request_over_the_message_limit_is_refused_with_a_code_and_the_server_goes_on(sidecar, start_engine):
    start_engine()
    with sidecar.stub() as stub:
        huge = api.ResumeSchedulingRequest(weight_version="v" * (3 * 1024 * 1024))
        with pytest.raises(grpc.RpcError) as raised:
            stub.ResumeScheduling(huge, timeout=30)
        assert errors.parse(raised.value).reason == "INVALID_FIELD"
        huge.weight_version *= 2
        with pytest.raises(grpc.RpcError) as raised:
            stub.ResumeScheduling(huge, timeout=30)
        assert raised.value.code() is Code.RESOURCE_EXHAUSTED
        assert stub.GetReplica(api.GetReplicaRequest(), timeout=30).replica.name == "r0"


def test_a_trace_context_is_taken_up_and_shown(sidecar, start_engine):
    start_engine()
    trace = "0af7651916cd43dd8448eb211c80319c"
    with sidecar.stub() as stub:
        stub.ResetPrefixCache(
            api.ResetPrefixCacheRequest(), timeout=30, metadata=(("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
        )
        stub.ResetPrefixCache(api.ResetPrefixCacheRequest(), timeout=30, metadata=(("traceparent", "nonsense"),))
    with_trace, without = sidecar.audit()[:2], sidecar.audit()[2:]
    assert {line["trace_id"] for line in with_trace} == {trace}
    assert not any("trace_id" in line for line in without)


def test_an_audit_log_that_cannot_be_written_stops_the_mutation_before_it_begins(engine_dir, tmp_path):
    engine = EngineProcess(engine_dir)
    sidecar = SidecarProcess(engine_dir, tmp_path)
    try:
        sidecar.wait_ready()
        sidecar.audit_file.unlink()
        sidecar.audit_file.mkdir()
        error = refused(sidecar, running_requests=KEEP)
        assert (error.code, error.reason) == (Code.INTERNAL, "STORE_FAILED")
        assert "nothing was changed" in error.message
        assert engine.do("state")["effects"] == []
    finally:
        sidecar.end()
        engine.end()


def test_a_rotated_audit_log_is_followed(sidecar, start_engine):
    start_engine()
    reset(sidecar)
    rotated = sidecar.audit_file.with_suffix(".1")
    sidecar.audit_file.rename(rotated)
    reset(sidecar)
    assert len(rotated.read_text().splitlines()) == 2
    assert len(sidecar.audit()) == 2
    assert oct(sidecar.audit_file.stat().st_mode & 0o777) == "0o600"


def test_a_bridge_that_could_not_attach_is_told_in_its_own_words(sidecar, engine_dir):
    import json
    import os

    note = {"reason": "the scheduler has no attribute kv_cache_manager", "pid": os.getpid(), "rank": 0, "time": 0}
    (engine_dir / "engine-0-0123abcd.failed").write_text(json.dumps(note))
    wait_until(lambda: "BRIDGE_NOT_ATTACHED" in sidecar.get("/readyz")[1], 30)
    error = refused(sidecar)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "BRIDGE_NOT_ATTACHED")
    assert "kv_cache_manager" in error.message


def test_stock_vllm_without_the_bridge_does_what_it_can_and_names_what_would_do_the_rest(engine_dir, tmp_path):
    """The whole process over HTTP; the shapes of replies have their own tests."""
    ready, stop = threading.Event(), threading.Event()
    url: list[str] = []

    async def serve() -> None:
        vllm = FakeVllm()
        vllm.routes["/metrics"] = Answer(body=metrics(), content_type="text/plain")
        vllm.routes["/reset_prefix_cache"] = Answer(body='{"success": true}')
        async with vllm:
            url.append(vllm.url)
            ready.set()
            await asyncio.to_thread(stop.wait, 60)

    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    try:
        assert ready.wait(10)
        sidecar = SidecarProcess(engine_dir, tmp_path, "--engine-url", url[0])
        try:
            sidecar.wait_ready()
            error = refused(sidecar, running_requests=KEEP)
            assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "NEEDS_ENGINE_BRIDGE")
            with sidecar.stub() as stub:
                info = stub.GetReplica(api.GetReplicaRequest(), timeout=30).replica.engines[0]
            assert info.backend == types.BACKEND_KIND_HTTP
        finally:
            sidecar.end()
    finally:
        stop.set()
        server.join(10)
