"""Every alert fires when it should, stays quiet when it should, and tells who, what and what to do (promtool)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from programs import program

from deploy.observability.alerts import ALERTS, SIDECAR_PORT, verdict_series
from deploy.observability.generate import DEPLOY
from deploy.observability.model import NAMESPACE, REPLICA, RUNBOOK_BASE, Alert

RULES = DEPLOY / "observability/prometheus/kvctl.rules.yaml"
ROOT = DEPLOY.parent
TARGET = {"namespace": "llm", "pod": "vllm-0", "instance": "10.0.0.1:7701"}
ENGINE = {**TARGET, "engine": "0"}
UP = "kvctl_build_info"


@dataclass
class Series:
    """A metric with its labels beside the target's, and its samples, one every 15 s in promtool's notation."""

    name: str
    values: str
    labels: dict[str, str] = field(default_factory=dict)
    target: dict[str, str] = field(default_factory=lambda: TARGET)

    def node(self) -> dict[str, str]:
        labels = ",".join(f'{k}="{v}"' for k, v in {**self.target, **self.labels}.items())
        return {"series": f"{self.name}{{{labels}}}", "values": self.values}


@dataclass
class Case:
    """Series under which an alert fires at `at`, and series under which it must not."""

    fires: list[Series]
    quiet: list[Series]
    at: str
    labels: dict[str, str] = field(default_factory=lambda: ENGINE)
    value: dict[str, str] = field(default_factory=dict)
    """Template filter -> what it prints for the value."""


def verdict(name: str, values: str) -> Series:
    return Series("kvctl_admission_verdict", values, {"engine": "0", "verdict": name})


def held(name: str, hold_steps: int, at: str) -> Case:
    """Fires after `hold_steps` samples of 15 s; a verdict that goes away one sample earlier does not."""
    return Case(
        [verdict(name, f"0 1x{hold_steps + 20}")],
        [verdict(name, f"0 1x{hold_steps - 1} 0x40"), verdict("FLOWING", "1x200")],
        at,
    )


def engine(name: str, values: str, **labels: str) -> Series:
    return Series(name, values, {"engine": "0", **labels})


def operations(values: str, **labels: str) -> Series:
    return Series("kvctl_operations_total", values, {"mode": "fail", **labels})


BUILD = Series(UP, "1x200", {"version": "0.1.0"})
VLLM = Series("vllm:num_requests_running", "0x2000", {"engine": "0", "model_name": "tiny"})
BORN = "_x10 1x200"
"""A counter whose series appears with its first increment, as every labelled counter does."""

CASES: dict[str, Case] = {
    "KvctlAdmissionHeldBlocksDeadlock": held("HELD_BLOCKS_DEADLOCK", 4, "90s"),
    "KvctlAdmissionHeadCannotFit": held("HEAD_CANNOT_FIT", 4, "90s"),
    "KvctlAdmissionWaitingRemoteKV": held("WAITING_REMOTE_KV", 20, "330s"),
    "KvctlAdmissionThrashing": held("THRASHING", 20, "330s"),
    "KvctlAdmissionDegraded": held("DEGRADED", 40, "630s"),
    "KvctlAdmissionBlocksLeaked": held("BLOCKS_LEAKED", 40, "630s"),
    "KvctlAdmissionPaused": held("PAUSED", 40, "630s"),
    "KvctlAdmissionSleeping": Case(
        [verdict("SLEEPING", "1x60"), engine("kvctl_requests", "3x60", state="waiting")],
        [verdict("SLEEPING", "1x60"), engine("kvctl_requests", "0x60", state="waiting")],
        "11m",
    ),
    "KvctlEngineHung": held("ENGINE_HUNG", 4, "90s"),
    "KvctlEngineStopped": held("ENGINE_STOPPED", 4, "90s"),
    "KvctlEngineDead": held("ENGINE_DEAD", 2, "60s"),
    "KvctlEngineStartingTooLong": held("STARTING", 80, "1230s"),
    "KvctlAdmissionUnknown": held("UNKNOWN", 40, "630s"),
    "KvctlAdmissionStalled": Case(
        [engine("kvctl_admission_stalled", "1x40"), verdict("A_VERDICT_OF_TOMORROW", "1x40")],
        [engine("kvctl_admission_stalled", "1x40"), verdict("HELD_BLOCKS_DEADLOCK", "1x40")],
        "5m",
    ),
    "KvctlRequestStarving": Case(
        [engine("kvctl_oldest_waiting_seconds", "660x60"), engine("kvctl_admission_stalled", "0x60")],
        [engine("kvctl_oldest_waiting_seconds", "660x60"), engine("kvctl_admission_stalled", "1x60")],
        "6m",
        value={"humanizeDuration": "11m 0s"},
    ),
    "KvctlResetsRefused": Case(
        [BUILD, operations("_x10 3x200", operation="reset", code="FAILED_PRECONDITION")],
        [
            BUILD,
            operations("_x10 3x200", operation="reset", code="FAILED_PRECONDITION"),
            operations("_x12 1x200", operation="reset", code="OK"),
        ],
        "8m",
        TARGET,
        {"humanize": "3"},
    ),
    "KvctlOperationsTimedOut": Case(
        [BUILD, operations(BORN, operation="reset", code="DEADLINE_EXCEEDED")],
        [BUILD, operations("5x200", operation="reset", code="DEADLINE_EXCEEDED")],
        "8m",
        {**TARGET, "operation": "reset"},
        {"humanize": "1"},
    ),
    "KvctlOperationOutcomeUnknown": Case(
        [Series("kvctl_coordinator_operations_unknown", "0 2x60")],
        [Series("kvctl_coordinator_operations_unknown", "0 2x10 0x60")],
        "6m",
        TARGET,
        {"humanize": "2"},
    ),
    "KvctlOperationRaised": Case(
        [BUILD, operations(BORN, operation="reorder", code="INTERNAL")],
        [BUILD, operations(BORN, operation="reorder", code="OK")],
        "8m",
        {**TARGET, "operation": "reorder"},
    ),
    "KvctlResetStorm": Case(
        [BUILD, operations("_x4 1+1x24 25x100", operation="reset", code="OK")],
        [BUILD, operations("_x4 1+1x9 10x100", operation="reset", code="OK")],
        "9m",
        TARGET,
        {"humanize": "25"},
    ),
    "KvctlEnginePauseLong": Case(
        [
            Series("kvctl_engine_pause_seconds_bucket", "0+0x80", {"engine": "0", "le": "0.25"}),
            Series("kvctl_engine_pause_seconds_bucket", "0+1x80", {"engine": "0", "le": "1"}),
            Series("kvctl_engine_pause_seconds_bucket", "0+1x80", {"engine": "0", "le": "+Inf"}),
        ],
        [
            Series("kvctl_engine_pause_seconds_bucket", "0+1x80", {"engine": "0", "le": "0.25"}),
            Series("kvctl_engine_pause_seconds_bucket", "0+1x80", {"engine": "0", "le": "1"}),
            Series("kvctl_engine_pause_seconds_bucket", "0+1x80", {"engine": "0", "le": "+Inf"}),
        ],
        "16m",
        TARGET,
        {"humanizeDuration": "992.5ms"},
    ),
    "KvctlFreeQueueFragmented": Case(
        [engine("kvctl_free_queue_contiguity_ratio", "0.125x200")],
        [engine("kvctl_free_queue_contiguity_ratio", "0.125x100 0.9x100")],
        "31m",
        value={"humanizePercentage": "12.5%"},
    ),
    "KvctlWeightUpdateAbandoned": Case(
        [engine("kvctl_abandoned_update", "0 1x10")],
        [engine("kvctl_abandoned_update", "0x10"), verdict("PAUSED", "1x10")],
        "1m",
    ),
    "KvctlSidecarAbsent": Case(
        [VLLM, Series("up", "0x60", {"endpoint": SIDECAR_PORT})],
        [VLLM, Series("up", "1x60", {"endpoint": SIDECAR_PORT}), Series("kvctl_watchers", "0x60")],
        "6m",
        {"namespace": "llm", "pod": "vllm-0"},
    ),
    "KvctlAbsent": Case([BUILD], [BUILD, Series("kvctl_watchers", "0x60")], "11m", {}),
    "KvctlReplicasUnreachable": Case(
        [
            # A coordinator, the leading operator and the one that stands by look at the same replicas: one alert.
            Series("kvctl_coordinator_replicas", "1x60", {"state": "unreachable"}),
            Series("kvctl_coordinator_replicas", "2x60", {"state": "unreachable"}, {**TARGET, "pod": "operator-0"}),
            Series("kvctl_coordinator_replicas", "2x60", {"state": "unreachable"}, {**TARGET, "pod": "operator-1"}),
        ],
        [Series("kvctl_coordinator_replicas", "2x60", {"state": "ready"})],
        "11m",
        {"namespace": "llm"},
        {"humanize": "2"},
    ),
    "KvctlFleetOperationFailures": Case(
        [
            BUILD,
            Series("kvctl_coordinator_replica_results_total", BORN, {"operation": "reset", "result": "unreachable"}),
        ],
        [
            BUILD,
            Series("kvctl_coordinator_replica_results_total", BORN, {"operation": "reset", "result": "succeeded"}),
        ],
        "8m",
        {**TARGET, "operation": "reset"},
        {"humanize": "1"},
    ),
    "KvctlStoreFailed": Case(
        [Series("kvctl_coordinator_store_failed", "0 1x10")],
        [Series("kvctl_coordinator_store_failed", "0 1x3 0x10")],
        "2m",
        TARGET,
    ),
    "KvctlDiscoveryIncomplete": Case(
        [Series("kvctl_coordinator_discovery_incomplete", "0 1x60")],
        [Series("kvctl_coordinator_discovery_incomplete", "0 1x30 0x30")],
        "11m",
        TARGET,
    ),
}


def rendered(template: str, case: Case) -> str:
    """What Prometheus makes of one of our templates, for this case's labels and value."""
    text = template.replace("{{ or $labels.pod $labels.instance }}", case.labels.get("pod", ""))
    where = case.labels.get("namespace", "")
    text = text.replace(NAMESPACE, f" of namespace {where}" if where else "")
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: case.labels.get(m[1], ""), text)
    return re.sub(r"\{\{ \$value \| (\w+) \}\}", lambda m: case.value[m[1]], text)


def expected(alert: Alert, case: Case) -> dict[str, dict[str, str]]:
    return {
        "exp_labels": {**case.labels, **alert.labels},
        "exp_annotations": {
            "summary": rendered(alert.summary, case),
            "description": rendered(alert.remedy, case),
            "runbook_url": f"{RUNBOOK_BASE}/{alert.runbook}",
        },
    }


def run_promtool(
    tmp_path: Path, series: list[Series], alert: str, at: str, want: list[dict[str, dict[str, str]]]
) -> None:
    unit = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [one.node() for one in series],
                "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": want}],
            }
        ],
    }
    path = tmp_path / "unit.yaml"
    path.write_text(yaml.safe_dump(unit))
    done = subprocess.run([program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rule_file() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_and_no_case_is_left_over() -> None:
    assert sorted(CASES) == sorted(alert.name for alert in ALERTS)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_fires_naming_replica_verdict_and_remedy(alert: Alert, tmp_path: Path) -> None:
    case = CASES[alert.name]
    run_promtool(tmp_path, case.fires, alert.name, case.at, [expected(alert, case)])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_stays_quiet_when_nothing_is_wrong(alert: Alert, tmp_path: Path) -> None:
    case = CASES[alert.name]
    run_promtool(tmp_path, case.quiet, alert.name, case.at, [])


def absence(tmp_path: Path, at: str, *series: Series, fires: bool) -> None:
    case = Case([], [], at, {"namespace": "llm", "pod": "vllm-0"})
    (alert,) = (a for a in ALERTS if a.name == "KvctlSidecarAbsent")
    run_promtool(tmp_path, [VLLM, *series], alert.name, at, [expected(alert, case)] if fires else [])


def test_a_vllm_that_never_had_a_sidecar_misses_none(tmp_path: Path) -> None:
    other = Series("kvctl_watchers", "0x2000", target={**TARGET, "pod": "vllm-1"})
    absence(tmp_path, "1h", other, fires=False)


def test_a_sidecar_that_has_gone_is_missed_although_it_is_no_target_any_more(tmp_path: Path) -> None:
    absence(tmp_path, "1h", Series("kvctl_watchers", "0x40 stale"), fires=True)


def test_a_sidecar_that_was_taken_out_is_not_missed_for_ever(tmp_path: Path) -> None:
    absence(tmp_path, "6h30m", Series("kvctl_watchers", "0x40 stale"), fires=False)


def test_a_sidecar_that_is_still_a_target_is_missed_for_as_long_as_it_is_away(tmp_path: Path) -> None:
    gone = [Series("kvctl_watchers", "0x40 stale"), Series("up", "1x40 0x2000", {"endpoint": SIDECAR_PORT})]
    absence(tmp_path, "6h30m", *gone, fires=True)


def test_a_pod_that_has_gone_as_a_whole_misses_no_sidecar(tmp_path: Path) -> None:
    vllm = Series("vllm:num_requests_running", "0x40 stale", {"engine": "0"})
    run_promtool(tmp_path, [vllm, Series("kvctl_watchers", "0x40 stale")], "KvctlSidecarAbsent", "1h", [])


def test_both_ways_of_scraping_name_the_sidecar_s_port_as_the_alert_does() -> None:
    monitor = next(yaml.safe_load_all((DEPLOY / "kustomize/components/monitoring/podmonitor.yaml").read_text()))
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == [SIDECAR_PORT]
    for patch in ("sidecar-patch.yaml", "sidecar-patch-statefulset.yaml"):
        spec = yaml.safe_load((DEPLOY / "kustomize/components/sidecar" / patch).read_text())["spec"]["template"]["spec"]
        ports = [port for one in spec["initContainers"] for port in one.get("ports", [])]
        assert {"name": SIDECAR_PORT, "containerPort": 7701} in ports
    static = yaml.safe_load((DEPLOY / "observability/prometheus/scrape-static.yaml").read_text())
    (rule,) = static["scrape_configs"][0]["relabel_configs"]
    assert (rule["target_label"], rule["replacement"]) == ("endpoint", SIDECAR_PORT)
    targets = [target for one in static["scrape_configs"][0]["static_configs"] for target in one["targets"]]
    assert [target for target in targets if re.fullmatch(rule["regex"], target)] == ["10.0.0.1:7701", "10.0.0.2:7701"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_summary_says_where_what_and_what_to_do_first(alert: Alert) -> None:
    assert alert.summary == f"{alert.finding} {alert.first_step}"
    head = alert.finding.partition(": ")[0]
    assert head == (alert.verdict or head.upper()), "a summary begins with the verdict"
    if alert.name != "KvctlAbsent":
        assert REPLICA in alert.finding or NAMESPACE in alert.finding, "no replica, coordinator or namespace is named"
    if "engine" in CASES[alert.name].labels:
        assert "engine {{ $labels.engine }}" in alert.finding
    assert re.fullmatch(r"[A-Z].{10,100}[.?]", alert.first_step.replace(REPLICA, "POD")), "one short sentence, no more"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_first_step_is_one_that_the_runbook_has_too(alert: Alert) -> None:
    page = (ROOT / "docs/runbooks" / alert.runbook).read_text(encoding="utf-8")
    for named in re.findall(r"`([^`]+)`", alert.first_step.replace(REPLICA, "POD")):
        assert named in page, f"{alert.runbook} does not have `{named}`"


def test_an_old_failure_of_a_target_that_was_just_found_is_no_news(tmp_path: Path) -> None:
    found = [Series(UP, "_x10 1x60", {"version": "0.1.0"}), operations("_x10 7x60", operation="reset", code="INTERNAL")]
    run_promtool(tmp_path, found, "KvctlOperationRaised", "8m", [])


def test_outside_kubernetes_the_scraped_address_names_the_replica(tmp_path: Path) -> None:
    alert = next(a for a in ALERTS if a.name == "KvctlEngineDead")
    target = {"instance": "127.0.0.1:7701"}
    series = Series("kvctl_admission_verdict", "1x20", {"engine": "0", "verdict": "ENGINE_DEAD"}, target)
    case = Case([series], [], "2m", {"pod": target["instance"], "engine": "0"})
    want = expected(alert, case)
    want["exp_labels"] = {**target, "engine": "0", **alert.labels}
    run_promtool(tmp_path, [series], alert.name, "2m", [want])


def test_outside_kubernetes_no_namespace_is_named(tmp_path: Path) -> None:
    alert = next(a for a in ALERTS if a.name == "KvctlReplicasUnreachable")
    series = Series("kvctl_coordinator_replicas", "2x60", {"state": "unreachable"}, {"instance": "127.0.0.1:7711"})
    case = Case([series], [], "11m", {}, {"humanize": "2"})
    run_promtool(tmp_path, [series], alert.name, "11m", [expected(alert, case)])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_links_a_runbook_page_that_says_what_it_means_and_what_to_do(alert: Alert) -> None:
    page = ROOT / "docs/runbooks" / alert.runbook
    assert page.is_file(), f"write {page.relative_to(ROOT)}"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {alert.name}\n")
    for heading in ("## Meaning", "## Look", "## Do"):
        assert f"\n{heading}\n" in text, f"{page.name} has no {heading}"


def test_no_runbook_page_is_left_over() -> None:
    pages = {page.name for page in (ROOT / "docs/runbooks").glob("Kvctl*.md")}
    assert pages == {alert.runbook for alert in ALERTS}


def test_every_verdict_that_can_stall_has_an_alert() -> None:
    from kvctl.v1 import types_pb2

    healthy = {"UNSPECIFIED", "IDLE", "FLOWING", "SATURATED"}
    verdicts = {name.removeprefix("VERDICT_") for name in types_pb2.Verdict.keys()}  # noqa: SIM118 - an enum wrapper
    assert verdicts - healthy == {alert.verdict for alert in ALERTS if alert.verdict}
    assert verdict_series("PAUSED") in next(a.expr for a in ALERTS if a.verdict == "PAUSED")
