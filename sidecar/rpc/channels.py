"""Channels as every client here opens them.

gRPC's defaults are wrong for administration: a channel to a replica that was down reconnects only after up to two
minutes, proxies in the environment capture even loopback, and a client that pings more often than the server allows is
thrown off with GOAWAY too_many_pings. The numbers below and those of `server` are one agreement; change them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from sidecar.rpc import tls, tracing
from sidecar.rpc.addresses import Address

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Largest message sent or received by any server or client here; longer lists come in pages."""

CLIENT_KEEPALIVE_MS: Final = 30_000
"""A client pings an otherwise silent connection this often."""

SERVER_LEAST_PING_INTERVAL_MS: Final = 10_000
"""A server accepts pings this often; well under the client's interval, so that a long idle watch survives."""

CONNECT_TIMEOUT_MS: Final = 5_000
"""One connection attempt, TCP and TLS handshakes and HTTP/2 settings, may take this long."""

MAX_BACKOFF_MS: Final = 15_000
"""Longest wait between two connection attempts."""

ChannelOptions = list[tuple[str, int | str]]


def options() -> ChannelOptions:
    """Options of every client channel."""
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 250),
        # Despite its name this is how long one connection attempt may take at least: a handshake with a busy peer, or
        # TLS over a few network round trips, needs more than the backoff between attempts.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
        ("grpc.keepalive_time_ms", CLIENT_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Two channels to one address must not share a connection: closing one would not close the other.
        ("grpc.use_local_subchannel_pool", 1),
        # Retries are decided by callers, who know what a repeat means.
        ("grpc.enable_retries", 0),
    ]


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """How a client proves itself and whom it trusts."""

    tls: tls.ClientTls | None = None
    """None: plain text."""
    token_file: Path | None = None
    """A bearer token, read afresh for each call."""
    insecure: bool = False
    """Send a token in plain text beyond this machine. Only when asked for by name."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for one call: the bearer token, when there is one, and the trace context of the call that is being
        served. OSError or ValueError name the token file.
        """
        if self.token_file is None:
            return tracing.metadata()
        return (("authorization", f"Bearer {tls.read_token(self.token_file)}"), *tracing.metadata())

    def check(self, address: Address) -> None:
        """ValueError when a token would travel in plain text beyond this machine."""
        if self.token_file is not None and self.tls is None and not address.is_local and not self.insecure:
            raise ValueError(
                f"a token would go to {address} unencrypted; give a CA file for TLS, or --insecure to send it anyway"
            )


NO_SECURITY: Final = ClientSecurity()
"""Plain text and no credentials: for loopback and Unix sockets."""


def connect(
    address: Address, security: ClientSecurity = NO_SECURITY, more_options: Sequence[tuple[str, int | str]] = ()
) -> grpc.aio.Channel:
    """An asyncio channel; nothing is sent yet. It belongs to the running loop. Certificates are read now: open a new
    channel when `security.tls.version()` has changed.
    """
    security.check(address)
    wanted = [*options(), *more_options]
    if security.tls is None:
        return grpc.aio.insecure_channel(address.target, options=wanted)
    wanted.extend(security.tls.options())
    return grpc.aio.secure_channel(address.target, security.tls.credentials(), options=wanted)


def connect_blocking(address: Address, security: ClientSecurity = NO_SECURITY) -> grpc.Channel:
    """The same for blocking callers."""
    security.check(address)
    if security.tls is None:
        return grpc.insecure_channel(address.target, options=options())
    return grpc.secure_channel(
        address.target, security.tls.credentials(), options=[*options(), *security.tls.options()]
    )
