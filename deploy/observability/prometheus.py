"""Rule files for Prometheus, and the same groups as a PrometheusRule for the Prometheus operator."""

from __future__ import annotations

from deploy.observability.model import Alert, Group, Node, Recording


def alert_node(alert: Alert, runbook_base: str) -> Node:
    """One alert as Prometheus reads it."""
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": alert.labels,
        "annotations": {
            "summary": alert.summary,
            "description": alert.remedy,
            "runbook_url": f"{runbook_base}/{alert.runbook}",
        },
    }


def _recording_node(recording: Recording) -> Node:
    return {"record": recording.name, "expr": recording.expr}


def groups_node(groups: tuple[Group, ...], runbook_base: str) -> Node:
    """A whole rule file."""
    nodes: list[Node] = []
    for group in groups:
        rules = [_recording_node(r) for r in group.recordings] + [alert_node(a, runbook_base) for a in group.alerts]
        nodes.append({"name": group.name, "interval": group.interval, "rules": rules})
    return {"groups": nodes}


def prometheus_rule(groups: tuple[Group, ...], runbook_base: str) -> Node:
    """The same groups as a resource of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvctl", "labels": {"app.kubernetes.io/name": "kvctl"}},
        "spec": groups_node(groups, runbook_base),
    }
