"""A gRPC call as a few HTTP/2 frames by hand: for what no gRPC client would send."""

from __future__ import annotations

import socket
import struct

from sidecar.rpc.addresses import Address

_HEADERS, _DATA, _SETTINGS = 1, 0, 4
_END_HEADERS, _END_STREAM = 4, 1

EMPTY_MESSAGE = b"\0\0\0\0\0"


def send_call(
    address: Address, path: bytes, body: bytes = EMPTY_MESSAGE, more: tuple[tuple[bytes, bytes], ...] = ()
) -> socket.socket:
    """Make one call on a connection of its own; the open socket."""
    if address.kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.path)
    else:
        connection = socket.create_connection((address.host, address.port), 10)
    connection.settimeout(30)
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"test"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    ]
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0)
        + _frame(_HEADERS, _END_HEADERS, 1, block)
        + _frame(_DATA, _END_STREAM, 1, body)
    )
    return connection


def answer(connection: socket.socket) -> bytes:
    """Everything that comes until the stream ends or the connection does; names and values of headers are legible."""
    received = b""
    with connection:
        while not _ended(received):
            chunk = connection.recv(65536)
            if not chunk:
                break
            received += chunk
    return received


def _ended(received: bytes) -> bool:
    """Whether a whole frame that ends stream 1 has come."""
    while len(received) >= 9:
        length = int.from_bytes(received[:3], "big")
        kind, flags, stream = received[3], received[4], int.from_bytes(received[5:9], "big")
        if len(received) < 9 + length:
            return False
        if stream == 1 and ((kind in (_DATA, _HEADERS) and flags & _END_STREAM) or kind == 3):
            return True
        received = received[9 + length :]
    return False


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(text: bytes) -> bytes:
    """A string of HPACK, not Huffman coded, shorter than 127 bytes."""
    assert len(text) < 127
    return bytes([len(text)]) + text
