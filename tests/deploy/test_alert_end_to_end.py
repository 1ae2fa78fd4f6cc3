"""From a stalled engine to a pager and back: bridge, sidecar, Prometheus, Alertmanager, webhook, relief; all real."""

from __future__ import annotations

import json
import os
import queue
import signal
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
from sidecar_process import SidecarProcess  # noqa: E402

RULES = DEPLOY / "observability/prometheus/kvctl.rules.yaml"
POD = {"namespace": "llm", "pod": "vllm-0"}


def state(server: Prometheus, alert: str) -> str:
    """ "", "pending" or "firing"."""
    found = server.alerts(alert)
    return str(found[0]["state"]) if found else ""


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


def test_a_deadlocked_engine_pages_somebody_until_it_is_relieved(tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    engines.mkdir(mode=0o700)
    notices: queue.Queue[dict[str, Any]] = queue.Queue()
    name = "KvctlAdmissionHeldBlocksDeadlock"
    with (
        spawn_engine(engines, "--blocks", "64") as engine,
        http_server(on_post=lambda body: notices.put(json.loads(body))) as webhook,
        alertmanager(tmp_path / "am", f"http://{webhook}/hook") as pager,
    ):
        sidecar = SidecarProcess(engines, tmp_path)
        try:
            with prometheus(
                tmp_path / "prometheus",
                {sidecar.metrics: POD},
                impatient(RULES, "3s", tmp_path / "rules.yaml"),
                pager,
            ) as server:
                eventually(lambda: server.query("kvctl_admission_stalled == 0"), 20, "a healthy engine")
                engine.do("hold_waiting", state="loaded", blocks=30)
                engine.do("hold_waiting", state="loaded", blocks=30)
                engine.do("deadlock")
                eventually(lambda: state(server, name) == "pending", 60, f"{name} pending")
                eventually(lambda: state(server, name) == "firing", 20, f"{name} firing")
                told = next_notice(notices, name, "firing", 20)
                assert told["labels"]["severity"] == "critical"
                assert told["labels"]["verdict"] == "HELD_BLOCKS_DEADLOCK"
                assert told["annotations"]["summary"].startswith("HELD_BLOCKS_DEADLOCK: replica vllm-0, engine 0: ")
                assert "kvctl relieve --replicas vllm-0" in told["annotations"]["description"]
                assert told["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{name}.md")
                # What the runbook says:
                with sidecar.stub() as stub:
                    answer = stub.RelieveAdmission(replica_pb2.RelieveAdmissionRequest(), timeout=10)
                assert answer.engines[0].blocks_freed == 30
                engine.do("deadlock", on=False)
                eventually(lambda: state(server, name) == "", 30, f"{name} resolved")
                next_notice(notices, name, "resolved", 30)
        finally:
            sidecar.end()


def test_an_engine_that_dies_pages_somebody_although_the_sidecar_is_well(tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    engines.mkdir(mode=0o700)
    with spawn_engine(engines) as engine:
        sidecar = SidecarProcess(engines, tmp_path)
        try:
            rules = impatient(RULES, "1s", tmp_path / "rules.yaml")
            with prometheus(tmp_path / "prometheus", {sidecar.metrics: POD}, rules) as server:
                eventually(lambda: server.query("kvctl_engine_up == 1"), 20, "a healthy engine")
                engine.kill()
                eventually(lambda: state(server, "KvctlEngineDead") == "firing", 30, "KvctlEngineDead firing")
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
        vllm = stack.enter_context(engine_process(engines, step_ms=5))
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
            eventually(lambda: state(server, name) == "pending", 60, f"{name} pending")
            eventually(lambda: state(server, name) == "firing", 30, f"{name} firing")
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: state(server, name) == "", 60, f"{name} resolved")
        vllm.wait_finished(request)
