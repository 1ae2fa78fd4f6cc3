"""Which replicas a person means: names, globs, label selectors.

Label selectors are those of Kubernetes: `k=v`, `k==v`, `k!=v`, `k in (a,b)`, `k notin (a,b)`, `k`, `!k`, joined by
commas, all of which must hold. As there, `k!=v` and `k notin (..)` also match replicas without the label.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvctl.v1 import fleet_pb2

from sidecar.coordinator.targets import EVERY_REPLICA

_KEY: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_EQUALITY: Final = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})?")
_SET: Final = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)")
_EXISTS: Final = re.compile(rf"(!?)\s*({_KEY})")
_SEPARATOR: Final = re.compile(r"\s*(,|$)\s*")
_WHITESPACE: Final = re.compile(r"\s*")
_FORMS: Final = "k=v, k!=v, k in (a,b), k notin (a,b), k or !k, joined by commas"


class SelectorError(ValueError):
    """A selector cannot be read, or matches nothing. The text is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on the labels of a replica."""

    key: str
    operator: Literal["in", "notin", "exists", "absent"]
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels meet it."""
        match self.operator:
            case "in":
                return self.key in labels and labels[self.key] in self.values
            case "notin":
                return labels.get(self.key) not in self.values
            case "exists":
                return self.key in labels
            case "absent":
                return self.key not in labels


def parse_labels(text: str) -> tuple[Requirement, ...]:
    """Read a label selector; SelectorError names the place that cannot be read."""
    requirements: list[Requirement] = []
    at = _skip_spaces(text, 0)
    if at == len(text):
        raise SelectorError(f"the label selector is empty; expected {_FORMS}")
    while at < len(text):
        requirement, end = _requirement(text, at)
        requirements.append(requirement)
        separator = _SEPARATOR.match(text, end)
        if separator is None:
            raise _unreadable(text, end)
        at = separator.end()
        if separator.group(1) and at == len(text):
            raise SelectorError(f"label selector {text!r} ends with a comma; expected {_FORMS}")
    return tuple(requirements)


def _requirement(text: str, at: int) -> tuple[Requirement, int]:
    if found := _SET.match(text, at):
        values = frozenset(value.strip() for value in found.group(3).split(","))
        bad = sorted(value for value in values if not re.fullmatch(_VALUE, value))
        if bad:
            raise SelectorError(f"label selector {text!r}: {bad[0]!r} is not a label value")
        return Requirement(found.group(1), "in" if found.group(2) == "in" else "notin", values), found.end()
    if found := _EQUALITY.match(text, at):
        values = frozenset([found.group(3) or ""])
        return Requirement(found.group(1), "notin" if found.group(2) == "!=" else "in", values), found.end()
    if found := _EXISTS.match(text, at):
        return Requirement(found.group(2), "absent" if found.group(1) else "exists"), found.end()
    raise _unreadable(text, at)


def _skip_spaces(text: str, at: int) -> int:
    found = _WHITESPACE.match(text, at)
    return found.end() if found else at


def _unreadable(text: str, at: int) -> SelectorError:
    return SelectorError(f"label selector {text!r} cannot be read at {text[at : at + 20]!r}; expected {_FORMS}")


@dataclass(frozen=True, slots=True)
class Selection:
    """`kvctl.v1.Targets`, read and ready to be asked about one replica."""

    everything: bool = False
    patterns: tuple[str, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    text: str = "all"
    """As a person would write it."""

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether a replica with this name and these labels is meant."""
        if self.everything:
            return True
        if self.patterns:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        return all(requirement.holds(labels) for requirement in self.requirements)

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """Name patterns that no name meets."""
        known = list(names)
        return tuple(pattern for pattern in self.patterns if not fnmatch.filter(known, pattern))


def read_targets(targets: fleet_pb2.Targets) -> Selection:
    """Read the API's message; exactly one of its three fields must be set, unset as a whole means all."""
    given = [bool(targets.all), bool(targets.names), bool(targets.selector)]
    if sum(given) > 1:
        raise SelectorError("targets: set exactly one of all, names and selector")
    if targets.names:
        if not all(targets.names):
            raise SelectorError("targets: a replica name is empty")
        return Selection(patterns=tuple(targets.names), text=",".join(targets.names))
    if targets.selector:
        return Selection(requirements=parse_labels(targets.selector), text=targets.selector)
    return Selection(everything=True)


def parse_replicas(text: str) -> fleet_pb2.Targets:
    """Read what a person typed after --replicas: `all`, names and globs with commas, or a label selector.

    A lone word is a name, never "has this label": for that there is `--selector`.
    """
    stripped = text.strip()
    if stripped in (EVERY_REPLICA, "*"):
        return fleet_pb2.Targets(all=True)
    if re.search(r"[=()!]", stripped.replace("[!", "[")) or re.search(r"\s(in|notin)\b", stripped):
        parse_labels(stripped)
        return fleet_pb2.Targets(selector=stripped)
    names = [name.strip() for name in stripped.split(",")]
    if not all(names):
        raise SelectorError(f"--replicas {text!r}: a replica name is empty; expected all, names, globs or a selector")
    return fleet_pb2.Targets(names=names)


def none_matched(selection: Selection, known: Iterable[str]) -> SelectorError:
    """The error for a selection that means no known replica, naming the known ones."""
    names = sorted(known)
    if not names:
        what = "there are none yet: the inventory, or what else names them, is empty"
        return SelectorError(f"no replica matches {selection.text!r}; {what}; add replicas there")
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return SelectorError(f"no replica matches {selection.text!r}; known: {shown}")
