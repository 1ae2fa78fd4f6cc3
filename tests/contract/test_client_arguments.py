"""Wrong arguments: every public function of the client says what it found and what it expected, and calls nobody."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from fake_sidecar_server import FakeSidecar, serving
from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar import client
from sidecar.cli.commands.reset import refuse_contradictions
from sidecar.client import aio, arguments, errors, weights
from sidecar.coordinator.refusals import check_spec
from sidecar.replica import rules
from sidecar.rpc.errors import Failure

NOBODY = ["r0=127.0.0.1:1"]

NO_TEXT = [None, 7, b"all", ["r0"], {"r0"}, object(), "\ud800"]
NO_NUMBER = ["5", None, True, [30], object(), float("nan"), float("inf"), -1, 10**400]
NO_PATH = [7, b"fleet.yaml", ["fleet.yaml"], object()]
WRONG: dict[str, list[object]] = {
    "str": NO_TEXT,
    "RunningRequests": [*NO_TEXT, "KEEP"],
    "Scope": [*NO_TEXT, "all-free"],
    "Purpose": [*NO_TEXT, "weight-update"],
    "Abandon": [*NO_TEXT, "stay"],
    "Literal['keep', 'preempt']": [*NO_TEXT, "fail"],
    "bool": [None, 1, "no", [], object()],
    "float": NO_NUMBER,
    "str | Path | None": NO_PATH,
    "str | None": [7, b"h:1", ["h:1"], object()],
    "fleet_pb2.Rollout | None": [{"canary": 1}, "rolling", object()],
    "Sequence[str]": ["127.0.0.1:1", b"x", None, 7, [7], [None], [b"h:1"], {"r0": "127.0.0.1:1"}, object()],
}
"""Annotation of a parameter -> values that do not fit it."""

METHODS = [
    "reset_prefix_cache",
    "reorder_free_queue",
    "relieve_admission",
    "resume_scheduling",
    "weight_update",
    "admission",
    "watch_admission",
    "replicas",
]


def parameters(function: Callable[..., object]) -> list[tuple[str, object]]:
    """Each parameter with each value that does not fit it."""
    return [
        (name, value)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
        for value in WRONG[str(parameter.annotation).replace('"', "'")]
    ]


async def use(fleet: aio.Fleet, method: str, given: dict[str, Any]) -> None:
    """Call a method as far as it goes before anybody is asked."""
    made = getattr(fleet, method)(**given)
    if method == "watch_admission":
        await anext(made)
    elif method != "weight_update":
        await made


def test_every_public_method_is_in_the_table() -> None:
    public = {name for name, kind in vars(aio.Fleet).items() if not name.startswith("_") and callable(kind)}
    assert public - {"close"} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
async def test_an_argument_of_the_wrong_kind_is_named_with_what_was_expected(method: str) -> None:
    async with aio.Fleet(NOBODY) as fleet:
        for name, value in parameters(getattr(aio.Fleet, method)):
            with pytest.raises(errors.RequestInvalid, match="expected") as caught:
                await use(fleet, method, {name: value})
            assert str(caught.value).startswith(f"{name} "), (name, value)


@pytest.mark.parametrize("kind", [aio.Fleet, client.Fleet])
def test_a_fleet_is_not_made_of_arguments_of_the_wrong_kind(kind: type[aio.Fleet | client.Fleet]) -> None:
    for name, value in parameters(kind.__init__):
        others = {} if name in ("targets", "inventory", "coordinator") else {"targets": NOBODY}
        with pytest.raises(errors.RequestInvalid, match=r"targets|expected") as caught:
            kind(**{**others, name: value})  # type: ignore[arg-type]
        assert name in str(caught.value), (name, value)


def test_an_inventory_that_cannot_be_read_is_a_wrong_argument_and_no_unavailable_replica(tmp_path: Path) -> None:
    for content in (None, "replicas: 7"):
        file = tmp_path / "fleet.yaml"
        if content:
            file.write_text(content)
        with client.Fleet(inventory=file) as fleet, pytest.raises(errors.RequestInvalid, match=r"fleet\.yaml"):
            fleet.replicas()


def test_the_blocking_fleet_passes_every_argument_on() -> None:
    for method in set(METHODS) - {"watch_admission"}:
        mine = inspect.signature(getattr(client.Fleet, method)).parameters
        theirs = inspect.signature(getattr(aio.Fleet, method)).parameters
        assert {name: each.default for name, each in mine.items()} == {
            name: each.default for name, each in theirs.items()
        }
    with client.Fleet(NOBODY) as fleet:
        for method in set(METHODS) - {"watch_admission"}:
            for name in inspect.signature(getattr(aio.Fleet, method)).parameters:
                if name == "self":
                    continue
                with pytest.raises(errors.RequestInvalid, match=f"^{name} is <object"):
                    _enter(getattr(fleet, method)(**{name: object()}))


def _enter(made: Any) -> None:
    """A weight update checks its arguments when its block is entered."""
    made.__enter__()


def test_what_was_found_is_shown_with_its_type_and_cut() -> None:
    fleet = aio.Fleet(NOBODY)
    with pytest.raises(errors.RequestInvalid, match=r"^weight_version is \[0, 1, .*\.\.\.\] \(list\); expected"):
        fleet.weight_update(list(range(1000)))  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", [["127.0.0.1:1"], ("127.0.0.1:1",), {"127.0.0.1:1"}, dict.fromkeys(["h:1"]).keys()])
def test_any_collection_of_addresses_will_do(targets: Any) -> None:
    aio.Fleet(targets)


def test_a_fleet_of_another_event_loop_says_so() -> None:
    fleet = aio.Fleet(NOBODY)
    asyncio.run(fleet.__aenter__())
    with pytest.raises(errors.RequestInvalid, match="another event loop"):
        asyncio.run(fleet.replicas())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "^CA file .*/ca.pem cannot be read by uid [0-9]+: No such file or directory$"),
        ("hello", "^CA file .*/ca.pem contains no certificate; expected PEM$"),
    ],
)
@pytest.mark.parametrize("way", [{"targets": NOBODY}, {"coordinator": "127.0.0.1:1"}])
async def test_a_certificate_file_that_is_none_is_told_when_the_fleet_is_entered(
    tmp_path: Path, way: dict[str, Any], content: str | None, said: str
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(errors.RequestInvalid, match=said):
        await aio.Fleet(ca_file=file, **way).__aenter__()


# --- what makes no sense together ----------------------------------------------------------------------------------


async def test_a_combination_that_no_sidecar_takes_is_refused_before_any_call() -> None:
    fake = FakeSidecar("r0")
    async with serving(fake) as addresses, aio.Fleet(addresses) as fleet:
        with pytest.raises(errors.RequestInvalid, match="quarantine_running needs running_requests KEEP"):
            await fleet.reset_prefix_cache(quarantine_running=True)
        with pytest.raises(errors.RequestInvalid, match="max_unavailable needs strategy ROLLING"):
            await fleet.reorder_free_queue(rollout=fleet_pb2.Rollout(max_unavailable="1"))
    assert (fake.requests, fake.identity_calls) == ([], 0)


@pytest.mark.parametrize("purpose", ["", "benchmark", "weight_update"])
@pytest.mark.parametrize("mode", ["fail", "preempt", "keep"])
def test_client_command_line_coordinator_and_sidecar_refuse_the_same_combinations(mode: str, purpose: str) -> None:
    for wait, quarantine in itertools.product((False, True), repeat=2):
        request = replica_pb2.ResetPrefixCacheRequest(
            running_requests=types_pb2.RunningRequests.Value(f"RUNNING_REQUESTS_{mode.upper()}"),
            wait_for_idle=wait,
            quarantine_running=quarantine,
            purpose=types_pb2.Purpose.Value(f"PURPOSE_{(purpose or 'unspecified').upper()}"),
        )
        spec = fleet_pb2.OperationSpec(reset=request, targets=fleet_pb2.Targets(all=True))
        flags = {"wait_for_idle": wait, "quarantine": quarantine, "purpose": purpose.replace("_", "-") or None}
        wrong = [
            _raises(Failure, rules.check, request),
            _raises(Failure, check_spec, spec),
            _raises(errors.RequestInvalid, arguments.sensible, spec),
            _raises(click.UsageError, refuse_contradictions, mode, **flags),
        ]
        expected = (
            (wait and mode != "fail")
            or (quarantine and mode != "keep")
            or (mode == "keep" and purpose == "weight_update" and not quarantine)
        )
        assert wrong == [expected] * 4, (wait, quarantine)


def _raises(kind: type[Exception], check: Callable[..., None], *given: Any, **more: Any) -> bool:
    try:
        check(*given, **more)
    except kind:
        return True
    return False


def test_limits_are_those_of_the_sidecars() -> None:
    assert weights.LONGEST_WEIGHT_VERSION == rules.LONGEST_WEIGHT_VERSION
    assert (weights.LEAST_LEASE_S, weights.LONGEST_LEASE_S) == (rules.LEAST_LEASE_S, rules.LONGEST_LEASE_S)
    assert arguments.LEAST_INTERVAL_S == rules.LEAST_INTERVAL_S
    assert arguments.LONGEST_INTERVAL_S == rules.LONGEST_INTERVAL_S
