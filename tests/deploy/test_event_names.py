"""Names that are cut are names still: an API server refuses an event or a CacheOperation whose name is none."""

from __future__ import annotations

import re

import pytest

from sidecar.coordinator.discovery.kube_rows import Meta, Pod
from sidecar.operator.events import event_name
from sidecar.operator.reset_on import operation_name

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""RFC 1123, as Kubernetes checks the name of an object; at most 253 characters."""


def is_name(text: str) -> bool:
    return len(text) <= 253 and SUBDOMAIN.fullmatch(text) is not None


def long_names() -> list[str]:
    """Valid names of pods and CacheOperations whose cuts fall on every kind of character."""
    names = ["a", "a" * 253]
    for separator in ("-", ".", "--", "---"):
        for cut in (40, 200):
            for before in range(1, 4):
                name = f"{'a' * (cut - before)}{separator}{'b' * 20}"
                names.append(name)
                names.append(f"{'a' * (cut - before - 3)}.b-{separator.replace('.', '-')}{'c' * 20}")
    return names


@pytest.mark.parametrize("name", long_names())
def test_the_name_of_an_event_about_a_long_name_is_a_name(name: str) -> None:
    assert is_name(name), "the table itself must hold names"
    assert is_name(event_name(name, "0123456789abcdef"))


@pytest.mark.parametrize("name", long_names())
def test_the_name_of_a_cacheoperation_for_a_long_named_pod_is_a_name(name: str) -> None:
    assert is_name(operation_name(Pod(Meta(name=name, uid="u")), "step-1", 123456789))


def test_what_an_api_server_refuses_is_refused_here() -> None:
    assert not is_name("a-.b")
    assert not is_name("a..b")
    assert not is_name("A")
    assert not is_name("a" * 254)
