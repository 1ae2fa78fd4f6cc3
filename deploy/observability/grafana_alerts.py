"""The same alerts as Grafana alert-rule provisioning (apiVersion 1), for those who alert from Grafana.

Grafana wants two nodes where PromQL has one: a query (A) and a threshold (B, the condition). The expressions already
filter, so the threshold only asks whether a series is there: every value here is 0 or more, and "greater than -1" is
that question. Templates differ in one name: what Prometheus calls `$value` is `$values.A.Value` in Grafana.
"""

from __future__ import annotations

import hashlib
from typing import Final

from deploy.observability.model import Alert, Group, Node

DATASOURCE_UID: Final = "prometheus"
"""Uid of the data source; Grafana's provisioning of data sources sets it."""

FOLDER: Final = "kvctl"
_LOOK_BACK_SECONDS: Final = 600


def _uid(name: str) -> str:
    """A uid that stays the same over regenerations; Grafana allows 40 characters."""
    return f"kvctl-{hashlib.sha256(name.encode()).hexdigest()[:20]}"


def _rule(alert: Alert, runbook_base: str) -> Node:
    window: Node = {"from": _LOOK_BACK_SECONDS, "to": 0}
    query: Node = {
        "refId": "A",
        "relativeTimeRange": window,
        "datasourceUid": DATASOURCE_UID,
        "model": {"refId": "A", "expr": alert.expr, "instant": True, "intervalMs": 1000, "maxDataPoints": 43200},
    }
    threshold: Node = {
        "refId": "B",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": "__expr__",
        "model": {
            "refId": "B",
            "type": "threshold",
            "expression": "A",
            "conditions": [{"evaluator": {"type": "gt", "params": [-1]}}],
        },
    }
    return {
        "uid": _uid(alert.name),
        "title": alert.name,
        "condition": "B",
        "data": [query, threshold],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": alert.hold,
        "labels": alert.labels,
        "annotations": {
            "summary": alert.summary.replace("$value", "$values.A.Value"),
            "description": alert.remedy.replace("$value", "$values.A.Value"),
            "runbook_url": f"{runbook_base}/{alert.runbook}",
        },
        "isPaused": False,
    }


def provisioning(groups: tuple[Group, ...], runbook_base: str) -> Node:
    """A file for Grafana's provisioning/alerting folder. Recording rules stay with Prometheus."""
    nodes: list[Node] = [
        {
            "orgId": 1,
            "name": group.name,
            "folder": FOLDER,
            "interval": "1m",
            "rules": [_rule(alert, runbook_base) for alert in group.alerts],
        }
        for group in groups
        if group.alerts
    ]
    return {"apiVersion": 1, "groups": nodes}
