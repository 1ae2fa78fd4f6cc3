"""What an alert, a recording rule and a rule group are, before any tool's format.

Prometheus, the Prometheus operator and Grafana each want the same alert in another shape. Three hand-written copies
drift apart, so there is one list of alerts (`alerts`, `recording`) and one renderer a tool; `generate` writes the
files, and a test proves that the checked-in files are current.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"
"""What a YAML or JSON file can hold."""

Node: TypeAlias = Mapping[str, Json]
"""A mapping in such a file."""

RUNBOOK_BASE: Final = "https://github.com/kvctl/kvctl/blob/main/docs/runbooks"
"""Where the pages of docs/runbooks can be read. A placeholder until the project has a public home: a fork or a
mirror regenerates every file with `--runbook-base URL`, and this line is the only one that names it."""

REPLICA: Final = "{{ or $labels.pod $labels.instance }}"
"""Names the replica in a summary: the pod in Kubernetes, the scraped address elsewhere."""

NAMESPACE: Final = "{{ with $labels.namespace }} of namespace {{ . }}{{ end }}"
"""Says which namespace in Kubernetes, and nothing elsewhere."""

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `expr` yields a series for each firing thing and never a negative value."""

    name: str
    expr: str
    hold: str
    """How long it must hold ("2m"); "0m" fires at the first evaluation."""
    severity: Severity
    finding: str
    """What is wrong, in one line: verdict, replica, engine."""
    first_step: str
    """The remedy in one line: a pager shows the summary and no more."""
    remedy: str
    """What to do, in one or two sentences; the runbook has the rest."""
    verdict: str = ""
    """The admission verdict it stands for, if any."""

    @property
    def summary(self) -> str:
        """What is wrong, where, and what to do first."""
        return f"{self.finding} {self.first_step}"

    @property
    def runbook(self) -> str:
        """File name of its page in docs/runbooks."""
        return f"{self.name}.md"

    @property
    def labels(self) -> dict[str, str]:
        """Labels added to every firing series."""
        labels: dict[str, str] = {"severity": self.severity}
        if self.verdict:
            labels["verdict"] = self.verdict
        return labels


@dataclass(frozen=True, slots=True)
class Recording:
    """One recording rule, named level:metric:operations."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together."""

    name: str
    interval: str
    alerts: tuple[Alert, ...] = ()
    recordings: tuple[Recording, ...] = ()
