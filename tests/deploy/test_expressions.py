"""Every expression of rules and dashboards, asked of a real Prometheus over what a real replica exposed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from monitoring import Prometheus, eventually, http_server, prometheus

from deploy.observability import recording
from deploy.observability.alerts import ALERTS, SIDECAR_PORT
from deploy.observability.dashboards import DASHBOARDS
from deploy.observability.generate import DEPLOY
from deploy.observability.model import Alert

RECORDED = Path(__file__).parent / "recorded"
RULES = DEPLOY / "observability/prometheus/kvctl.rules.yaml"
POD = {"namespace": "llm", "pod": "vllm-0"}
SOURCES = {
    "vllm": POD,
    "sidecar": {**POD, "endpoint": SIDECAR_PORT},
    "coordinator": {"namespace": "llm", "pod": "kvctl-operator-0"},
}
SELECTOR = re.compile(r'(?<!["\w-])((?:kvctl|vllm)[a-z_:]*|up(?=\{))(?:\{([^}]*)\})?')
SCRAPES_OF_THE_FIRST = 2


def exposition(name: str, scrape: int) -> str:
    """The first recording for some scrapes, the second from then on, so that counters grow. The time of the last reset
    is brought to now: what asks how long ago it was would otherwise ask about the day of the recording.
    """
    text = (RECORDED / f"{name}.{1 if scrape <= SCRAPES_OF_THE_FIRST else 2}.prom").read_text()
    stamp = f"{time.time():.3f}"
    return re.sub(r"(kvctl_last_reset_timestamp_seconds\{[^}]*\}) (?!NaN)\S+", rf"\g<1> {stamp}", text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    scrapes = dict.fromkeys(SOURCES, 0)
    with ExitStack() as stack:
        targets = {}
        for name, labels in SOURCES.items():

            def page(_path: str, name: str = name) -> str:
                scrapes[name] += 1
                return exposition(name, scrapes[name])

            targets[stack.enter_context(http_server(page))] = labels
        running = stack.enter_context(prometheus(tmp_path_factory.mktemp("prometheus"), targets, RULES))
        wanted = SCRAPES_OF_THE_FIRST + 3
        eventually(lambda: min(scrapes.values()) >= wanted, 60, "enough scrapes")
        yield running


def filled_in(expression: str) -> str:
    return expression.replace("$namespace", ".*").replace("$pod", ".*").replace("$__from", "0")


DASHBOARD_EXPRESSIONS = sorted({(d.uid, e) for d in DASHBOARDS for e in d.expressions()})


@pytest.mark.parametrize(("dashboard", "expression"), DASHBOARD_EXPRESSIONS, ids=str)
def test_an_expression_of_a_dashboard_returns_series(server: Prometheus, dashboard: str, expression: str) -> None:
    # A scrape that a busy machine misses makes its series stale until the next one.
    eventually(lambda: server.query(filled_in(expression)), 15, f"{dashboard}: a series for {expression}")


@pytest.mark.parametrize("rule", recording.RECORDINGS, ids=lambda rule: rule.name)
def test_a_recording_rule_returns_series(server: Prometheus, rule: recording.Recording) -> None:
    eventually(lambda: server.query(rule.expr), 15, f"a series for {rule.name}")


def selectors(expression: str) -> list[tuple[str, list[str]]]:
    """(metric, label matchers) of every selector, without the values that only trouble has (a code, a result)."""
    found = []
    for metric, matchers in SELECTOR.findall(expression):
        kept = re.findall(r'\w+(?:=~|!=|=)"[^"]*"', matchers)
        found.append((metric, [re.sub(r'^(code|result)(=~|=)".*"', r'\1!=""', one) for one in kept]))
    return found


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_selector_of_an_alert_matches_series_of_a_healthy_replica(server: Prometheus, alert: Alert) -> None:
    assert server.query(alert.expr) is not None
    asked = selectors(alert.expr)
    assert asked
    for metric, matchers in asked:
        assert server.query(f"{metric}{{{','.join(matchers)}}}"), f"{metric} {matchers}"


def test_nothing_fires_on_a_healthy_replica_that_was_refused_a_reset(server: Prometheus) -> None:
    expected = {"KvctlFleetOperationFailures"}
    """The recording has a refused reset through the coordinator, which that alert is about."""
    firing = {alert.name for alert in ALERTS if server.query(alert.expr)}
    assert firing <= expected | {"KvctlFreeQueueFragmented"}


def test_prometheus_itself_evaluates_every_rule_without_an_error(server: Prometheus) -> None:
    rules = server.rules()
    names = {rule["name"] for rule in rules}
    assert names == {alert.name for alert in ALERTS} | {rule.name for rule in recording.RECORDINGS}
    eventually(lambda: all(rule["health"] != "unknown" for rule in server.rules()), 60, "every rule evaluated")
    assert {rule["name"]: rule.get("lastError") for rule in server.rules() if rule["health"] != "ok"} == {}


def test_kvctl_and_vllm_meet_on_pod_and_engine(server: Prometheus) -> None:
    joined = server.query(
        "vllm:num_requests_running * on (namespace, pod, engine) group_left () (1 + kvctl_admission_stalled)"
    )
    assert [series["metric"]["engine"] for series in joined] == ["0"]
    assert joined[0]["metric"]["model_name"] == "tiny"


def test_no_name_of_vllm_is_one_that_it_calls_deprecated() -> None:
    text = (RECORDED / "vllm.2.prom").read_text()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    used = {metric for _, e in DASHBOARD_EXPRESSIONS for metric, _ in SELECTOR.findall(e) if metric.startswith("vllm")}
    used |= {metric for a in ALERTS for metric, _ in SELECTOR.findall(a.expr) if metric.startswith("vllm")}
    assert used
    for metric in used:
        family = next(name for name in (metric, metric.removesuffix("_bucket")) if name in helps)
        assert "deprecat" not in helps[family].lower()


def test_the_two_provisionings_of_an_alert_say_the_same() -> None:
    """Grafana's file has the same names, expressions, holds, labels and texts as Prometheus' rules."""
    grafana = yaml.safe_load((DEPLOY / "observability/grafana/alerting/kvctl.yaml").read_text())
    assert grafana["apiVersion"] == 1
    theirs = {
        rule["title"]: (rule["data"][0]["model"]["expr"], rule["for"], rule["labels"], rule["annotations"])
        for group in grafana["groups"]
        for rule in group["rules"]
    }
    ours = {
        rule["alert"]: (
            rule["expr"],
            rule["for"],
            rule["labels"],
            {name: text.replace("$value", "$values.A.Value") for name, text in rule["annotations"].items()},
        )
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    assert theirs == ours
    uids = [rule["uid"] for group in grafana["groups"] for rule in group["rules"]]
    assert len(set(uids)) == len(uids)
    assert all(len(uid) <= 40 for uid in uids)
