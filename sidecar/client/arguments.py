"""What callers give, looked at before anything else is done with it.

A trainer reads its settings from files and flags, where no type checker looks. A text where a list is expected, or "5"
where a number is, must not fail deep inside in words that name nothing the caller wrote: every public function of the
client takes each argument through here first, and what is wrong is RequestInvalid with what was found and expected.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Collection, Mapping
from numbers import Real
from pathlib import Path
from typing import Final, TypeVar

from kvctl.v1 import fleet_pb2

from sidecar.client.errors import RequestInvalid
from sidecar.client.reach import given_id
from sidecar.coordinator.refusals import LONGEST_TIMEOUT_S, check_spec
from sidecar.coordinator.selectors import SelectorError, parse_replicas
from sidecar.rpc.errors import Failure

SHORTEST_TIMEOUT_S: Final = 0.001
"""A much shorter one would become 0 in the API's message, which means the default there."""
LEAST_INTERVAL_S: Final = 0.1
LONGEST_INTERVAL_S: Final = 3600.0
"""As the sidecars have them, like those of a lease in `weights`."""

_REPLICAS: Final = "a text: \"all\", names and globs ('r0,decode-*'), or a label selector ('pool=a')"
_TARGETS: Final = "a list of addresses, such as ['127.0.0.1:7700', 'r1=unix:/run/kvctl/r1.sock']"
_ROLLOUT: Final = "a message kvctl.v1.fleet_pb2.Rollout"

_T = TypeVar("_T")


def wrong(name: str, value: object, expected: str) -> RequestInvalid:
    """The error for one argument."""
    kind = "" if value is None else f" ({type(value).__name__})"
    return RequestInvalid(f"{name} is {reprlib.repr(value)}{kind}; expected {expected}")


def text(name: str, value: object, expected: str = "a text", *, longest: int = 0) -> str:
    """A text that can be sent; at most `longest` characters unless that is 0."""
    if not isinstance(value, str):
        raise wrong(name, value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, f"{expected}, in valid Unicode") from None
    if longest and len(value) > longest:
        raise RequestInvalid(f"{name} has {len(value)} characters; expected at most {longest}")
    return value


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that Python takes for them: "no" is true."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")
    return value


def seconds(name: str, value: object, least: float, most: float) -> float:
    """A time within a range, in seconds."""
    expected = f"{least:g} to {most:g} seconds"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, value, f"a number, {expected}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not least <= found <= most:
        raise RequestInvalid(f"{name} is {found:g}; expected {expected}")
    return found


def timeout(name: str, value: object) -> float:
    """How long a call may take, in seconds."""
    return seconds(name, value, SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S)


def interval(name: str, value: object) -> float:
    """How often to look, in seconds; 0 for changes only."""
    found = seconds(name, value, 0.0, LONGEST_INTERVAL_S)
    if 0 < found < LEAST_INTERVAL_S:
        raise RequestInvalid(
            f"{name} is {found:g}; expected 0 (changes only), or {LEAST_INTERVAL_S:g} to {LONGEST_INTERVAL_S:g} seconds"
        )
    return found


def one_of(name: str, value: object, known: Mapping[str, _T]) -> _T:
    """What a word stands for."""
    if not isinstance(value, str):
        raise wrong(name, value, f"one of {', '.join(map(repr, known))}")
    if value not in known:
        raise RequestInvalid(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}")
    return known[value]


def operation_id(name: str, value: object) -> str:
    """A UUID in its usual form, or nothing."""
    found = text(name, value, "a UUID as a text, such as str(uuid.uuid4())")
    if not found:
        return ""
    try:
        return given_id(found)
    except ValueError as error:
        raise RequestInvalid(f"{name}: {error}") from None


def replicas(value: object) -> fleet_pb2.Targets:
    """Which replicas are meant."""
    found = text("replicas", value, _REPLICAS)
    try:
        return parse_replicas(found)
    except SelectorError as error:
        raise RequestInvalid(str(error).removeprefix("--")) from error


def targets(value: object) -> tuple[str, ...]:
    """Addresses, each of them a text."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise wrong("targets", value, _TARGETS)
    return tuple(text("an address in targets", each) for each in value)


def file(name: str, value: object) -> Path | None:
    """A path; None when there is none."""
    if value is None or value == "":
        return None
    if not isinstance(value, str | os.PathLike):
        raise wrong(name, value, "a path")
    return Path(text(name, os.fspath(value), "a path as a text"))


def rollout(value: object) -> fleet_pb2.Rollout | None:
    """The API's message, or none."""
    if value is not None and not isinstance(value, fleet_pb2.Rollout):
        raise wrong("rollout", value, _ROLLOUT)
    return value


def sensible(spec: fleet_pb2.OperationSpec) -> None:
    """RequestInvalid for what a coordinator refuses before it calls anybody, also where there is no coordinator."""
    try:
        check_spec(spec)
    except Failure as error:
        raise RequestInvalid(error.message, reason=error.reason) from error
