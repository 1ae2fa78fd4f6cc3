"""Addresses: what people type, read or refused in one sentence."""

from __future__ import annotations

import socket

import pytest

from sidecar.rpc import addresses
from sidecar.rpc.addresses import parse, parse_listen


@pytest.mark.parametrize(
    ("text", "target", "local"),
    [
        ("127.0.0.1:7700", "127.0.0.1:7700", True),
        ("localhost:1", "localhost:1", True),
        ("[::1]:7700", "[::1]:7700", True),
        ("[fd00::12]:7700", "[fd00::12]:7700", False),
        ("vllm-0.vllm.default.svc:7700", "vllm-0.vllm.default.svc:7700", False),
        ("dns:///vllm.default:7700", "dns:///vllm.default:7700", False),
        ("unix:/run/kvctl/api.sock", "unix:/run/kvctl/api.sock", True),
        ("unix:///run/kvctl/api.sock", "unix:/run/kvctl/api.sock", True),
        (" 10.0.0.1:80\n", "10.0.0.1:80", False),
    ],
)
def test_every_usual_form_is_read(text, target, local):
    address = parse(text)
    assert (address.target, address.is_local) == (target, local)
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("localhost", "no port"),
        ("::1:7700", "brackets"),
        ("[::g]:1", "not an IPv6"),
        ("host:port", "not a number"),
        ("host:70000", "1 to 65535"),
        ("host:0", "port 0"),
        ("300.1.1.1:80", "not a valid IPv4"),
        ("ho st:1", "not a host name"),
        ("http://host:80", "without the scheme"),
        ("tcp://10.0.0.1:7700", "enableServiceLinks"),
        ("unix:", "no path"),
        ("unix:/" + "x" * 120, "107"),
    ],
)
def test_a_wrong_address_is_one_clear_sentence(text, says):
    with pytest.raises(ValueError, match=says) as caught:
        parse(text, what="--replica")
    assert str(caught.value).startswith("--replica")


def test_listening_takes_port_zero_and_a_bare_port_and_no_dns():
    assert parse_listen("127.0.0.1:0").port == 0
    assert parse_listen(":7700").host == "::"
    with pytest.raises(ValueError, match="cannot be listened on"):
        parse_listen("dns:///x:1")


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is already in use" in addresses.why_not_bindable(parse(f"127.0.0.1:{port}"))
    assert addresses.why_not_bindable(parse(f"127.0.0.1:{port}")) == ""


def test_an_address_of_another_machine_cannot_be_bound():
    assert "not an address of this machine" in addresses.why_not_bindable(parse("203.0.113.7:7700"))


def test_a_live_unix_socket_is_not_taken_away_and_a_dead_one_is_free(tmp_path):
    path = tmp_path / "s"
    address = parse(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen()
        assert "already in use" in addresses.why_not_bindable(address)
    assert addresses.why_not_bindable(address) == ""
    path.unlink()
    path.write_text("notes")
    assert "not a socket" in addresses.why_not_bindable(address)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    assert "not a socket" in addresses.why_not_bindable(address)


def test_service_links_are_recognised():
    assert addresses.service_link("KVCTL_SIDECAR_PORT", "tcp://10.0.0.1:7700")
    assert not addresses.service_link("KVCTL_SIDECAR_LISTEN", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("listen", "metrics", "says"),
    [
        (["127.0.0.1:7700", "127.0.0.1:7700"], None, "--listen has 127.0.0.1:7700 twice"),
        (["unix:/run/a.sock", "unix:///run/a.sock"], None, "--listen has unix:/run/a.sock twice"),
        (["[::1]:7700", "[0:0::1]:7700"], None, "both take port 7700"),
        (["localhost:7700", "127.0.0.1:7700"], None, "--listen localhost:7700 and 127.0.0.1:7700 both take port 7700"),
        ([":7700", "127.0.0.1:7700"], None, "both take port 7700"),
        (["0.0.0.0:7700", "[::1]:7700"], None, "both take port 7700"),
        (["[::]:7700"], "127.0.0.1:7700", "--listen [::]:7700 and --metrics 127.0.0.1:7700 both take port 7700"),
        (["127.0.0.1:7700"], "0.0.0.0:7700", "give them different ports"),
        (["10.0.0.1:7700", "10.0.0.1:7701"], "10.0.0.1:7701", "--listen 10.0.0.1:7701 and --metrics"),
        (["127.0.0.1:0", "127.0.0.1:0"], "127.0.0.1:0", ""),
        (["127.0.0.1:7700", "[::1]:7700", "unix:/run/a.sock"], "10.0.0.1:7700", ""),
        ([":7700"], "127.0.0.1:7701", ""),
        (["pod:7700"], "POD:7700", "both take port 7700"),
    ],
)
def test_addresses_that_cannot_be_had_together_are_told(listen, metrics, says):
    told = addresses.why_they_clash([parse_listen(text) for text in listen], metrics and parse_listen(metrics))
    assert says in told
    assert bool(says) == bool(told)
