"""Certificates and tokens that are replaced while the process runs.

Certificate managers and Kubernetes rewrite files in place or swap a symlink, every day or every hour. A server that
read them once serves an expired certificate weeks later. So a server looks at its files at each handshake, a client
when it opens a channel, and a token is read for each use; a file caught half-written keeps the last good content in
force and is reported. Errors name the path, the uid that may not read it, and what was expected. Content never appears.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

LOG: Final = logging.getLogger(__name__)

_MAX_FILE_BYTES: Final = 1024 * 1024


def read_file(path: Path, what: str) -> bytes:
    """The content of a small file. OSError names what it is for, the path, and the uid."""
    try:
        # O_NONBLOCK: opening a pipe waits for its writer, and everything here would wait with it.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{what} {path} is not a regular file; it is read again and again")
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise OSError(
            error.errno, f"{what} {path} cannot be read by uid {os.getuid()}: {error.strerror or error}"
        ) from error
    if not content.strip():
        raise ValueError(f"{what} {path} is empty")
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{what} {path} is larger than {_MAX_FILE_BYTES} bytes")
    return content


def read_token(path: Path) -> str:
    """The bearer token in a file: its first line, trimmed. Files written by `echo` or a Secret end in a newline."""
    for token in read_tokens(path):
        return token
    raise ValueError(f"token file {path} has no token")


def read_tokens(path: Path) -> list[str]:
    """Every token in a file, one a line, trimmed; several while one replaces another. Lines with # are comments."""
    try:
        text = read_file(path, "token file").decode("ascii")
    except UnicodeDecodeError:
        raise ValueError(f"token file {path} has characters that are not ASCII") from None
    lines = [line.strip() for line in text.splitlines()]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if any(len(token.split()) != 1 for token in tokens):
        raise ValueError(f"token file {path}: a token contains a space; expected one token a line")
    return tokens


def stamp(*paths: Path | None) -> tuple[tuple[int, int, int], ...]:
    """What changes when any of the files is rewritten or a symlink is swapped; unreadable files count as zeros."""
    found: list[tuple[int, int, int]] = []
    for path in paths:
        if path is None:
            continue
        try:
            status = path.stat()
        except OSError:
            found.append((0, 0, 0))
            continue
        found.append((status.st_mtime_ns, status.st_ino, status.st_size))
    return tuple(found)


def check_pair(cert_file: Path, key_file: Path) -> None:
    """ValueError unless the files hold a certificate and the key that belongs to it.

    gRPC itself takes anything here and blames the port when it binds, so OpenSSL is asked first, in a context that is
    thrown away.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encrypted = False

    def passphrase() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(cert_file, key_file, passphrase)
    except ssl.SSLError as error:
        if encrypted:
            raise ValueError(f"key file {key_file} is encrypted; expected a key without a passphrase") from error
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"key {key_file} does not belong to certificate {cert_file}") from error
        check_certificates(cert_file, "certificate file")
        if error.reason == "KEY_TYPE_MISMATCH":
            raise ValueError(f"key {key_file} does not belong to certificate {cert_file}") from error
        raise ValueError(
            f"key file {key_file} contains no usable private key, or {cert_file} is refused: {error.reason or error}"
        ) from error


def check_certificates(path: Path, what: str) -> None:
    """ValueError unless the file holds at least one certificate that can be parsed, OSError when it cannot be read."""
    read_file(path, what)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ValueError(f"{what} {path} contains no certificate; expected PEM") from error


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client trusts, and its own certificate for mutual TLS."""

    ca_file: Path | None = None
    """PEM bundle; None trusts what gRPC brings along."""
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""
    """Name expected in the server's certificate when it is not the one in the address."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs both a certificate file and a key file")

    def version(self) -> tuple[tuple[int, int, int], ...]:
        """Changes when a file was replaced: open a new channel then."""
        return stamp(self.ca_file, self.cert_file, self.key_file)

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials from the files as they are now."""
        return grpc.ssl_channel_credentials(
            root_certificates=read_file(self.ca_file, "CA file") if self.ca_file else None,
            private_key=read_file(self.key_file, "key file") if self.key_file else None,
            certificate_chain=read_file(self.cert_file, "certificate file") if self.cert_file else None,
        )

    def check(self) -> None:
        """OSError or ValueError when the files cannot be used now; a channel would only say that nobody answers."""
        if self.ca_file is not None:
            check_certificates(self.ca_file, "CA file")
        if self.cert_file is not None and self.key_file is not None:
            read_file(self.cert_file, "certificate file")
            read_file(self.key_file, "key file")
            check_pair(self.cert_file, self.key_file)

    def options(self) -> list[tuple[str, int | str]]:
        """Channel options that go with these credentials."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate, and whose clients it accepts."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    """With it, every client must show a certificate signed by it."""

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that look at the files again at every handshake. OSError or ValueError when they cannot be
        read now.
        """
        reloader = _Reloader(self)
        return grpc.dynamic_ssl_server_credentials(
            reloader.configuration,
            reloader.fetch,  # type: ignore[arg-type]  # None is documented as "no change"
            require_client_authentication=self.client_ca_file is not None,
        )


class _Reloader:
    """Hands gRPC a new configuration when the files have changed. Called on gRPC's threads, one handshake each."""

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._stamp = self._look()
        self.configuration = self._load()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None keeps what is in force."""
        seen = self._look()
        if seen == self._stamp:
            return None
        try:
            loaded = self._load()
        except (OSError, ValueError) as error:
            # Half written or not readable yet: the next handshake looks again, this one uses what worked before.
            LOG.warning("certificate not reloaded, the previous one stays in force: %s", error)
            return None
        if seen != self._look():
            return None  # replaced while it was read: certificate and key may be of different ages
        self._stamp = seen
        LOG.info("certificate reloaded from %s", self._files.cert_file)
        return loaded

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        return stamp(self._files.cert_file, self._files.key_file, self._files.client_ca_file)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        key = read_file(self._files.key_file, "key file")
        chain = read_file(self._files.cert_file, "certificate file")
        if b"-----BEGIN" not in chain or b"-----END" not in chain:
            raise ValueError(f"certificate file {self._files.cert_file} contains no certificate; expected PEM")
        if b"PRIVATE KEY-----" not in key or b"-----END" not in key:
            raise ValueError(f"key file {self._files.key_file} contains no private key; expected PEM")
        authority = self._files.client_ca_file
        roots = read_file(authority, "client CA file") if authority else None
        check_pair(self._files.cert_file, self._files.key_file)
        if authority is not None:
            check_certificates(authority, "client CA file")
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=roots)
