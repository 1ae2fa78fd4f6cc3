"""Grafana panels in a few lines each: what the three dashboards are built from.

Only what differs between panels is said where a dashboard is defined; ids and positions are given out here, so that
a panel can be added without renumbering the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from deploy.observability.model import Json, Node

COLUMNS: Final = 24
"""Width of a Grafana row, grid units."""

DATASOURCE: Final[Node] = {"type": "prometheus", "uid": "${datasource}"}
"""The data source that the dashboard's own variable chooses."""

SCHEMA_VERSION: Final = 39
"""Grafana 10 and later read it as it is."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit` is a Grafana unit id: "s", "percentunit", "short", "ops", "dateTimeFromNow"."""

    title: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "table", "state-timeline"] = "timeseries"
    unit: str = "short"
    width: int = 12
    height: int = 8
    about: str = ""
    """Shown behind the panel's (i): what to read out of it."""
    warn_above: float | None = None
    """Value from which a stat turns red."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down filled by label_values(metric, label)."""

    name: str
    query: str
    multi: bool = True


@dataclass(frozen=True, slots=True)
class Annotation:
    """Marks on the time axis. The value of `expr` is where: milliseconds since the epoch, above `$__from`."""

    name: str
    expr: str
    title: str
    color: str = "orange"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard."""

    uid: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...] = ()
    annotations: tuple[Annotation, ...] = ()

    def expressions(self) -> list[str]:
        """Every PromQL expression in it."""
        found = [query.expr for panel in self.panels for query in panel.queries]
        return found + [annotation.expr for annotation in self.annotations]


def _target(query: Query, letter: str, kind: str) -> Node:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": query.instant,
        "range": not query.instant,
        "format": "table" if kind == "table" else "time_series",
    }


def _thresholds(panel: Panel) -> Node:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.warn_above is not None:
        steps.append({"color": "red", "value": panel.warn_above})
    return {"mode": "absolute", "steps": steps}


def _panel(panel: Panel, number: int, x: int, y: int) -> Node:
    targets = [_target(query, chr(ord("A") + i), panel.kind) for i, query in enumerate(panel.queries)]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "thresholds": _thresholds(panel)}, "overrides": []},
        "options": {},
        "targets": targets,
    }


def _laid_out(panels: tuple[Panel, ...]) -> list[Node]:
    """Left to right, top to bottom; a row is as high as its highest panel."""
    nodes: list[Node] = []
    x = y = row = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > COLUMNS:
            x, y, row = 0, y + row, 0
        nodes.append(_panel(panel, number, x, y))
        x, row = x + panel.width, max(row, panel.height)
    return nodes


def _variable(variable: Variable) -> Node:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,
        "sort": 1,
        "multi": variable.multi,
        "includeAll": variable.multi,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"} if variable.multi else {},
    }


def _annotation(annotation: Annotation) -> Node:
    return {
        "name": annotation.name,
        "datasource": DATASOURCE,
        "enable": True,
        "expr": annotation.expr,
        "iconColor": annotation.color,
        "titleFormat": annotation.title,
        "step": "15s",
        "useValueForTime": True,
    }


def render(dashboard: Dashboard) -> Node:
    """The dashboard as Grafana imports or provisions it."""
    datasource: Node = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["kvctl", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource, *(_variable(v) for v in dashboard.variables)]},
        "annotations": {"list": [_annotation(a) for a in dashboard.annotations]},
        "panels": _laid_out(dashboard.panels),
        "links": [{"type": "dashboards", "tags": ["kvctl"], "title": "kvctl", "asDropdown": True}],
    }
