"""Certificates, for doctor: those in files here, and those that servers show."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sidecar.cli.finding import Finding
from sidecar.rpc import addresses
from sidecar.rpc.tls import ClientTls

EXPIRES_SOON_S: Final = 14 * 24 * 3600
HANDSHAKE_TIMEOUT_S: Final = 5.0
AT_ONCE: Final = 32


def in_file(what: str, path: Path, now: float) -> Finding:
    """Whether a PEM certificate can be read and is valid now. `now`: seconds since the epoch."""
    subject = f"{what} {path}"
    try:
        # The only public way to decode a certificate without a further dependency.
        ends = ssl.cert_time_to_seconds(_not_after(path))
    except OSError as error:
        text = f"cannot be read by uid {os.getuid()}: {error.strerror or error}"
        return Finding("wrong", subject, text, "check path and mode")
    except (ValueError, KeyError, ssl.SSLError) as error:
        return Finding("wrong", subject, f"holds no PEM certificate ({error})", "give the right file")
    return judged(subject, ends, now)


def judged(subject: str, ends: float, now: float) -> Finding:
    """A certificate that is valid until `ends`, seconds since the epoch."""
    day = time.strftime("%Y-%m-%d", time.gmtime(ends))
    if ends <= now:
        return Finding("wrong", subject, f"expired on {day}", "renew it")
    if ends - now < EXPIRES_SOON_S:
        return Finding("warning", subject, f"expires on {day}", "renew it soon")
    return Finding("ok", subject, f"valid until {day}")


async def served(servers: Mapping[str, str], tls: ClientTls, now: float) -> list[Finding]:
    """A finding for the certificate that each server shows. `servers`: what it is -> its address."""
    try:
        context = _context(tls)
    except (OSError, ssl.SSLError):
        return []  # the files are a finding of their own
    gate = asyncio.Semaphore(AT_ONCE)

    async def look(what: str, address: str) -> Finding | None:
        async with gate:
            return await _look(f"certificate of {what}", address, context, tls.server_name, now)

    found = await asyncio.gather(*(look(what, address) for what, address in servers.items()))
    return [finding for finding in found if finding is not None]


async def _look(subject: str, address: str, context: ssl.SSLContext, server_name: str, now: float) -> Finding | None:
    """None where there is nothing to look at: a Unix socket, or nobody answers, which is told elsewhere."""
    place = addresses.parse(address)
    if not place.host:
        return None
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(
                place.host, place.port, ssl=context, server_hostname=server_name or place.host
            )
    except ssl.SSLCertVerificationError as error:
        return Finding("wrong", subject, f"is not trusted: {error.verify_message}", "check --ca and --server-name")
    except (OSError, TimeoutError, ssl.SSLError):
        return None
    try:
        shown = writer.get_extra_info("peercert") or {}
        ends = shown.get("notAfter")
        return judged(subject, ssl.cert_time_to_seconds(ends), now) if isinstance(ends, str) else None
    finally:
        writer.transport.abort()


def _context(tls: ClientTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca_file) if tls.ca_file else None)
    context.set_alpn_protocols(["h2"])
    if tls.cert_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    return context


def _not_after(path: Path) -> str:
    path.read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=str(path))
    ends = [str(entry["notAfter"]) for entry in context.get_ca_certs() if "notAfter" in entry]
    if ends:
        return min(ends, key=ssl.cert_time_to_seconds)
    # A leaf certificate is not listed among the CAs, so OpenSSL is asked for it alone.
    decoded = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    return str(decoded["notAfter"])
