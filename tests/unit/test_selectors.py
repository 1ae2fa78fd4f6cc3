"""Names, globs and label selectors."""

from __future__ import annotations

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.selectors import SelectorError, none_matched, parse_labels, parse_replicas, read_targets


def matches(text: str, **labels: str) -> bool:
    return all(requirement.holds(labels) for requirement in parse_labels(text))


@pytest.mark.parametrize(
    ("text", "labels", "expected"),
    [
        ("pool=a", {"pool": "a"}, True),
        ("pool=a", {"pool": "b"}, False),
        ("pool=a", {}, False),
        ("pool==a", {"pool": "a"}, True),
        ("pool!=a", {"pool": "b"}, True),
        ("pool!=a", {}, True),
        ("pool!=a", {"pool": "a"}, False),
        ("zone in (x, y)", {"zone": "y"}, True),
        ("zone in (x,y)", {}, False),
        ("zone notin (x,y)", {"zone": "z"}, True),
        ("zone notin (x,y)", {}, True),
        ("zone notin (x,y)", {"zone": "x"}, False),
        ("gpu", {"gpu": ""}, True),
        ("gpu", {}, False),
        ("!gpu", {}, True),
        ("!gpu", {"gpu": "h100"}, False),
        ("pool=a, zone in (x,y) ,!gpu", {"pool": "a", "zone": "x"}, True),
        ("pool=a,zone in (x,y)", {"pool": "a", "zone": "z"}, False),
        ("pool=", {"pool": ""}, True),
        ("app.kubernetes.io/name=vllm", {"app.kubernetes.io/name": "vllm"}, True),
    ],
)
def test_a_label_selector_means_what_it_means_in_kubernetes(text: str, labels: dict[str, str], expected: bool) -> None:
    assert matches(text, **labels) is expected


@pytest.mark.parametrize(
    "text", ["", "  ", "=a", "pool=a,", "pool=a zone=b", "zone in x", "zone in (x", "a b", "k=(a)", "zone in ()"]
)
def test_an_unreadable_selector_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(SelectorError) as caught:
        parse_labels(text)
    assert repr(text)[:6] in str(caught.value) or "empty" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", fleet_pb2.Targets(all=True)),
        ("*", fleet_pb2.Targets(all=True)),
        ("r0", fleet_pb2.Targets(names=["r0"])),
        ("r0, r1*,r[2-4]", fleet_pb2.Targets(names=["r0", "r1*", "r[2-4]"])),
        ("r[!0]", fleet_pb2.Targets(names=["r[!0]"])),
        ("pool=a", fleet_pb2.Targets(selector="pool=a")),
        ("zone in (x,y)", fleet_pb2.Targets(selector="zone in (x,y)")),
        ("!gpu", fleet_pb2.Targets(selector="!gpu")),
    ],
)
def test_what_a_person_types_becomes_names_or_a_selector(text: str, expected: fleet_pb2.Targets) -> None:
    assert parse_replicas(text) == expected


@pytest.mark.parametrize("text", ["", "r0,,r1", ",", "pool=a,"])
def test_an_empty_part_is_an_error(text: str) -> None:
    with pytest.raises(SelectorError):
        parse_replicas(text)


def test_names_match_as_globs_and_unmatched_ones_are_named() -> None:
    selection = read_targets(fleet_pb2.Targets(names=["r0", "x*"]))
    assert selection.matches("r0", {})
    assert selection.matches("x17", {})
    assert not selection.matches("R0", {})
    assert selection.unmatched(["r0", "y1"]) == ("x*",)


def test_only_one_way_to_choose_may_be_set() -> None:
    with pytest.raises(SelectorError, match="exactly one"):
        read_targets(fleet_pb2.Targets(all=True, selector="a=b"))


def test_nothing_set_means_every_replica() -> None:
    assert read_targets(fleet_pb2.Targets()).matches("anything", {})


def test_an_error_about_an_unknown_replica_lists_few_known_ones() -> None:
    text = str(none_matched(read_targets(fleet_pb2.Targets(names=["zz"])), [f"r{n:02}" for n in range(20)]))
    assert text == "no replica matches 'zz'; known: r00, r01, r02, r03, r04, r05, r06, r07 and 12 more"


def test_a_fleet_without_replicas_is_told_with_what_to_do_about_it() -> None:
    text = str(none_matched(read_targets(fleet_pb2.Targets(all=True)), []))
    assert "there are none yet" in text
    assert "add replicas" in text
