"""A gRPC server that says early why it cannot start, and never shares or steals an address.

Left alone, gRPC lets a second server share a port silently (SO_REUSEPORT), unlinks the Unix socket of a live server,
and answers everything beyond loopback in plain text to anyone. Here a taken address is an error that names it, and an
address beyond this machine needs TLS or tokens, or an explicit word that it shall be open.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from sidecar.rpc import addresses, tracing
from sidecar.rpc.addresses import Address
from sidecar.rpc.auth import Authorizer
from sidecar.rpc.channels import MAX_MESSAGE_BYTES, SERVER_LEAST_PING_INTERVAL_MS
from sidecar.rpc.interceptors import MAX_METADATA_BYTES, Gate
from sidecar.rpc.late_calls import Instance
from sidecar.rpc.tls import ServerTls

_HARD_LIMIT: Final = 4
"""What gRPC itself takes, in multiples of what the gate takes: between the two a refusal has its details."""


class CannotListen(OSError):  # noqa: N818 - read as a sentence
    """A listen address cannot be had, or must not; the text names it and what to do."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where a server listens and whom it serves."""

    listen: Sequence[Address]
    authorizer: Authorizer = field(default_factory=lambda: Authorizer({}))
    tls: ServerTls | None = None
    insecure: bool = False
    """Serve beyond this machine without TLS or without credentials. Only when asked for by name."""
    max_calls: int = 256
    spans: tracing.SpanMaker | None = None
    """See `tracing.span_maker`."""
    reflection: Sequence[str] = ()
    """Full service names to describe by reflection; served only when every address is on loopback."""


def check_exposure(settings: ServerSettings) -> None:
    """CannotListen when an address beyond this machine is not protected."""
    for address in settings.listen:
        if address.is_local or settings.insecure:
            continue
        missing = []
        if settings.tls is None:
            missing.append("TLS (--tls-cert and --tls-key)")
        if not settings.authorizer.enforced:
            missing.append("credentials (--tls-client-ca or --token-file)")
        if missing:
            raise CannotListen(
                f"{address} can be reached from other machines and needs {' and '.join(missing)}; "
                "listen on 127.0.0.1, or say --insecure to serve everyone"
            )


def check_free(settings: ServerSettings) -> None:
    """CannotListen when an address is taken or cannot be bound."""
    for address in settings.listen:
        why = addresses.why_not_bindable(address)
        if why:
            raise CannotListen(why)


def gate(settings: ServerSettings, instance: Instance | None = None) -> Gate:
    """What every call of a server passes through."""
    return Gate(settings.authorizer, max_calls=settings.max_calls, spans=settings.spans, instance=instance)


def build(settings: ServerSettings, passing: Gate | None = None) -> grpc.aio.Server:
    """A server without services and addresses yet, whose calls pass the gate; None makes one. Belongs to the running
    loop.
    """
    check_exposure(settings)
    return grpc.aio.server(
        interceptors=[passing or gate(settings)],
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _HARD_LIMIT * MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            # Two limits, and between them gRPC refuses at random: one number for both.
            ("grpc.max_metadata_size", _HARD_LIMIT * MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _HARD_LIMIT * MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", settings.max_calls + 64),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", SERVER_LEAST_PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", 2),
        ],
    )


def bind(server: grpc.aio.Server, settings: ServerSettings) -> list[Address]:
    """Bind every address; returns them with the ports the kernel chose. CannotListen names the one that failed."""
    check_free(settings)
    credentials = settings.tls.credentials() if settings.tls else None
    bound: list[Address] = []
    for address in settings.listen:
        # gRPC makes a socket and listens on it in one step: nobody else may connect before its mode is set.
        mask = os.umask(0o177) if address.kind == "unix" else None
        try:
            if credentials is None or address.kind == "unix":
                port = server.add_insecure_port(address.target)
            else:
                port = server.add_secure_port(address.target, credentials)
        except RuntimeError as error:
            why = addresses.why_not_bindable(address) or f"{address}: gRPC could not bind it: {error}"
            raise CannotListen(why) from error
        finally:
            if mask is not None:
                os.umask(mask)
        if address.kind == "unix":
            Path(address.path).chmod(0o600)  # a directory with an ACL of its own heeds no umask
            bound.append(address)
        else:
            bound.append(address.with_port(port))
    return bound


def add_reflection(server: grpc.aio.Server, settings: ServerSettings) -> bool:
    """Register reflection when every address is on loopback; returns whether it was."""
    if not settings.reflection or not all(address.is_local for address in settings.listen):
        return False
    from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]  # start-up time: loaded only where it is used

    reflection.enable_server_reflection([*settings.reflection, reflection.SERVICE_NAME], server)
    return True


def remove_unix_sockets(settings: ServerSettings) -> None:
    """After the server has stopped: leave no socket behind."""
    for address in settings.listen:
        if address.kind == "unix" and os.path.exists(address.path):
            os.unlink(address.path)
