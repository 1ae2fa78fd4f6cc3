"""The inventory, discovery over it, and discovery over DNS."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from sidecar.coordinator.discovery import DiscoveryError, dns
from sidecar.coordinator.discovery.dns import DnsDiscovery
from sidecar.coordinator.discovery.sources import discovery_of
from sidecar.coordinator.discovery.static import InventoryDiscovery
from sidecar.coordinator.inventory import InventoryError, parse_inventory
from sidecar.coordinator.targets import Target

GOOD = """\
replicas:
  - name: r0
    address: "127.0.0.1:9001"
    labels: {pool: a, size: 70}
  - address: "[::1]:9002"
"""


def test_names_addresses_and_labels_are_read() -> None:
    assert parse_inventory(GOOD, "f.yaml") == (
        Target("127.0.0.1:9001", "r0", {"pool": "a", "size": "70"}),
        Target("[::1]:9002"),
    )


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("replicas:\n- {name: r0, adress: x:1}\n", 2, ["'adress'", "one of name, address, labels"]),
        ("replicas:\n- {name: r0}\n", 2, ["no 'address'"]),
        ("replicas:\n- address: nonsense\n", 2, ["'nonsense'", "no port"]),
        ("replicas:\n- address: h:99999\n", 2, ["99999"]),
        ("replicas:\n- address: dns:///x:1\n", 2, ["DNS target"]),
        ("replicas:\n- {address: 'a:1'}\n- {address: 'a:1'}\n", 3, ["listed twice"]),
        ("replicas:\n- {name: r, address: 'a:1'}\n- {name: r, address: 'b:1'}\n", 3, ["given to two"]),
        ("replicas:\n- {address: 'a:1', labels: [x]}\n", 2, ["labels is not a mapping"]),
        ("replicas:\n- {address: 'a:1', labels: {'a b': x}}\n", 2, ["'a b'"]),
        ("replicas:\n- {name: 'r 0', address: 'a:1'}\n", 2, ["'r 0'"]),
        ("replicas:\n- {name: all, address: 'a:1'}\n", 2, ["'all'", "every replica", "another name"]),
        ("replicas:\n- {name: r0, name: r1, address: 'a:1'}\n", 2, ["'name' is given twice"]),
        ("replicas: {a: b}\n", 1, ["not a list"]),
        ("servers: []\n", 1, ["'servers'", "replicas"]),
        ("- a\n", 1, ["not a mapping"]),
        ("replicas:\n  - [\n", 3, ["not YAML"]),
    ],
)
def test_an_error_names_file_line_and_what_was_expected(text: str, line: int, words: list[str]) -> None:
    with pytest.raises(InventoryError) as caught:
        parse_inventory(text, "fleet.yaml")
    message = str(caught.value)
    assert message.startswith(f"inventory fleet.yaml, line {line}: ")
    for word in words:
        assert word in message


def test_a_target_on_the_command_line_is_not_named_like_the_whole_fleet() -> None:
    with pytest.raises(ValueError, match="the name 'all' means every replica"):
        discovery_of(["all=127.0.0.1:7700"])


@pytest.mark.parametrize("name", ["x@127.0.0.1:2", "a b", "a\x1b[31m", "-a", "a" * 254])
def test_a_target_on_the_command_line_has_a_name_as_in_an_inventory(name: str) -> None:
    with pytest.raises(ValueError, match="is not one; expected letters"):
        discovery_of([f"{name}=127.0.0.1:7700"])


async def test_a_target_that_is_given_again_word_for_word_is_one_target() -> None:
    discovered = await discovery_of(["h:1", "h:1", "a=h:1", "h:1", "a=h:1"]).targets()
    assert [(target.name, target.address) for target in discovered.targets] == [("", "h:1"), ("a", "h:1")]


def test_an_empty_file_says_what_is_missing() -> None:
    with pytest.raises(InventoryError, match="is empty; expected 'replicas:'"):
        parse_inventory("", "fleet.yaml")


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(GOOD)
    discovery = InventoryDiscovery(file)
    assert len((await discovery.targets()).targets) == 2
    file.write_text(GOOD + '  - address: "127.0.0.1:9003"\n')
    assert len((await discovery.targets()).targets) == 3


async def test_a_file_broken_for_a_moment_keeps_the_last_list_and_is_incomplete(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(GOOD)
    discovery = InventoryDiscovery(file)
    await discovery.targets()
    file.write_text("replicas: [")
    found = await discovery.targets()
    assert len(found.targets) == 2
    assert found.incomplete
    assert "not YAML" in found.warnings[0]
    os.unlink(file)
    assert "cannot be read" in (await discovery.targets()).warnings[0]


async def test_a_file_that_never_was_good_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="cannot be read: No such file"):
        await InventoryDiscovery(tmp_path / "none.yaml").targets()


# --- DNS -----------------------------------------------------------------------------------------------------------


def resolver(v4: list[str] | int, v6: list[str] | int):
    async def resolve(host: str, family: socket.AddressFamily) -> list[str]:
        answer = v4 if family == socket.AF_INET else v6
        if isinstance(answer, int):
            raise socket.gaierror(answer, "told so")
        return answer

    return resolve


async def test_every_address_of_both_families_is_a_target() -> None:
    found = await DnsDiscovery("dns:///vllm:7700", resolver(["10.0.0.2", "10.0.0.1"], ["fd00::1"])).targets()
    assert [target.address for target in found.targets] == ["10.0.0.1:7700", "10.0.0.2:7700", "[fd00::1]:7700"]
    assert {target.server_name for target in found.targets} == {"vllm"}
    assert not found.incomplete


async def test_a_missing_family_is_no_trouble_and_a_failing_one_makes_it_incomplete() -> None:
    assert not (await DnsDiscovery("dns:///v:1", resolver(["10.0.0.1"], socket.EAI_NONAME)).targets()).incomplete
    found = await DnsDiscovery("dns:///v:1", resolver(["10.0.0.1"], socket.EAI_AGAIN)).targets()
    assert found.incomplete
    assert "AAAA records of v" in found.warnings[0]


async def test_a_name_is_resolved_anew_each_time() -> None:
    addresses = ["10.0.0.1"]
    discovery = DnsDiscovery("dns:///v:1", resolver(addresses, []))
    assert len((await discovery.targets()).targets) == 1
    addresses.append("10.0.0.2")
    assert len((await discovery.targets()).targets) == 2


async def test_a_name_without_addresses_is_an_error() -> None:
    with pytest.raises(DiscoveryError, match="gives no address"):
        await DnsDiscovery("dns:///v:1", resolver(socket.EAI_NONAME, socket.EAI_NONAME)).targets()


def test_a_resolver_that_does_not_answer_keeps_nobody_longer_than_the_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(30))
    monkeypatch.setattr(dns, "RESOLVE_TIMEOUT_S", 0.05)
    began = time.monotonic()
    try:
        with pytest.raises(DiscoveryError, match="no answer for A records of v"):
            asyncio.run(DnsDiscovery("dns:///v:1").targets())
    finally:
        over.set()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "url",
    ["dns:///v", "dns://server/v:1", "v:1", "dns:///v:0", "dns:///v:70000", "dns:///a..b:1", f"dns:///{'a' * 64}:1"],
)
def test_what_is_no_dns_target_is_an_error(url: str) -> None:
    with pytest.raises(DiscoveryError, match="expected dns:///name:port"):
        DnsDiscovery(url)
