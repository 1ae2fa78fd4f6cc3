"""kvctl-sidecar as a process: how it starts, what stops it, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc
from kvctl.v1 import types_pb2 as types
from prometheus_client.parser import text_string_to_metric_families

from sidecar.rpc import addresses, channels, errors
from tests.contract.sidecar_process import SidecarProcess, command, environment, run_to_end, wait_until
from tests.fake_engine.process import EngineProcess

STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "engines"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def engine(engine_dir: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(engine_dir)
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture
def sidecar(engine_dir: Path, tmp_path: Path) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(engine_dir, tmp_path)
    try:
        yield sidecar
    finally:
        sidecar.end()


def health(sidecar: SidecarProcess, service: str = "") -> int:
    with sidecar.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30).status


# --- starting ----------------------------------------------------------------------------------------------------


def test_health_starts_as_not_serving_follows_the_engines_and_tells_watchers(sidecar, engine_dir):
    assert health(sidecar) == STATUS.NOT_SERVING
    seen: list[int] = []
    with sidecar.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        thread = threading.Thread(target=lambda: seen.extend(answer.status for answer in watch))
        thread.start()
        engine = EngineProcess(engine_dir)
        try:
            wait_until(lambda: health(sidecar, "kvctl.v1.CacheAdmin") == STATUS.SERVING, 30)
            engine.kill()
            wait_until(lambda: health(sidecar) == STATUS.NOT_SERVING, 30)
        finally:
            engine.end()
        assert sidecar.terminate() == 0
        thread.join(30)
    assert seen == [STATUS.NOT_SERVING, STATUS.SERVING, STATUS.NOT_SERVING]


def test_a_busy_engine_stays_serving(sidecar, engine):
    sidecar.wait_ready()
    engine.do("hang", seconds=20)
    time.sleep(1.0)
    assert health(sidecar) == STATUS.SERVING
    assert sidecar.get("/livez") == (200, "alive\n")
    engine.do("unhang")


def test_it_is_live_but_not_ready_without_an_engine(sidecar):
    assert sidecar.get("/livez")[0] == 200
    status, text = sidecar.get("/readyz")
    assert status == 503
    assert "NO_ENGINE" in text
    assert "KVCTL_ENGINE_DIR" in text


@pytest.mark.parametrize("which", ["--listen", "--metrics"])
def test_a_taken_port_ends_the_start_with_its_number(engine_dir, which):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = "--metrics" if which == "--listen" else "--listen"
        ended = run_to_end("--engine-dir", str(engine_dir), which, f"127.0.0.1:{port}", other, "127.0.0.1:0")
    assert ended.returncode == 4
    assert f"port {port} is already in use" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_second_sidecar_does_not_share_the_port_silently(sidecar, engine_dir):
    ended = run_to_end("--engine-dir", str(engine_dir), "--listen", sidecar.address, "--metrics", "off")
    assert ended.returncode == 4
    assert sidecar.address in ended.stderr


def test_a_second_sidecar_does_not_take_a_unix_socket_away(engine_dir, tmp_path):
    path = tmp_path / "api.sock"
    sidecar = SidecarProcess(engine_dir, tmp_path, "--listen", f"unix:{path}")
    try:
        assert oct(path.stat().st_mode & 0o777) == "0o600"
        ended = run_to_end("--engine-dir", str(engine_dir), "--listen", f"unix:{path}", "--metrics", "off")
        assert ended.returncode == 4
        assert "already in use" in ended.stderr
        with sidecar.stub() as stub:
            assert stub.GetReplica(api.GetReplicaRequest(), timeout=30).replica.name == "r0"
        assert sidecar.terminate() == 0
        assert not path.exists()
    finally:
        sidecar.end()


def test_a_ready_file_is_its_sidecars_while_that_lives_and_nobodys_after_a_kill(engine_dir, tmp_path):
    ready = tmp_path / "ready.json"
    first = SidecarProcess(engine_dir, tmp_path)
    try:
        words = ["--engine-dir", str(engine_dir), "--metrics", "off", "--ready-file", str(ready)]
        second = run_to_end(*words, "--listen", "127.0.0.1:0")
        assert second.returncode == 4
        assert f"{ready} is in use by pid {first.process.pid}" in second.stderr
        checked = run_to_end(*words, "--listen", "127.0.0.1:0", "--check")
        assert (checked.returncode, str(ready) in checked.stderr) == (4, True)
        assert json.loads(ready.read_text())["pid"] == first.process.pid
    finally:
        first.end()
    assert ready.exists()
    after = SidecarProcess(engine_dir, tmp_path)
    try:
        wait_until(lambda: json.loads(ready.read_text())["pid"] == after.process.pid, 60)
        assert after.terminate() == 0
        assert not ready.exists()
    finally:
        after.end()


def test_a_unix_socket_left_by_a_killed_sidecar_is_no_obstacle(engine_dir, tmp_path):
    path = tmp_path / "api.sock"
    first = SidecarProcess(engine_dir, tmp_path, "--listen", f"unix:{path}")
    first.end()
    assert path.exists()
    (tmp_path / "ready.json").unlink()
    second = SidecarProcess(engine_dir, tmp_path, "--listen", f"unix:{path}")
    try:
        with second.stub() as stub:
            stub.GetReplica(api.GetReplicaRequest(), timeout=30)
    finally:
        second.end()


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_it_listens_on_ipv4_ipv6_and_names_and_logs_the_bound_address(engine_dir, tmp_path, listen):
    sidecar = SidecarProcess(engine_dir, tmp_path, "--listen", listen, "--metrics", "[::1]:0")
    try:
        assert sidecar.address.rpartition(":")[0] == listen.rpartition(":")[0]
        with sidecar.stub() as stub:
            stub.GetReplica(api.GetReplicaRequest(), timeout=30)
        assert sidecar.get("/livez")[0] == 200
        assert f"address={sidecar.address}" in sidecar.log()
    finally:
        sidecar.end()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--listen", "nonsense"], "--listen: listen address 'nonsense' has no port"),
        (["--engine-dir", "/" + "d" * 100], "too long"),
        (["--log-format", "xml"], "not one of logfmt, json"),
        (["--token-file", "root=/x"], "unknown role"),
        (["--config", "/nonexistent.yaml"], "cannot be read"),
        (["--tls-cert", "/x"], "go together"),
        (["--grace", "soon"], "not a duration"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line_and_exit_code_two(arguments, says):
    ended = run_to_end(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_closed_stdout_ends_the_start_and_not_the_first_mutation(engine_dir, tmp_path):
    words = ["--engine-dir", str(engine_dir), "--listen", "127.0.0.1:0", "--metrics", "off"]
    closing = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command(*words)]

    def start(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*closing, *more], env=environment(), stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )

    ended = start()
    assert (ended.returncode, ended.stderr.count("\n")) == (4, 1)
    assert "--audit-log -: stdout is closed" in ended.stderr
    assert start("--check", "--audit-log", str(tmp_path / "audit")).returncode == 0


def test_an_unreadable_token_file_names_path_and_uid(engine_dir, tmp_path):
    ended = run_to_end("--engine-dir", str(engine_dir), "--token-file", f"admin={tmp_path / 'absent'}")
    assert ended.returncode == 4
    assert str(tmp_path / "absent") in ended.stderr
    assert f"uid {os.getuid()}" in ended.stderr


def test_service_links_of_kubernetes_are_no_settings(engine_dir, tmp_path):
    links = {
        "KVCTL_SIDECAR_PORT": "tcp://10.0.0.1:7700",
        "KVCTL_SIDECAR_SERVICE_HOST": "10.0.0.1",
        "KVCTL_SIDECAR_SERVICE_PORT": "7700",
        "KVCTL_SIDECAR_PORT_7700_TCP_ADDR": "10.0.0.1",
        "KVCTL_PORT": "tcp://10.0.0.2:7700",
    }
    sidecar = SidecarProcess(engine_dir, tmp_path, **links)
    sidecar.end()
    ended = run_to_end(KVCTL_SIDECAR_LISTEN="tcp://10.0.0.1:7700")
    assert ended.returncode == 2
    assert "enableServiceLinks" in ended.stderr


def test_check_says_what_the_settings_mean_and_starts_nothing(engine_dir):
    ended = run_to_end("--check", "--engine-dir", str(engine_dir), "--listen", "127.0.0.1:0", "--metrics", "off")
    assert ended.returncode == 0
    assert "settings are valid" in ended.stdout
    assert str(engine_dir) in ended.stdout


def test_check_finds_an_address_that_must_not_be_served(engine_dir):
    ended = run_to_end("--check", "--engine-dir", str(engine_dir), "--listen", "0.0.0.0:0", "--metrics", "off")
    assert ended.returncode == 4
    assert "TLS" in ended.stderr


# --- ending ------------------------------------------------------------------------------------------------------


def test_sigterm_during_the_start_ends_it_promptly(engine_dir):
    for wait_ms in (0, 20, 60, 100, 150, 200, 300):
        process = subprocess.Popen(
            command("--engine-dir", str(engine_dir), "--listen", "127.0.0.1:0", "--metrics", "off", "--grace", "1"),
            env=environment(),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        time.sleep(wait_ms / 1e3)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
        # Before the interpreter has run a line of ours, the signal's default action ends it: -15.
        assert process.returncode in (0, -signal.SIGTERM), stderr
        assert b"Traceback" not in stderr


def test_a_running_operation_is_finished_before_the_exit(sidecar, engine):
    sidecar.wait_ready()
    engine.do("hold_at", point="before_effect")
    answers: list[object] = []

    def call() -> None:
        with sidecar.stub() as stub:
            request = api.ResetPrefixCacheRequest(running_requests=types.RUNNING_REQUESTS_KEEP)
            answers.append(stub.ResetPrefixCache(request, timeout=60))

    thread = threading.Thread(target=call)
    thread.start()
    engine.do("wait_held")
    sidecar.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in sidecar.log(), 30)
    engine.do("let_go")
    assert sidecar.process.wait(60) == 0
    thread.join(60)
    assert isinstance(answers[0], api.ResetPrefixCacheResponse)
    assert [line["audit"] for line in sidecar.audit()] == ["begin", "end"]


def test_an_operation_that_waits_is_withdrawn_within_the_grace(engine_dir, tmp_path, engine):
    sidecar = SidecarProcess(engine_dir, tmp_path, "--grace", "1s")
    try:
        sidecar.wait_ready()
        engine.do("hold")
        answers: list[object] = []

        def call() -> None:
            with sidecar.stub() as stub:
                try:
                    stub.ResetPrefixCache(api.ResetPrefixCacheRequest(wait_for_idle=True), timeout=60)
                except grpc.RpcError as error:
                    answers.append(errors.parse(error))

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(lambda: len(sidecar.audit()) == 1, 30)
        began = time.monotonic()
        assert sidecar.terminate() == 0
        assert time.monotonic() - began < 20, "long before the operation's own deadline"
        thread.join(60)
        assert answers[0].code is grpc.StatusCode.CANCELLED
        assert sidecar.audit()[-1]["code"] == "CANCELLED"
    finally:
        sidecar.end()


def test_a_draining_sidecar_takes_nothing_new_and_says_so(engine_dir, tmp_path, engine):
    sidecar = SidecarProcess(engine_dir, tmp_path, "--grace", "60s")
    try:
        sidecar.wait_ready()
        engine.do("hold_at", point="before_effect")
        request = api.ResetPrefixCacheRequest(running_requests=types.RUNNING_REQUESTS_KEEP)
        with sidecar.stub() as stub:
            first = stub.ResetPrefixCache.future(request, timeout=60)
            engine.do("wait_held")
            sidecar.process.send_signal(signal.SIGTERM)
            wait_until(lambda: sidecar.get("/readyz")[0] == 503, 30)
            with pytest.raises(grpc.RpcError) as raised:
                stub.ReorderFreeQueue(api.ReorderFreeQueueRequest(), timeout=30)
            assert errors.parse(raised.value).reason == "SERVER_STOPPING"
            engine.do("let_go")
            first.result(timeout=60)
        assert sidecar.process.wait(60) == 0
    finally:
        sidecar.end()


def test_calls_that_outlast_the_grace_are_told_what_is_known_of_them(engine_dir, tmp_path, engine):
    sidecar = SidecarProcess(engine_dir, tmp_path, "--grace", "500ms")
    try:
        sidecar.wait_ready()
        engine.do("hold_at", point="before_effect")
        request = api.ResetPrefixCacheRequest(running_requests=types.RUNNING_REQUESTS_KEEP)
        renewal = api.RenewPauseRequest(pause_request_id=str(uuid.uuid4()), lease={"seconds": 5})
        with sidecar.stub() as stub:
            calls = [stub.ResetPrefixCache.future(request, timeout=60)]
            engine.do("wait_held")
            calls.append(stub.RenewPause.future(renewal, timeout=60))
            wait_until(lambda: len(sidecar.audit()) == 2, 30)
            assert sidecar.terminate() == 0
            told = [errors.parse(call.exception(timeout=60)) for call in calls]
        assert [(error.code, error.reason) for error in told] == [
            (grpc.StatusCode.DEADLINE_EXCEEDED, "OUTCOME_UNKNOWN")
        ] * 2
        assert [error.metadata["execution"] for error in told] == ["UNKNOWN"] * 2
        ends = [(line["code"], line["reason"]) for line in sidecar.audit() if line["audit"] == "end"]
        assert ends == [("DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN")] * 2, "as their callers were told"
    finally:
        sidecar.end()


def test_an_open_watch_does_not_hold_up_the_end_and_is_told(sidecar, engine):
    sidecar.wait_ready()
    with sidecar.stub() as stub:
        watch = stub.WatchAdmission(api.WatchAdmissionRequest(), timeout=60)
        next(watch)
        began = time.monotonic()
        assert sidecar.terminate() == 0
        assert time.monotonic() - began < 15, "before the grace of 20 s"
        with pytest.raises(grpc.RpcError) as raised:
            for _ in watch:
                pass
    told = errors.parse(raised.value)
    assert told.code is grpc.StatusCode.UNAVAILABLE
    # On a busy machine the process may end before its last words are out; the watch's own tests hold it to them.
    assert told.reason in ("SERVER_STOPPING", "REPLICA_UNREACHABLE")


def test_a_second_signal_leaves_at_once(engine_dir, tmp_path, engine):
    sidecar = SidecarProcess(engine_dir, tmp_path, "--grace", "60s")
    try:
        sidecar.wait_ready()
        engine.do("hold")
        with sidecar.stub() as stub:
            kept = stub.ResetPrefixCache.future(api.ResetPrefixCacheRequest(wait_for_idle=True), timeout=60)
            wait_until(lambda: len(sidecar.audit()) == 1, 30)
            sidecar.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in sidecar.log(), 30)
            sidecar.process.send_signal(signal.SIGTERM)
            assert sidecar.process.wait(30) == 1
            kept.cancel()
    finally:
        sidecar.end()


# --- serving -----------------------------------------------------------------------------------------------------


def test_get_replica_shows_identity_engines_and_capabilities(engine_dir, tmp_path, engine):
    sidecar = SidecarProcess(engine_dir, tmp_path, "--label", "pool=a", "--label", "zone=z1")
    try:
        sidecar.wait_ready()
        with sidecar.stub() as stub:
            replica = stub.GetReplica(api.GetReplicaRequest(), timeout=30).replica
    finally:
        sidecar.end()
    assert (replica.name, dict(replica.labels)) == ("r0", {"pool": "a", "zone": "z1"})
    (found,) = replica.engines
    assert found.connected
    assert found.engine.incarnation == engine.incarnation
    assert (found.model, found.block_size, found.blocks) == ("fake-model", 16, 128)
    assert {c.name for c in found.capabilities if c.available} >= {"reset.keep", "reorder.all_free", "pause"}


def test_an_admission_change_reaches_a_watcher_at_once(sidecar, engine):
    sidecar.wait_ready()
    with sidecar.stub() as stub:
        request = api.WatchAdmissionRequest()
        request.interval.nanos = 200_000_000
        watch = stub.WatchAdmission(request, timeout=60)
        verdicts = [next(watch).admission.engines[0].verdict]
        engine.kill()
        began = time.monotonic()
        for sample in watch:
            verdicts.append(sample.admission.engines[0].verdict)
            if verdicts[-1] == types.VERDICT_ENGINE_DEAD:
                break
        assert time.monotonic() - began < 30
        watch.cancel()


def test_metrics_are_valid_and_count_operations(sidecar, engine):
    sidecar.wait_ready()
    with sidecar.stub() as stub:
        stub.ResetPrefixCache(api.ResetPrefixCacheRequest(request_id=str(uuid.uuid4())), timeout=30)
    status, text = sidecar.get("/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    sample = next(s for s in families["kvctl_operations"].samples if s.name == "kvctl_operations_total")
    assert (sample.labels, sample.value) == ({"operation": "reset", "mode": "fail", "code": "OK"}, 1.0)


def test_a_page_that_does_not_exist_lists_those_that_do(sidecar):
    status, text = sidecar.get("/")
    assert status == 404
    assert "/metrics" in text


def test_reflection_is_served_on_loopback(sidecar):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with sidecar.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(stub.ServerReflectionInfo(asked, timeout=30))
    assert "kvctl.v1.CacheAdmin" in {service.name for service in answer.list_services_response.service}


@pytest.mark.slow
def test_a_long_idle_watch_is_not_thrown_off_for_its_pings(sidecar, engine):
    """Pings as often as the server says it takes them; three are one more than a server that does not would bear."""
    sidecar.wait_ready()
    assert channels.SERVER_LEAST_PING_INTERVAL_MS < channels.CLIENT_KEEPALIVE_MS
    eager_ms = channels.SERVER_LEAST_PING_INTERVAL_MS + 500
    options = [option for option in channels.options() if option[0] != "grpc.keepalive_time_ms"]
    target = addresses.parse(sidecar.address).target
    with grpc.insecure_channel(target, options=[*options, ("grpc.keepalive_time_ms", eager_ms)]) as channel:
        watch = replica_pb2_grpc.CacheAdminStub(channel).WatchAdmission(api.WatchAdmissionRequest(), timeout=60)
        next(watch)
        ended = threading.Event()
        threading.Thread(target=lambda: (_drain(watch), ended.set()), daemon=True).start()
        assert not ended.wait(3.3 * eager_ms / 1e3)
        watch.cancel()


def _drain(watch) -> None:
    try:
        for _ in watch:
            pass
    except grpc.RpcError:
        return
