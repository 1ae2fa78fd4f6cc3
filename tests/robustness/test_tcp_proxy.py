"""The bad network itself: what each fault does to one connection, told by plain sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.contract.sidecar_process import wait_until
from tests.robustness.tcp_proxy import Network, TcpProxy


@dataclass
class Line:
    """A connection through a proxy, both ends of it."""

    proxy: TcpProxy
    near: socket.socket
    far: socket.socket
    listener: socket.socket


@pytest.fixture
def line() -> Iterator[Line]:
    network = Network()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        proxy = network.proxy("{}:{}".format(*listener.getsockname()))
        near = dial(proxy)
        far, _ = listener.accept()
        with near, far:
            far.settimeout(30)
            wait_until(lambda: proxy.connections == 1, 30)
            yield Line(proxy, near, far, listener)
    network.close()


def dial(proxy: TcpProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def silent(end: socket.socket) -> bool:
    """Whether nothing has arrived at this end so far."""
    end.setblocking(False)
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    finally:
        end.settimeout(30)


def test_bytes_and_the_end_of_them_go_through_both_ways(line: Line) -> None:
    line.near.sendall(b"question")
    assert line.far.recv(100) == b"question"
    line.far.sendall(b"answer")
    assert line.near.recv(100) == b"answer"
    line.near.shutdown(socket.SHUT_WR)
    assert line.far.recv(100) == b""
    line.far.close()
    assert line.near.recv(100) == b""
    wait_until(lambda: line.proxy.connections == 0, 30)


def test_a_black_hole_keeps_everything_until_it_is_mended(line: Line) -> None:
    line.proxy.black_hole()
    line.near.sendall(b"one")
    line.far.sendall(b"two")
    wait_until(lambda: line.proxy.kept_bytes == 6, 30)
    assert silent(line.near)
    assert silent(line.far)
    line.proxy.mend()
    assert line.far.recv(100) == b"one"
    assert line.near.recv(100) == b"two"


def test_a_black_hole_can_swallow_answers_only(line: Line) -> None:
    line.proxy.black_hole("back")
    line.near.sendall(b"question")
    assert line.far.recv(100) == b"question"
    line.far.sendall(b"answer")
    wait_until(lambda: line.proxy.kept_bytes == 6, 30)
    assert silent(line.near)


def test_a_black_hole_can_let_the_first_part_go_and_keep_the_rest(line: Line) -> None:
    line.proxy.black_hole()
    line.near.sendall(b"one")
    wait_until(lambda: line.proxy.kept("forth") == 3, 30)
    line.proxy.black_hole()
    line.near.sendall(b"two")
    wait_until(lambda: line.proxy.kept("forth") == 6, 30)
    line.proxy.release_first_lot()
    assert line.far.recv(100) == b"one"
    assert silent(line.far)
    line.proxy.mend()
    assert line.far.recv(100) == b"two"


def test_a_reset_reaches_both_ends_and_new_connections_too_while_they_are_refused(line: Line) -> None:
    line.proxy.reset(refuse=True)
    for end in (line.near, line.far):
        with pytest.raises(ConnectionResetError):
            end.recv(100)
    with pytest.raises(ConnectionResetError), dial(line.proxy) as refused:
        refused.recv(100)
    line.proxy.mend()
    with dial(line.proxy) as again:
        far, _ = line.listener.accept()
        with far:
            again.sendall(b"question")
            assert far.recv(100) == b"question"


def test_what_is_delayed_arrives_later_and_whole(line: Line) -> None:
    line.proxy.delay(0.3)
    sent = time.monotonic()
    line.near.sendall(b"question")
    assert line.far.recv(100) == b"question"
    assert time.monotonic() - sent >= 0.3


def test_what_is_throttled_takes_as_long_as_its_bytes(line: Line) -> None:
    line.proxy.throttle(10_000)
    sent = time.monotonic()
    line.near.sendall(bytes(4_000))
    got = 0
    while got < 4_000:
        got += len(line.far.recv(4_000))
    assert time.monotonic() - sent >= 0.2


def test_a_half_closed_connection_still_carries_the_other_way(line: Line) -> None:
    line.proxy.half_close("back")
    assert line.near.recv(100) == b""
    line.near.sendall(b"question")
    assert line.far.recv(100) == b"question"


def test_a_proxy_to_nobody_resets(line: Line) -> None:
    line.listener.close()
    with pytest.raises(ConnectionResetError), dial(line.proxy) as unheard:
        unheard.recv(100)
