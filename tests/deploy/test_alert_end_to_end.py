"""From a stalled engine to a pager and back: bridge, sidecar, Prometheus, Alertmanager, webhook, relief; all real."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvctl.v1 import replica_pb2
from monitoring import Prometheus, alertmanager, eventually, http_server, impatient, prometheus

from deploy.observability.generate import DEPLOY
from tests.fake_engine import spawn_engine

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/contract"))
from sidecar_process import SidecarProcess, environment  # noqa: E402

RULES = DEPLOY / "observability/prometheus/kvctl.rules.yaml"
POD = {"namespace": "llm", "pod": "vllm-0"}


def state(server: Prometheus, alert: str) -> str:
    """ "", "pending" or "firing"."""
    found = server.alerts(alert)
    return str(found[0]["state"]) if found else ""


def was_pending(server: Prometheus, alert: str) -> bool:
    """Whether it was pending before; seconds, which a busy machine may look away for, so Prometheus' own record."""
    series = f'ALERTS{{alertname="{alert}",alertstate="pending"}}'
    return bool(server.query(f"count_over_time({series}[10m])"))


def next_notice(notices: queue.Queue[dict[str, Any]], alert: str, status: str, seconds: float) -> dict[str, Any]:
    """The next notification about one alert with that status; others are passed over."""
    while True:
        try:
            notice = notices.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"the webhook was not told that {alert} is {status} within {seconds:g} s") from None
        for one in notice["alerts"]:
            if one["labels"]["alertname"] == alert and one["status"] == status:
                return dict(one)


def kvctl(line: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as it is written, with more options that say where the replica is."""
    program, *words = shlex.split(line)
    assert program == "kvctl"
    command = [sys.executable, "-m", "sidecar.cli.main", *words, *more]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_real_deadlock_pages_somebody_until_the_command_that_the_page_names_has_been_run(tmp_path: Path) -> None:
    from tests.deploy.deadlocked_engine import deadlock, deadlockable_engine

    engines = tmp_path / "engines"
    engines.mkdir(mode=0o700)
    notices: queue.Queue[dict[str, Any]] = queue.Queue()
    name, pod = "KvctlAdmissionHeldBlocksDeadlock", POD["pod"]
    with ExitStack() as stack:
        vllm = stack.enter_context(deadlockable_engine(engines))
        webhook = stack.enter_context(http_server(on_post=lambda body: notices.put(json.loads(body))))
        pager = stack.enter_context(alertmanager(tmp_path / "am", f"http://{webhook}/hook"))
        sidecar = SidecarProcess(engines, tmp_path, "--name", pod)
        stack.callback(sidecar.end)
        rules = impatient(RULES, "3s", tmp_path / "rules.yaml")
        server = stack.enter_context(prometheus(tmp_path / "prometheus", {sidecar.metrics: POD}, rules, pager))
        eventually(lambda: server.query("kvctl_admission_stalled == 0"), 60, "a healthy engine")
        requests = deadlock(vllm)
        eventually(lambda: state(server, name) == "firing", 90, f"{name} firing")
        assert was_pending(server, name)
        assert vllm.finished == {}
        told = next_notice(notices, name, "firing", 60)
        assert told["labels"]["severity"] == "critical"
        assert told["labels"]["verdict"] == "HELD_BLOCKS_DEADLOCK"
        assert told["annotations"]["summary"].startswith(f"HELD_BLOCKS_DEADLOCK: replica {pod}, engine 0: ")
        page = ROOT / told["annotations"]["runbook_url"].partition("/blob/main/")[2]
        assert page.name == f"{name}.md"
        command = re.search(r"`(kvctl relieve [^`]+)`", told["annotations"]["summary"])
        assert command is not None
        assert command[1].replace(pod, "POD") in page.read_text()
        done = kvctl(command[1], "--target", sidecar.address)
        assert done.returncode == 0, done.stdout + done.stderr
        vllm.wait_finished(*requests)
        eventually(lambda: state(server, name) == "", 60, f"{name} resolved")
        next_notice(notices, name, "resolved", 60)


def test_an_engine_that_dies_pages_somebody_although_the_sidecar_is_well(tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    engines.mkdir(mode=0o700)
    with spawn_engine(engines) as engine:
        sidecar = SidecarProcess(engines, tmp_path)
        try:
            rules = impatient(RULES, "1s", tmp_path / "rules.yaml")
            with prometheus(tmp_path / "prometheus", {sidecar.metrics: POD}, rules) as server:
                eventually(lambda: server.query("kvctl_engine_up == 1"), 60, "a healthy engine")
                engine.kill()
                eventually(lambda: state(server, "KvctlEngineDead") == "firing", 60, "KvctlEngineDead firing")
                assert state(server, "KvctlAbsent") == ""
        finally:
            sidecar.end()


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_real_vllm_engine_that_stops_pages_somebody_and_the_alert_resolves_when_it_goes_on(tmp_path: Path) -> None:
    from tests.engine.conftest import engine_process

    engines = tmp_path / "engines"
    engines.mkdir(mode=0o700)
    name = "KvctlEngineStopped"
    with ExitStack() as stack:
        # Slow steps: tokens must flow for longer than the time between two scrapes.
        vllm = stack.enter_context(engine_process(engines, step_ms=30))
        sidecar = SidecarProcess(engines, tmp_path)
        stack.callback(sidecar.end)
        rules = impatient(RULES, "2s", tmp_path / "rules.yaml")
        server = stack.enter_context(prometheus(tmp_path / "prometheus", {sidecar.metrics: POD}, rules))
        request = vllm.add(list(range(64)), 100_000 // 128)
        vllm.wait_tokens(request, 3)
        eventually(lambda: server.query('kvctl_admission_verdict{verdict="FLOWING"} == 1'), 60, "tokens flow")
        with sidecar.stub() as stub:
            pid = stub.GetReplica(replica_pb2.GetReplicaRequest(), timeout=10).replica.engines[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: state(server, name) == "firing", 90, f"{name} firing")
            assert was_pending(server, name)
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: state(server, name) == "", 60, f"{name} resolved")
        vllm.wait_finished(request)
